"""What is one of many equal ones is made again once, to be compared; a few operators tell how long it takes."""

from collections import Counter
from contextvars import ContextVar

import pytest
import torch
from torch import Tensor, nn

from lightning_dpx.memory.execute.values import Value
from lightning_dpx.memory.execute.whole_call_replays import WholeCallReplay
from lightning_dpx.memory.profile.costs import CostModel, Trial
from lightning_dpx.memory.profile.profiler import profile_step
from lightning_dpx.memory.profile.replay_trials import TimedReplay

CPU = torch.device("cpu")
LAYERS = 12


class CountingCosts(CostModel):
    """Counts what is made again."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.values: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def trial_of(self, value: Value) -> Trial:
        self.values[value.operator] += 1
        return super().trial_of(value)

    def timed_replay(self, replay: WholeCallReplay) -> TimedReplay:
        self.calls[type(replay.call.module).__name__] += 1
        return super().timed_replay(replay)


class Mixer(nn.Module):
    """Saves several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x).sigmoid())).exp()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Mixer()
        self.second = Mixer()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x))


@pytest.fixture
def costs() -> CountingCosts:
    return CountingCosts()


def test_of_equal_operators_a_few_are_timed(costs: CountingCosts) -> None:
    module = nn.Sequential(*(Mixer() for _ in range(LAYERS)))
    x = torch.randn(512, 32)
    profile = profile_step(module, lambda: module(x).sum(), CPU, costs=costs)
    exps = [value for value in profile.values if value.operator.startswith("Exp")]
    assert len(exps) == LAYERS
    assert not any(value.refused for value in exps), "each was made again and compared"
    assert costs.values["ExpBackward0"] == LAYERS + 3, "and three of them twice, to be timed"
    assert len({value.seconds for value in exps}) == 1, "which is the time of all"
    assert exps[0].seconds > 0


def test_calls_within_calls_that_were_right_are_tried_as_well(costs: CountingCosts) -> None:
    module = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    x = torch.randn(512, 32)
    profile = profile_step(module, lambda: module(x).sum(), CPU, costs=costs)
    assert costs.calls == {"Layer": LAYERS, "Mixer": 2 * LAYERS}
    kinds = Counter(call.kind for call in profile.calls)
    assert kinds == {"Layer": LAYERS, "Mixer": 2 * LAYERS}
    assert len({call.seconds for call in profile.calls if call.kind == "Mixer"}) == 1


SCALE = ContextVar("SCALE", default=2.0)


class Scaled(Mixer):
    """Takes a number from where nobody sees that it does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * SCALE.get())


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled()
        self.second = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        token = SCALE.set(0.5)
        try:
            out: Tensor = x + self.second(self.first(x))
        finally:
            SCALE.reset(token)
        return out


def test_a_call_that_is_right_only_within_another_one_is_not_made_again_by_itself(costs: CountingCosts) -> None:
    module = nn.Sequential(*(Scaling() for _ in range(LAYERS)))
    x = torch.randn(512, 32)
    profile = profile_step(module, lambda: module(x).sum(), CPU, costs=costs)
    assert Counter(call.kind for call in profile.calls) == {"Scaling": LAYERS}


class OneScaled(nn.Module):
    """One of its equal parts is given another number."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Scaled() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for number, part in enumerate(self.parts):
            token = SCALE.set(0.5 if number == 2 else 2.0)
            x = part(x)
            SCALE.reset(token)
        return x


def test_one_call_of_many_equal_ones_that_is_right_only_within_another_one_is_found(costs: CountingCosts) -> None:
    module = nn.Sequential(OneScaled(), OneScaled())
    x = torch.randn(512, 32)
    profile = profile_step(module, lambda: module(x).sum(), CPU, costs=costs)
    assert Counter(call.kind for call in profile.calls) == {"OneScaled": 2, "Scaled": 2 * (LAYERS - 1)}
    assert not {"0.parts.2", "1.parts.2"} & {call.name for call in profile.calls}
