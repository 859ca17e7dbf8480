"""What hooks of a module keep where the module itself does not lead: a recorder, a list that a closure has captured.

The user's script, a callback or a library may put a hook on a submodule that collects activations. Of such an object
the module knows nothing but the hook.
"""

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_dpx.python_objects.kept_values import kept_values
from lightning_dpx.python_objects.module_hooks import OF_MODULES, hooks_of_parameter, is_ours
from lightning_dpx.python_objects.object_contents import own_values
from lightning_dpx.python_objects.object_graph import ATOMS, ObjectGraph, is_tensor_or_module
from lightning_dpx.python_objects.origin import is_library, package_of, runs_steps
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.torch_compat import global_module_hooks


def hooks_of_parameters(module: nn.Module) -> dict[str, Any]:
    """The user's hooks on the parameters of ``module``, by name."""
    found: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        for number, hook in hooks_of_parameter(parameter).items():
            found[f"{_name_of(hook)} (a hook of {name}, {number})"] = hook
    return found


def hooks_of_all_modules() -> list[Any]:
    """The user's hooks that torch calls for every module of the process."""
    return [hook for held in global_module_hooks for hook in list(held.values()) if not is_ours(hook)]


def kept_by_hooks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and values of what hooks of submodules, and of all modules, keep where no attribute of these leads."""
    hooks = [hook for child in module.modules() for hook in _hooks_of(child)] + hooks_of_all_modules()
    if not hooks:
        return
    # What an attribute leads to is looked at there, and comes together by its own rules.
    own = ObjectGraph(is_tensor_or_module, _leads_to_run)
    own.walk(value for child in module.modules() for _, value in own_values(child))
    seen = set(own.objects).union(map(id, module.modules()))
    for hook in hooks:
        for name, value in _kept_by(hook, seen):
            # Numbers are no objects that two hooks could share, though small ones are the same everywhere.
            if type(value) not in ATOMS:
                if id(value) in seen or _leads_to_run(value):
                    continue
                seen.add(id(value))
            if isinstance(value, nn.Module):
                yield from _kept_by_module(name, value, seen)
            else:
                yield name, value


def _hooks_of(child: nn.Module) -> Iterator[Any]:
    for hooks_of in OF_MODULES:
        for hook in hooks_of(child).values():
            # Those of torch's own parametrizations keep nothing that a step changes.
            if not is_ours(hook) and package_of(getattr(type(hook), "__module__", None)) != "torch":
                yield hook


def _kept_by(hook: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """What a hook keeps, by name; of an object whose method it is, or that it is itself, the attributes."""
    while isinstance(hook, functools.partial):
        yield from ((f"{_name_of(hook)}.args[{place}]", value) for place, value in enumerate(hook.args))
        hook = hook.func
    if isinstance(hook, types.FunctionType):
        yield from ((f"{_name_of(hook)}.{key}", value) for key, value in (kept_values(hook) or {}).items())
        return
    owner = getattr(hook, "__self__", hook)
    name = type(owner).__name__
    if isinstance(owner, nn.Module):
        if id(owner) not in seen:
            seen.add(id(owner))
            yield from _kept_by_module(name, owner, seen)
    elif not is_library(type(owner)):
        yield from ((f"{name}.{key}", value) for key, value in (own_attributes(owner) or {}).items())


def _kept_by_module(name: str, module: nn.Module, known: set[int]) -> Iterator[tuple[str, Any]]:
    """Attributes and buffers of a module that is no part of the user's: a recorder, a metric."""
    for path, child in module.named_modules(prefix=name):
        # It may hold the user's module, or parts of it.
        if child is not module and id(child) in known:
            continue
        for key, value in [*own_values(child), *child.named_buffers(recurse=False)]:
            yield f"{path}.{key}", value


def _name_of(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    name: str = getattr(hook, "__qualname__", type(hook).__qualname__)
    return name.replace("<locals>.", "")


def _leads_to_run(value: Any) -> bool:
    # Behind a trainer lies all that there is, callbacks among it.
    return runs_steps(type(value)) and own_attributes(value) is not None
