"""Whether a step exceeds the budget although it keeps to what was learnt: by its inputs, and by what it calls."""

from collections.abc import Mapping
from typing import Any

from lightning_dpx.memory.execute.call_bytes import CallBytes
from lightning_dpx.memory.execute.known_values import KnownValues
from lightning_dpx.memory.execute.largest_inputs import LargestInputs
from lightning_dpx.memory.execute.similar_values import SimilarValues
from lightning_dpx.memory.plan.plan import module_of


class StepPeaks:
    """The peaks of steps that are not followed call by call.

    Args:
        similar: Knows the planned step and its budget; without it no calls are looked at.

    Attributes:
        peak: Of the last forward, if it surely exceeds the budget; else 0.
    """

    def __init__(self, similar: SimilarValues | None) -> None:
        self.peak: int = 0
        self._similar = similar
        self._inputs = LargestInputs()
        self._calls = CallBytes()

    @property
    def varying(self) -> frozenset[str]:
        """The modules whose calls are to be counted: forwards that were followed have not called them equally often."""
        return self._calls.varying

    def have_grown(self, inputs: Any) -> bool:
        """Whether a forward takes more than all before it."""
        return self._inputs.have_grown(inputs)

    def begin(self) -> None:
        """A forward begins."""
        self.peak = 0

    def note(self, calls: Mapping[str, int], known: KnownValues) -> None:
        """Learns what calls keep, from all that a forward has saved which was followed.

        Args:
            calls: How often it has called each module.
            known: What was saved.
        """
        if self._similar is None:
            return
        kept = list[tuple[str, int]]()
        for value in known.present():
            if value.tensor is not None and self._similar.is_of_step(value):
                kept.append((module_of(value.name), value.tensor.nbytes))
        self._calls.note(calls, kept)

    def look_at(self, calls: Mapping[str, int]) -> bool:
        """Whether only a followed forward would show if one that has called so much together exceeds the budget.

        Args:
            calls: How often it has called the modules that are counted.
        """
        # Where all forwards have called the same, this one has, too, or has lost its routine.
        if self._similar is None or not self.varying:
            return False
        peak = self._similar.peak_of_calls(self._calls.kept_by(calls))
        # Which call keeps a value depends on which of them comes first.
        if self._similar.exceeds(peak, surely=True):
            self.peak = peak
            return False
        return self._similar.exceeds(peak, surely=False)
