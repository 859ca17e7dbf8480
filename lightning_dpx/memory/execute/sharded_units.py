"""The units of a module that ``fully_shard`` or FSDP1 has spread: which parameters are there in whose backward."""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.execute.calls import SelectiveReplay
from lightning_dpx.memory.execute.flat_units import is_flat_unit
from lightning_dpx.memory.execute.values import Unnamed, Value, View
from lightning_dpx.torch_compat import key_of, parameters_of

_ELSEWHERE = "a call that may be anywhere"


def sharded_units(module: nn.Module) -> list[str]:
    """Paths of the parts on which ``fully_shard`` was called, or that ``FullyShardedDataParallel`` wraps.

    Outer ones come first; most modules have none.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # who shards has imported it
    if fsdp is None:
        return []
    paths = []
    for path, child in module.named_modules():
        if isinstance(child, fsdp.FSDPModule) or is_flat_unit(child):
            paths.append(path)
    return paths


def inner_units(module: nn.Module) -> str:
    """Paths of the units whose parameters come and go, with spaces between: all but the outermost."""
    return " ".join(filter(None, sharded_units(module)))


def unit_of(path: str, units: Sequence[str]) -> str:
    """The innermost of ``units`` that the module at ``path`` is in, ``""`` if that is the model itself or none."""
    innermost = ""
    for unit in units:  # outer ones first
        if unit and (path == unit or path.startswith(f"{unit}.")):
            innermost = unit
    return innermost


class ShardedUnits:
    """What may be recomputed in the backward of a unit.

    Args:
        module: The model, with whole parameters.

    Attributes:
        paths: Of its units.
    """

    def __init__(self, module: nn.Module) -> None:
        self.paths: list[str] = sharded_units(module)
        # Units whose parameters a value is made from. Weak, because the step lets go of values as it would by itself.
        self._needed: weakref.WeakKeyDictionary[Value, frozenset[str]] = weakref.WeakKeyDictionary()
        self._unit_of_storage: dict[int, str] = {}
        if not self.paths:
            return
        for path, child in module.named_modules():
            for parameter in parameters_of(child).values():
                if parameter is not None:
                    self._unit_of_storage[key_of(parameter.untyped_storage())] = unit_of(path, self.paths)

    def allows(self, value: Value, call: str) -> bool:
        """Whether ``value`` can be made again where the module at ``call`` needs it; else it is kept."""
        # The outermost unit is whole all the time; other units' parameters are gone by then.
        unit = unit_of(call, self.paths)
        needed = self._needed_by(value)
        if needed <= {unit, ""}:
            self._needed[value] = needed
            return True
        # It is kept, so neither it nor what is made from it needs these parameters.
        self._needed[value] = frozenset()
        return False

    def holds_units(self, call: str) -> bool:
        """Whether a unit is inside the module at ``call``, so that its call would gather parameters again."""
        return any(unit.startswith(f"{call}.") for unit in self.paths)

    def _needed_by(self, value: Value) -> frozenset[str]:
        """Units with a parameter that ``value`` is made from, directly or by way of others."""
        if value in self._needed:
            return self._needed[value]
        units: set[str] = set()
        # A call of a module may use any parameters, which its inputs do not tell.
        if isinstance(value.make, SelectiveReplay):
            units.add(_ELSEWHERE)
        if value.make is None:
            units |= self._unit_of_tensor(value.tensor)
        for entry in value.inputs:
            source = entry.value if isinstance(entry, View) else entry
            if isinstance(source, Value):
                units |= self._needed_by(source)
            elif isinstance(source, Unnamed):
                units |= self._unit_of_tensor(source.tensor)
        self._needed[value] = frozenset(units)
        return self._needed[value]

    def _unit_of_tensor(self, tensor: torch.Tensor | None) -> set[str]:
        """The unit that a parameter is of; empty for any other tensor."""
        if tensor is None or tensor.layout is not torch.strided:
            return set()
        unit = self._unit_of_storage.get(key_of(tensor.untyped_storage()))
        if unit is None:
            return set()
        return {unit}
