"""How a buffer that a step writes comes together from slices."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from lightning_dpx.lightning.rehearsal.comparison.observation import host_copy
from lightning_dpx.replicas.buffer_sync import BufferRule
from lightning_dpx.replicas.merging.tolerance import Tolerance, difference

_RULES: tuple[BufferRule, ...] = ("mean", "sum", "max", "min", "first")


class BufferJudge:
    """Finds the rules that reproduce the buffers of one device.

    Args:
        state: What one device has left, by name.
        tolerance: How far slices may be from it.
        written: Names of those that it has changed; not known unless given.

    Attributes:
        fitting: By name, all rules that reproduce a buffer.
    """

    def __init__(self, state: Mapping[str, Any], tolerance: Tolerance, written: Collection[str] | None = None) -> None:
        self._state = state
        self._tolerance = tolerance
        self._written = written
        self.fitting: dict[str, list[BufferRule]] = {}

    def rule(self, name: str, value: Callable[[BufferRule], torch.Tensor | None]) -> BufferRule:
        """The first replica's, unless another rule makes of it what one device did.

        Args:
            name: Of the buffer.
            value: Says what a rule would make of it.
        """
        whole = self._state.get(name)
        # A buffer that one device does not have, or has as something else, is left
        # to the comparison of state.
        if not isinstance(whole, torch.Tensor):
            return "first"
        # Most buffers are constants, some of them large: what others make of these takes room for nothing.
        is_constant = self._written is not None and name not in self._written
        if is_constant and self._reproduces(whole, value("first")):
            return "first"
        largest = value("max")
        smallest = value("min")
        are_alike = largest is not None and smallest is not None and torch.equal(largest, smallest)
        # All slices have the same, and so has one device. Otherwise what they have adds up, as a count of rows does
        # where each slice has one.
        if are_alike and self._reproduces(whole, value("first")):
            # What was added up until now may be set.
            if self._written is not None:
                self.fitting[name] = [rule for rule in _RULES if self._reproduces(whole, value(rule))]
            return "first"
        # Where they differ, the first one's is the whole batch's by chance: its rows may have the largest of all.
        fitting = [rule for rule in _RULES if self._reproduces(whole, value(rule))]
        self.fitting[name] = fitting
        if fitting:
            return fitting[0]
        return "first"

    def _reproduces(self, whole: torch.Tensor, candidate: torch.Tensor | None) -> bool:
        if candidate is None or candidate.shape != whole.shape:
            return False
        return difference(whole, host_copy(candidate), self._tolerance) <= self._tolerance.relative
