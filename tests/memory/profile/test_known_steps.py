"""What planned steps spend is measured once for equal steps."""

import torch
from torch import nn

from lightning_dpx.memory import Profile, profile_module
from lightning_dpx.memory.profile.bookkeeping import Bookkeeping
from lightning_dpx.memory.profile.known_steps import KNOWN_STEPS, KnownSteps


def profiled(width: int, rows: int = 64) -> tuple[Profile, nn.Module]:
    module = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64))
    return profile_module(module, torch.ones(rows, 64)), module


class Measures:
    """Counts what it measures."""

    def __init__(self, step_seconds: float = 1.0) -> None:
        self.count = 0
        self.step_seconds = step_seconds

    def __call__(self) -> Bookkeeping:
        self.count += 1
        return Bookkeeping(value=float(self.count), step_seconds=self.step_seconds)


def test_an_equal_step_is_not_measured_again_and_another_one_is() -> None:
    measures = Measures()
    steps = [profiled(width) for width in (64, 64, 128)]
    known = KnownSteps()
    found = [known.measured_once(*step, measures).value for step in steps]
    assert found == [1.0, 1.0, 2.0]
    other = nn.Sequential(*steps[0][1])
    other.__class__ = type("Other", (nn.Sequential,), {})
    assert known.measured_once(steps[0][0], other, measures).value == 3.0, "another class runs other Python"


def test_a_step_on_a_few_times_fewer_rows_is_not_measured_again() -> None:
    measures, known = Measures(), KnownSteps()
    found = [known.measured_once(*profiled(64, rows), measures) for rows in (256, 128, 64)]
    assert [one.value for one in found] == [1.0, 1.0, 1.0]
    assert [one.step_seconds for one in found] == [1.0, 0.0, 0.0], "the time of the step is that of its rows"
    known.measured_once(*profiled(64, 32), measures)
    assert measures.count == 2, "small tensors stay in caches"


def test_what_was_too_little_to_be_seen_is_looked_for_in_a_shorter_step() -> None:
    measures, known = Measures(step_seconds=0.0), KnownSteps()
    for rows in (256, 128):
        known.measured_once(*profiled(64, rows), measures)
    assert measures.count == 2


def test_profiling_a_model_again_measures_no_planned_step() -> None:
    """The second profile runs as many steps fewer as the first one has run to measure them."""
    calls: list[int] = []
    module = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    module.register_forward_hook(lambda *_: calls.append(1))
    counts = []
    KNOWN_STEPS.forget()
    for _ in range(2):
        calls.clear()
        profile_module(module, torch.ones(64, 64))
        counts.append(len(calls))
    assert counts[1] < counts[0] - 5


def test_the_last_steps_are_remembered() -> None:
    profile, module = profiled(64)
    known, measures = KnownSteps(most=3), Measures()
    kinds = [type(f"Kind{number}", (nn.Sequential,), {}) for number in range(4)]
    for kind in kinds:
        module.__class__ = kind
        known.measured_once(profile, module, measures)
    for kind in kinds[1:]:
        module.__class__ = kind
        known.measured_once(profile, module, measures)
    assert measures.count == len(kinds), "the last three are known"
    module.__class__ = kinds[0]
    known.measured_once(profile, module, measures)
    assert measures.count == len(kinds) + 1
