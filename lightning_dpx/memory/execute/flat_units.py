"""Modules that ``FullyShardedDataParallel`` (FSDP1) wraps, as what they were before.

A unit is what it wraps. The parameters of a unit are views of one flat parameter, which is whole only while the unit's
forward or its backward runs, as those of ``fully_shard`` are: so the same can be recomputed, see
:mod:`lightning_dpx.memory.execute.sharded_units`. What differs is the look of the model:

    before    model.blocks.0.norm.weight [32]
    after     model.blocks.0._fsdp_wrapped_module.norm.weight [0], or no such parameter, with use_orig_params=False

Plans name values as before. So wrappers are off while a step is profiled or a plan is put on; the hooks of a plan sit
on the modules inside, and stay there.
"""

import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.execute.unit_casts import UnitCasts
from lightning_dpx.torch_compat import (
    FLAT_PARAMETER,
    FlatParts,
    buffers_of,
    flat_parts_of,
    parameters_of,
    submodules_of,
)

# Units whose wrappers are off at the moment, which nothing else tells from other modules.
_OFF: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_HOLD_VIEWS: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def is_flat_unit(module: nn.Module) -> bool:
    """Whether it is a wrapper of FSDP1, or a unit whose wrapper is off."""
    return module in _OFF or isinstance(module, _wrapper_class())


def holds_views(module: nn.Module) -> bool:
    """Whether its parameters are views of a flat one, as far as a plan was made for the module or put on it."""
    return module in _HOLD_VIEWS


def inside(module: nn.Module) -> nn.Module:
    """What a wrapper wraps; any other module is itself."""
    found: nn.Module = module.module if isinstance(module, _wrapper_class()) else module  # type: ignore[assignment]
    return found


def _wrapper_class() -> Any:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # who wraps has imported it
    # No module is of no class.
    if fsdp is None:
        return ()
    return fsdp.FullyShardedDataParallel


@contextmanager
def unwrapped(module: nn.Module) -> Iterator[nn.Module]:
    """A context in which wrappers of FSDP1 are off, and parameters are whole and on the meta device.

    They are in the dtype that their unit computes in; inputs and buffers are cast as the wrappers do otherwise.

    Args:
        module: Any; one without wrappers stays as it is.

    Yields:
        The module without its own wrapper, if it is one.
    """
    wrappers = [(path, child) for path, child in module.named_modules() if isinstance(child, _wrapper_class())]
    with ExitStack() as stack:
        # All are read before the first is changed: a wrapper that is off is not found any more.
        parts = [flat_parts_of(wrapper) for _, wrapper in wrappers]
        for flat in parts:
            _make_whole(flat, stack)
        for (path, wrapper), flat in zip(wrappers, parts, strict=True):
            unit = inside(wrapper)
            is_outermost = not any(_holds(other, path) for other, _ in wrappers)
            _cast_as(flat.policy, unit, stack, is_outermost=is_outermost)
            _OFF.add(unit)
            stack.callback(_OFF.discard, unit)
        for parent in list(module.modules()):
            children = submodules_of(parent)
            for name, child in list(children.items()):
                # The outermost wrapper has its unit as a child, and no parent.
                if child is not None and isinstance(child, _wrapper_class()):
                    children[name] = inside(child)
                    stack.callback(children.__setitem__, name, child)
        yield inside(module)


def _holds(outer: str, path: str) -> bool:
    """Whether the module at ``path`` is inside the one at ``outer``."""
    return path != outer and (outer == "" or path.startswith(f"{outer}."))


def _cast_as(policy: Any, unit: nn.Module, stack: ExitStack, *, is_outermost: bool) -> None:
    """Casts inputs and buffers of ``unit`` as its wrapper does; ``stack`` undoes it."""
    casts_inputs = policy.cast_forward_inputs or (is_outermost and policy.cast_root_forward_inputs)
    casts = UnitCasts(policy.param_dtype if casts_inputs else None, None)
    if casts.needed:
        hook = unit.register_forward_pre_hook(casts.before, prepend=True, with_kwargs=True)
        stack.callback(hook.remove)
    if policy.buffer_dtype is None:
        return
    # The first forward casts them, for good.
    for child in _own_parts(unit):
        buffers = buffers_of(child)
        stack.callback(refill, buffers, dict(buffers))
        for name, buffer in buffers.items():
            if buffer is not None and buffer.is_floating_point():
                buffers[name] = buffer.to(policy.buffer_dtype)


def _own_parts(part: nn.Module) -> Iterator[nn.Module]:
    """``part`` and what is in it, but for units that are."""
    yield part
    for child in submodules_of(part).values():
        if child is not None and not isinstance(child, _wrapper_class()):
            yield from _own_parts(child)


def _make_whole(flat: FlatParts, stack: ExitStack) -> None:
    """Puts meta parameters where views of a flat parameter are; ``stack`` puts back what was there."""
    owners = {id(owner): owner for owner, _ in flat.names}
    owners[id(flat.unit)] = flat.unit
    for owner in owners.values():
        _HOLD_VIEWS.add(owner)
        held = parameters_of(owner)
        stack.callback(refill, held, dict(held))
        held.pop(FLAT_PARAMETER, None)
    made = list[nn.Parameter]()
    # They are views of the flat parameter in a step. So frozen ones beside trained ones get gradients as well, and
    # what these are made from is saved.
    for shape in flat.shapes:
        made.append(nn.Parameter(torch.empty(shape, dtype=flat.dtype, device="meta"), flat.requires_grad))
    for (owner, name), same in zip(flat.names, flat.same, strict=True):
        # A view that is a plain attribute, as without use_orig_params, would hide the parameter.
        if name in vars(owner):
            stack.callback(vars(owner).__setitem__, name, vars(owner).pop(name))
        parameters_of(owner)[name] = made[same]  # tied ones stay tied


def refill(held: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Puts back what a dict held: the dict itself stays, as modules and others hold it."""
    held.clear()
    held.update(before)
