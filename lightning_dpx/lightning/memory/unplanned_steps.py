"""Steps that save other values than those that were planned for.

A GAN may train its two networks in turns, a module may skip layers or optimize every second batch. A step is profiled
before it runs, but what kind of step it will be only its code knows. So values that no profile has seen are noted while
a step runs, and kept; then the coming steps are profiled until one of them has shown them.
"""

from collections.abc import Iterable

from lightning_dpx.lightning.lightning_api import rank_zero_info, rank_zero_warn
from lightning_dpx.lightning.memory.profiled_steps import SeenStep
from lightning_dpx.memory import AppliedPlan
from lightning_dpx.memory.plan.plan import module_of
from lightning_dpx.units import format_mib

_WORTH_A_PROFILE = 0.02  # of the unplanned peak
_MOST_PROFILES = 8  # in a row that have shown nothing new


class UnplannedSteps:
    """What steps have saved that no profile has seen."""

    def __init__(self) -> None:
        self._known: set[str] = set()  # names of values
        self._unseen: dict[str, int] = {}  # bytes, by name
        self._least = 0
        self._left = _MOST_PROFILES

    def look_back(self, applied: AppliedPlan) -> None:
        """Notes what a step with a plan has saved."""
        if not applied.unknown:
            return
        for name, num_bytes in applied.unknown.items():
            if name not in self._known:
                self._unseen[name] = num_bytes
        # Each look takes what is new since the last; a plan adds to it step by step.
        applied.unknown.clear()
        was_expected = bool(self._least)
        self._least = int(applied.plan.unplanned_peak * _WORTH_A_PROFILE)
        if self.expected and not was_expected:
            modules = sorted({module_of(name) or "the step itself" for name in self._unseen})
            rank_zero_info(
                f"dpx: a step saved {format_mib(sum(self._unseen.values()))} ({', '.join(modules[:3])}) that no "
                "profiled step had saved; the next steps are profiled until one shows it."
            )

    @property
    def expected(self) -> bool:
        """Whether the next step may be one that was not planned for."""
        return self._left > 0 and sum(self._unseen.values()) > self._least

    def found_in(self, seen: Iterable[SeenStep]) -> bool:
        """Whether these profiles show what steps have saved; after too many that do not, none is made for that."""
        names = _names(seen)
        if names & self._unseen.keys():
            self._left = _MOST_PROFILES
            return True
        if self.expected:
            self._left -= 1
            if not self._left:
                rank_zero_warn(
                    f"dpx: {format_mib(sum(self._unseen.values()))} that a step kept was in none of the "
                    f"{_MOST_PROFILES} steps after it: memory is not planned for such a step, which may exceed "
                    "the budget."
                )
        return False

    def plan_for(self, steps: Iterable[SeenStep]) -> None:
        """Notes that these steps are planned for from now on."""
        self._known |= _names(steps)
        # What another kind of step has saved is still to be shown.
        self._unseen = {name: size for name, size in self._unseen.items() if name not in self._known}
        self._least = 0 if not self._unseen else self._least


def _names(steps: Iterable[SeenStep]) -> set[str]:
    names: set[str] = set()
    for step in steps:
        for profile in step.profiles:
            # What is only on the way to saved values has no name to be known by.
            names.update(value.name for value in profile.values if value.name)
    return names
