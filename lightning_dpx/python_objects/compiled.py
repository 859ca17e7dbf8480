"""What ``torch.compile`` has compiled in a module, and runs in which it is as if it had not."""

import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_dpx.python_objects.code_map import contents_of, function_in
from lightning_dpx.python_objects.object_contents import own_values
from lightning_dpx.python_objects.origin import is_library
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.python_objects.reachable import globals_of
from lightning_dpx.python_objects.shared_patch import SharedPatch, Undo
from lightning_dpx.torch_compat import OptimizedModule, compiled_call_of

_T = TypeVar("_T")
_MARK = "_torchdynamo_orig_callable"  # on a function that torch.compile returns: what it was given
_LEFT_ALONE = "_torchdynamo_disable"  # beside it, where torch.compiler.disable has returned the function
# Of classes of libraries: what each defined when it was last looked through, and what of that may be compiled.
_SUSPECTS: dict[type, tuple[list[Any], list[tuple[str, Any]]]] = {}


def compiled_names(module: nn.Module) -> list[str]:
    """What is compiled in ``module``: paths of submodules, "the module itself" for its own, and of methods.

    That is ``torch.compile(child)``, ``child.compile()``, and compiled functions: attributes, such as the steps of a
    LightningModule that was compiled as a whole, methods decorated with it, and functions that the code of a class
    calls by name.
    """
    found = []
    for path, child in module.named_modules():
        if _is_compiled_itself(child):
            found.append(path or "the module itself")
        found.extend(f"{path}.{name}".lstrip(".") for name, _ in _compiled_methods(child))
    for kind in {type(child): None for child in module.modules()}:
        found.extend(name for name, _ in _compiled_functions(kind))
    return list(dict.fromkeys(found))


OfClasses = dict[type, list[Any]]  # compiled functions


def is_compiled(module: nn.Module, known: OfClasses | None = None) -> bool:
    """Whether ``module``, a method of its own or a function that its class calls is compiled.

    Its submodules do not count.

    Args:
        module: Which.
        known: As of :func:`functions_compiled_in`.
    """
    return _is_compiled_itself(module) or bool(functions_compiled_in(module, known))


def functions_compiled_in(module: nn.Module, known: OfClasses | None = None) -> list[Any]:
    """What ``torch.compile`` has made of methods of ``module``, and of functions that its class calls.

    Empty where ``module`` is compiled itself, or nothing of the kind is.

    Args:
        module: Which.
        known: What was found of classes, and gets what is: for a look at many modules, which have few classes. Classes
            change, so it is not to be kept.
    """
    if _is_compiled_itself(module):
        return []
    kind = type(module)
    of_class = None if known is None else known.get(kind)
    if of_class is None:
        of_class = [function for _, function in _compiled_functions(kind)]
        if known is not None:
            known[kind] = of_class
    return [*(function for _, function in _compiled_methods(module)), *of_class]


def _is_compiled_itself(module: nn.Module) -> bool:
    return isinstance(module, OptimizedModule) or compiled_call_of(module) is not None


def _compiled_methods(module: nn.Module) -> list[tuple[str, Any]]:
    # Its attributes are torch's: what it was made of is a submodule, and has its turn by itself.
    if isinstance(module, OptimizedModule):
        return []
    return [(name, value) for name, value in own_values(module) if callable(value) and _is_marked(value)]


def _compiled_functions(kind: type) -> Iterator[tuple[str, Any]]:
    """Compiled functions that the class ``kind`` defines or calls, with their names."""
    for base in kind.__mro__:
        for name, function in _suspects_of(base):
            # A class that a function defines calls what that function has made.
            held = contents_of(function) if isinstance(function, FunctionType) else []
            yield from ((name, each) for each in [function, *held] if _is_marked(each))
    for namespace, names in globals_of(kind):
        yield from ((name, namespace[name]) for name in names if _is_marked(namespace.get(name)))


def _suspects_of(base: type) -> list[tuple[str, Any]]:
    """What a class itself defines and may be compiled, or be a closure over what is, with its names.

    Classes of libraries have hundreds of methods, of which none is. They are looked through once, and again only where
    something else has been put on the class.
    """
    values = list(vars(base).values())
    known = _SUSPECTS.get(base)
    if known is not None and len(known[0]) == len(values) and all(map(operator.is_, known[0], values)):
        return known[1]
    named = [(name, function_in(value)) for name, value in list(vars(base).items())]
    suspects = [(name, value) for name, value in named if not _is_plain_method(value)]
    # What a class defines leads to the class: one that is not there for good would be kept alive. What stands for a
    # file in sys.modules may be None, to keep it from being imported, or any object.
    file = getattr(sys.modules.get(base.__module__), "__dict__", {})
    if is_library(base) and file.get(base.__name__) is base:
        _SUSPECTS[base] = values, suspects
    return suspects


def _is_plain_method(value: Any) -> bool:
    """Whether ``value`` is a function without attributes that closes over no more than the class it was defined in.

    What ``torch.compile`` returns has attributes from the beginning, and so has what a decorator has wrapped.
    """
    return isinstance(value, FunctionType) and not vars(value) and value.__code__.co_freevars in ((), ("__class__",))


def _is_marked(value: Any) -> bool:
    # A bound method has the attributes of its function. A class may answer, or raise, whatever it is asked.
    held = own_attributes(value.__func__ if isinstance(value, MethodType) else value)
    return held is not None and _MARK in held and not held.get(_LEFT_ALONE)


def state_named_as_in(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """``state`` with the names that ``module`` has for it, where only ``torch.compile(child)`` makes a difference.

    A child that was compiled so is called ``net._orig_mod`` in a state dict, and ``net`` elsewhere.

    Args:
        module: What is going to load it.
        state: A state dict of the same module, with other children compiled or none; returned as it is if its names
            are those of ``module`` already.
    """
    own = module.state_dict().keys()
    if own == state.keys():
        return state
    # Names that neither side knows stay as they are, and loading reports them.
    names = {_uncompiled_name(name): name for name in own}
    renamed = OrderedDict((names.get(_uncompiled_name(name), name), value) for name, value in state.items())
    if renamed.keys() == state.keys():
        return state
    # Modules read here in which version of theirs the state was written. Without it a batch norm
    # takes the state for one from before it counted its batches.
    versions = {_uncompiled_name(path): of_part for path, of_part in getattr(state, "_metadata", {}).items()}
    paths = [path for path, _ in module.named_modules()]
    known = {path: versions[_uncompiled_name(path)] for path in paths if _uncompiled_name(path) in versions}
    vars(renamed)["_metadata"] = known
    return renamed


def _uncompiled_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _run_eagerly() -> Undo:
    """``torch.compile`` leaves code as it was written: its one setting for the process."""
    setting: Any = torch.compiler.set_stance("force_eager")  # type: ignore[no-untyped-call]
    return partial(setting.__exit__, None, None, None)


# One for the process, as the setting of torch.compile is.
_eager_runs = SharedPatch(_run_eagerly)


def uncompiled() -> AbstractContextManager[None]:
    """What runs in here runs as it was written, in all threads, also what ``torch.compile`` has compiled.

    For runs under a dispatch mode: inside compiled code it would see no operators, and dynamo gives code that meets one
    up for good, so that it would stay uncompiled in every later step.
    """
    return _eager_runs


def untraced(function: Callable[[], _T]) -> Callable[[], _T]:
    """``function`` for code that may be compiled, such as the step of an optimizer: the compiler leaves it alone.

    What is compiled within it stays so.
    """
    # To disable the compiler for a function that has just been made takes 0.3 ms, and steps make theirs anew.
    return partial(_call, function)


@torch.compiler.disable  # type: ignore[no-untyped-call, untyped-decorator]
def _call(function: Callable[[], _T]) -> _T:
    return function()
