"""Copies of optimizers, their schedulers and the precision plugin, which act on a shadow instead of the real ones."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_dpx.lightning.lightning_api import LightningOptimizer
from lightning_dpx.lightning.lightning_compat import optimizers_of, wrap_optimizer
from lightning_dpx.lightning.manual.acts_once import unwrapped_optimizer
from lightning_dpx.torch_compat import tree_map_only


def with_copied_optimizers(
    strategy: Any,
    module: nn.Module,
    shadows: Sequence[nn.Module],
    owners: Sequence[torch.Tensor],
    mine: Sequence[Any] = (),
) -> dict[str, Any]:
    """The attributes by which a strategy has copies of its optimizers, schedulers and precision, for a shadow.

    Optimizers and schedulers that the shadow holds as attributes are exchanged for copies as well.

    Args:
        strategy: Any of Lightning's.
        module: The real module.
        shadows: What stands in for it, and the replicas of that.
        owners: What the real optimizers hold, for each parameter of the module.
        mine: What the copies shall hold; the parameters of the shadow unless given.
    """
    shadow: Any = shadows[0]
    mine = mine or list(shadow.parameters())
    # The Trainer stands for itself, or a scheduler that leads to it would copy the run.
    pairs = [*zip(owners, mine, strict=True), (module, shadow), (shadow.trainer, shadow.trainer)]
    configured = list(optimizers_of(strategy))
    configs = list(strategy.lr_scheduler_configs)
    children = list(chain.from_iterable(each.modules() for each in shadows))
    held: list[Any] = []
    for child in children:
        for _, value in attributes_stepped_in(child):
            held += _stepped_among(value)
    # One optimizer is often held twice, and as Lightning's wrapper and as itself: it must stay one.
    distinct: dict[int, Any] = {}
    for one in (*configured, *held):
        unwrapped = unwrapped_optimizer(one)
        distinct.setdefault(id(unwrapped), unwrapped)
    real = list(distinct.values())
    optimizers = [one for one in real if isinstance(one, Optimizer)]
    schedulers = [one for one in real if isinstance(one, LRScheduler)]
    # All in one call: they share a memo, so that a scheduler finds the copy of its own optimizer.
    copies, others = copy_optimizers(optimizers, [*configs, *schedulers], pairs)
    counterparts = dict(zip(map(id, [*optimizers, *schedulers]), [*copies, *others[len(configs) :]], strict=True))
    chosen = [counterparts[id(unwrapped_optimizer(one))] for one in configured]
    wrapped = [wrap_optimizer(one, strategy) for one in chosen]
    for one in held:
        if isinstance(one, LightningOptimizer):
            counterparts[id(one)] = wrap_optimizer(counterparts[id(unwrapped_optimizer(one))], strategy)
    # From here on what the shadow holds steps parameters of the shadow.
    for child in children:
        _exchange(vars(child), counterparts)
    # A scaler in the wrapped plugin changes its scale in every step.
    precision = copy.copy(strategy.precision_plugin)
    if "wrapped" in vars(precision):
        precision.wrapped = copy.deepcopy(precision.wrapped)
    return {
        "_optimizers": chosen,
        "_lightning_optimizers": wrapped,
        "lr_scheduler_configs": others[: len(configs)],
        "_precision_plugin": precision,
    }


def attributes_stepped_in(child: nn.Module) -> list[tuple[str, Any]]:
    """The attributes that are an optimizer or a scheduler, or a list, tuple or dict with one in it."""
    return [(key, value) for key, value in vars(child).items() if _stepped_among(value)]


def _stepped_among(value: Any) -> list[Any]:
    items: Iterable[Any] = (value,)
    if type(value) in (list, tuple):
        items = value
    elif type(value) is dict:
        items = value.values()
    return [item for item in items if isinstance(item, Optimizer | LRScheduler)]


def _exchange(attributes: dict[str, Any], counterparts: Mapping[int, Any]) -> None:
    """Puts the counterparts of objects in their place, also in the lists, tuples and dicts among ``attributes``."""
    for key, value in list(attributes.items()):
        if id(value) in counterparts:
            attributes[key] = counterparts[id(value)]
        # In place, as other attributes may name the same list; a tuple cannot be written.
        elif type(value) is list and any(id(one) in counterparts for one in value):
            value[:] = [counterparts.get(id(one), one) for one in value]
        elif type(value) is tuple and any(id(one) in counterparts for one in value):
            attributes[key] = tuple(counterparts.get(id(one), one) for one in value)
        elif type(value) is dict and any(id(one) in counterparts for one in value.values()):
            value.update({name: counterparts.get(id(one), one) for name, one in value.items()})


def copy_optimizers(
    optimizers: Sequence[Any], schedulers: Sequence[Any], counterparts: Sequence[tuple[Any, Any]]
) -> tuple[list[Any], list[Any]]:
    """Optimizers and the configurations of their schedulers, over other parameters.

    Args:
        optimizers: The real ones.
        schedulers: Configurations, as the strategy holds them.
        counterparts: Pairs of a real object (a parameter, the module) and what takes its place.
    """
    memo: dict[int, Any] = {id(real): other for real, other in counterparts}
    copied = []
    for optimizer in optimizers:
        # Not by copy.deepcopy: an optimizer hands out only its state and its groups, without the attributes of a
        # subclass; and a scheduler has put a ``step`` on the instance that is bound to the original.
        kind: type[Any] = type(optimizer)
        duplicate: Any = object.__new__(kind)
        memo[id(optimizer)] = duplicate
        copied.append(duplicate)
    for optimizer, duplicate in zip(optimizers, copied, strict=True):
        for key, value in vars(optimizer).items():
            if key != "step":
                # Hooks may be bound to anything, and to copy that would copy it along.
                vars(duplicate)[key] = copy.copy(value) if key.endswith("_hooks") else copy.deepcopy(value, memo)
        # Deepcopy leaves state where it was; a parameter of the memo may be on another device.
        _follow_parameters(duplicate, optimizer)
    return copied, copy.deepcopy(list(schedulers), memo)


def _follow_parameters(copied: Any, original: Any) -> None:
    """The state of each parameter lives where it does: the copy of one may be on another device than its owner."""
    for owner, parameter in zip(original.state, copied.state, strict=True):
        if isinstance(owner, torch.Tensor) and owner.device != parameter.device:
            move = partial(_moved, source=owner.device, target=parameter.device)
            copied.state[parameter] = tree_map_only(torch.Tensor, move, copied.state[parameter])


def _moved(tensor: torch.Tensor, source: torch.device, target: torch.device) -> torch.Tensor:
    if tensor.device == source:
        return tensor.to(target)
    return tensor
