"""What planned steps spend is measured once for equal steps."""

import torch
from torch import nn

from lightning_dpx.memory import Profile, profile_module
from lightning_dpx.memory.profile.bookkeeping import Bookkeeping
from lightning_dpx.memory.profile.known_steps import KNOWN_STEPS, KnownSteps

HOST = torch.device("cpu")


def profiled(width: int) -> tuple[Profile, nn.Module]:
    module = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64))
    return profile_module(module, torch.ones(64, 64)), module


class Measures:
    """Counts what it measures."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Bookkeeping:
        self.count += 1
        return Bookkeeping(value=float(self.count))


def test_an_equal_step_is_not_measured_again_and_another_one_is() -> None:
    measures = Measures()
    steps = [profiled(width) for width in (64, 64, 128)]
    known = KnownSteps()
    found = [known.measured_once(*step, HOST, measures).value for step in steps]
    assert found == [1.0, 1.0, 2.0]
    assert known.measured_once(*steps[0], torch.device("cuda"), measures).value == 3.0, "another device waits for less"
    other = nn.Sequential(*steps[0][1])
    other.__class__ = type("Other", (nn.Sequential,), {})
    assert known.measured_once(steps[0][0], other, HOST, measures).value == 4.0, "another class runs other Python"


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
        known.measured_once(profile, module, HOST, measures)
    for kind in kinds[1:]:
        module.__class__ = kind
        known.measured_once(profile, module, HOST, measures)
    assert measures.count == len(kinds), "the last three are known"
    module.__class__ = kinds[0]
    known.measured_once(profile, module, HOST, measures)
    assert measures.count == len(kinds) + 1
