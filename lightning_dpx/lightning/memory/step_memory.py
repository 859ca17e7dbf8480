"""What is done about memory round the steps of a session: shifts and plans of the first batch, steps taken again.

A session without a budget, plan, automatic shift or ``on_oom="replan"`` has :class:`NoStepMemory`, which does nothing;
the others have :class:`PlannedStepMemory`. What a session knows of either is :class:`StepMemory`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lightning_dpx.replicas import BatchSlice

Forward = Callable[[list[BatchSlice], tuple[Any, ...], dict[str, Any]], Any]


class StepMemory:
    """What is done about memory round the steps of a session; each hook does nothing unless it is overridden.

    Attributes:
        is_on: Whether anything may be done, so that steps cannot take shorter ways.
        repeats_steps: Whether a step that ran out of memory runs again.
        has_planned_step: Whether a step has followed a plan by now.
    """

    is_on: bool
    repeats_steps: bool
    has_planned_step: bool = False

    def begin_step(self) -> None:
        """A training step begins."""

    def rewindable(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The step's arguments, as they may be given to several runs of it."""
        return args

    def choose_micro_batches(self, slices: list[BatchSlice], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether slices are cut into micro-batches from this step on, which its rehearsal looks at next."""
        return False

    def choose_evaluation_micro_batches(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether slices of an evaluation step are cut into micro-batches from this step on."""
        return False

    def leave_micro_batches(self, name: str, reason: str) -> bool:
        """Their rehearsal found a difference; says whether slices stay in one piece then."""
        return False

    def bytes_too_many_for_look(self, slices: Sequence[BatchSlice]) -> int:
        """Bytes of copies with which another look at a step would exceed a budget; 0 where it may be taken."""
        return 0

    def begin_epoch(self) -> None:
        """Callbacks have begun an epoch."""

    def before_step(self, slices: list[BatchSlice], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a training step allocates anything."""

    def end_step(self) -> None:
        """A training step has returned."""

    def guarded_forward(self, forward: Forward) -> Forward:
        """``forward``, run again where it runs out of memory."""
        return forward

    def run_guarded_backward(self, backward: Callable[[], None]) -> None:
        """Runs ``backward``; with the forward, once more where it runs out of memory."""
        backward()

    def end_backward(self) -> None:
        """Right after the backward, before gradients are summed."""

    def end_update(self) -> None:
        """An optimizer has stepped."""

    def plan_ahead(self) -> None:
        """At setup, before any data is loaded."""


class NoStepMemory(StepMemory):
    """Nothing is asked about memory, and nothing is done about it."""

    is_on = False
    repeats_steps = False
