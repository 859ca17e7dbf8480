"""Whether devices still have the room that plans count on: looked at before a step, now and then."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.errors import BudgetError
from lightning_dpx.lightning.lightning_api import rank_zero_warn
from lightning_dpx.lightning.memory.peak_check import is_worth_telling
from lightning_dpx.lightning.memory.plan_device import bytes_planned_to_be_left
from lightning_dpx.lightning.memory.planning import MemoryPlanning
from lightning_dpx.lightning.memory.profiled_steps import by_device
from lightning_dpx.lightning.memory.static import StaticMemory
from lightning_dpx.lightning.memory.static_of_steps import StaticOfSteps
from lightning_dpx.replicas import BatchSlice

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


class RoomCheck:
    """Plans anew where others have taken memory since the plans were made.

    Args:
        session: Whose steps.
        planning: Has the plans, and says when to look.
        static: What a step needs beside its activations.
    """

    def __init__(self, session: "Session", planning: MemoryPlanning, static: StaticOfSteps) -> None:
        self._session = session
        self._planning = planning
        self._static = static

    def before_step(self, slices: Sequence[BatchSlice]) -> None:
        """Plans anew where devices no longer have the room that the plans count on.

        Others may take memory between a plan that is made before any batch and the first of them; later, callbacks and
        hooks make copies that stay.

        Raises:
            PlanError: at the first batch, if no plan takes as little as there is.
        """
        if self._planning.rooms.budgets.given is None or not self._planning.room_checks.begin_step():
            return
        # Before anything is collected, which takes longer than most steps.
        if not self._lacking(slices, self._held(slices)):
            return
        gc.collect()  # what is there in reference cycles only is no reason
        held = self._held(slices)
        lacking = self._lacking(slices, held)
        if lacking:
            self._plan_for_less(slices, held, lacking)

    def _held(self, slices: Sequence[BatchSlice]) -> StaticMemory:
        """What a step needs beside its activations, and beside what plans expect steps to leave on the module."""
        held = self._static.of(slices)
        # On the host nothing but a look at the module tells of lists that grow with every step.
        decided = [one for home, one in self._planning.devices.decided.items() if is_host(home)]
        if not decided:
            return held
        expected = max(bytes_planned_to_be_left(one.seen) for one in decided)
        return replace(held, attributes=held.attributes + max(0, self._static.bytes_left() - expected))

    def _lacking(self, slices: Sequence[BatchSlice], held: StaticMemory) -> list[torch.device]:
        """The devices that no longer have the room that their plans count on."""
        planning = self._planning
        lacking = []
        for device in by_device(slices):
            # The limit of a budget that is "auto" is read again here: it is what is free by now.
            limit = planning.rooms.budgets.limit(device, self._session.replicas.devices)
            needed = held.beside_activations(device) + planning.devices.forecast(device)[0]
            if device not in planning.devices.plans or needed <= limit:
                continue
            # What a reduction keeps for its next one is among what is there by now, and would count twice.
            if planning.room_checks.is_first or is_worth_telling(needed - held.moving_in_backward(device), limit):
                lacking.append(device)
        return lacking

    def _plan_for_less(self, slices: Sequence[BatchSlice], held: StaticMemory, lacking: Sequence[torch.device]) -> None:
        planning = self._planning
        replicas = self._session.replicas
        with planning.plans_taken_off(replicas):
            try:
                planning.plan(replicas, slices, held, {}, "; made anew, as less room is left than was planned for")
            except BudgetError as error:
                if planning.room_checks.is_first:
                    raise
                # A run that has trained is not ended by what one device has room for.
                planning.room_checks.stop()
                planning.peaks.note_told(lacking)
                notes = " ".join(getattr(error, "__notes__", []))
                where = ", ".join(map(str, lacking))
                rank_zero_warn(
                    "dpx: more is kept between steps than when memory was planned, as by lists that grow, for "
                    "parameters that no step had used before, and by callbacks and hooks that make copies, so steps "
                    f"exceed {planning.rooms.option()} on {where}: "
                    f"{error} {notes}"
                )
