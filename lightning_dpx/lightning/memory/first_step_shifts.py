"""When ``shifts="auto"`` is decided: before the first step, by a shadow of it; which parts go: ``auto_shift.py``."""

from typing import TYPE_CHECKING

from lightning_dpx.lightning.memory.auto_shift import note_shifts, shift_what_does_not_fit
from lightning_dpx.lightning.memory.planning import MemoryPlanning
from lightning_dpx.lightning.memory.shadow_run import ShadowRun, StepInput
from lightning_dpx.replicas.shared_iterators import iterators_peeked
from lightning_dpx.shifting import BetweenSteps

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


class FirstStepShifts:
    """Decides ``shifts="auto"`` by what the first step of a session would keep, before it runs.

    Args:
        session: Whose steps.
        planning: Has the budgets.
        hooks_mode: What hooks run in, where parts are shifted.

    Attributes:
        is_open: Whether the first batch is still to decide.
    """

    def __init__(self, session: "Session", planning: MemoryPlanning, hooks_mode: BetweenSteps | None) -> None:
        self.is_open: bool = session.options.chooses_shifts
        self._session = session
        self._planning = planning
        self._hooks_mode = hooks_mode

    def before_step(self, step: StepInput) -> None:
        """Shifts what does not fit, before the first step."""
        if not self.is_open:
            return
        session = self._session
        replicas = session.replicas
        # Once, whatever comes of it: another look would find parts where this one has put them.
        self.is_open = False
        session.step.close()  # its hooks hold on to where the parameters were
        with iterators_peeked(replicas.root.module) as peeked:
            run = ShadowRun(session, step, peeked)
            budgets = self._planning.rooms.budgets
            shift_what_does_not_fit(replicas, step.slices, run, session.strategy.optimizers, budgets)
        # Hooks between steps were entered at launch, before anything was known of these shifts.
        note_shifts(replicas.replicas, self._hooks_mode)
