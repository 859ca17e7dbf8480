"""A step that is put together from profiles of others is the step that makes all of their calls."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dpx.memory import Profile, forecast_plan, plan_profile, profile_module, scaled
from lightning_dpx.memory.plan.forecast import forecast
from lightning_dpx.memory.plan.problem import Problem
from lightning_dpx.memory.plan.replayed_steps import replayed
from lightning_dpx.memory.profile.joining.call_counts import calls_in, has_calls, varying_paths
from lightning_dpx.memory.profile.joining.join_steps import join_steps

WIDTH, ROWS = 32, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class Skips(nn.Module):
    """Six blocks, of which it calls some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.called: Sequence[int] = range(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in self.called:
            x = self.blocks[number](x)
        loss: Tensor = self.last(x).square().mean()
        return loss


def profiled(module: Skips, *called: int) -> Profile:
    module.called = called
    return profile_module(module, torch.ones(ROWS, WIDTH))


def joined(profiles: Sequence[Profile], whole: Profile) -> Profile:
    counts = calls_in(whole)
    return join_steps(profiles, {path: counts.get(path, 0) for path in varying_paths(profiles)})


@pytest.mark.parametrize(
    "parts",
    [
        [(0, 1, 2), (3, 4, 5)],
        [(3, 4, 5), (0, 1, 2)],
        [(0, 2, 4), (1, 3, 5)],
        [(0, 1, 5), (1, 2, 5), (3, 4)],
    ],
    ids=["in a row", "the later one first", "in turns", "three that overlap"],
)
def test_it_takes_what_the_whole_step_takes_with_any_plan(parts: list[tuple[int, ...]]) -> None:
    module = Skips()
    whole = profiled(module, *range(6))
    ours = joined([profiled(module, *part) for part in parts], whole)
    assert [value.name for value in ours.values if value.name] == [value.name for value in whole.values if value.name]
    assert [call.name for call in ours.calls] == [call.name for call in whole.calls]
    assert ours.peak == pytest.approx(whole.peak, rel=0.002)
    for share in (0.7, 0.4):
        for profile in (ours, whole):
            plan = plan_profile(module, profile, int(share * whole.peak))
            assert forecast_plan(ours, plan).peak == pytest.approx(forecast_plan(whole, plan).peak, rel=0.005)


def test_it_takes_what_the_whole_step_takes_with_calls_replayed() -> None:
    """What a call takes inside is gone when it is over, also where the next call is put in right there."""
    module = Skips()
    whole = profiled(module, *range(6))
    ours = joined([profiled(module, 0, 2, 4), profiled(module, 1, 3, 5)], whole)
    for count in range(1, 7):
        for blocks in combinations(range(6), count):
            names = {f"blocks.{number}" for number in blocks}
            expected = forecast(replayed(whole, names), ()).peak
            assert forecast(replayed(ours, names), ()).peak == pytest.approx(expected, rel=0.005), blocks


def test_calls_that_are_not_made_take_nothing() -> None:
    module = Skips()
    whole = profiled(module, 0, 2, 3, 5)
    ours = joined([profiled(module, 0, 1, 2), profiled(module, 3, 4, 5)], whole)
    assert has_calls(ours, calls_in(whole))
    assert not has_calls(ours, {"blocks.1.up": 1})
    assert ours.peak == pytest.approx(whole.peak, rel=0.01)


def test_a_step_on_few_rows_counts_as_one_on_all() -> None:
    module = Skips()
    whole = profiled(module, *range(6))
    ours = joined([profiled(module, 0, 1, 2), scaled(profiled(module, 3, 4, 5), 0.5)], whole)
    assert ours.peak == pytest.approx(whole.peak, rel=0.01)


def test_modules_whose_calls_tell_steps_apart() -> None:
    module = Skips()
    assert varying_paths([profiled(module, 0, 1), profiled(module, 0, 1)]) == []
    varying = varying_paths([profiled(module, 0, 1), profiled(module, 0, 2)])
    assert {path.rpartition(".")[0] or path for path in varying} >= {"blocks.1", "blocks.2"}
    assert not any(path.startswith(("blocks.0", "first", "last")) for path in varying)


class Recurrent(nn.Module):
    """What a recurrent layer keeps are many tensors that are too small to be values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.view(4, -1, WIDTH))[0].reshape(x.shape)
        return out


def test_small_tensors_of_calls_come_and_go_with_them() -> None:
    module = Skips()
    module.blocks = nn.ModuleList(Recurrent() for _ in range(4))
    module.called = range(4)
    whole = profiled(module, *range(4))
    ours = joined([profiled(module, 0, 1), profiled(module, 2, 3)], whole)
    assert ours.peak == pytest.approx(whole.peak, rel=0.03)


def test_what_a_step_lacks_takes_and_frees_nothing() -> None:
    """Some values of a dropout's mask are kept in less room than they were saved in."""
    module = Skips()
    profiles = [profiled(module, 0, 1, 2), profiled(module, 3)]
    step = joined(profiles, profiled(module, 1, 2, 3))
    assert min(unit.num_bytes for unit in Problem(step).units) >= 0
    for share in (0.8, 0.6):
        assert plan_profile(module, step, int(share * step.peak)).peak is not None


class Uneven(nn.Module):
    """One wide block, which is worth replaying, and two narrow ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for factor in (24, 4, 4):
            part = [
                nn.LayerNorm(16),
                nn.Linear(16, 16 * factor),
                nn.GELU(),
                nn.Linear(16 * factor, 16),
                nn.Dropout(0.1),
            ]
            self.blocks.append(nn.Sequential(*part))
        self.called: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        for number in self.called:
            x = x + self.blocks[number](x)
        return x.square().mean()


def test_requests_of_a_step_without_holds_are_of_none() -> None:
    module = Uneven()
    x = torch.ones(256, 16)
    profiles = []
    for called in ((0,), (1, 2)):
        module.called = called
        profiles.append(profile_module(module, x))
    profiles[1] = replace(profiles[1], holds=(), calls=())
    module.called = (0, 1, 2)
    step = joined(profiles, profile_module(module, x))
    assert {request.hold for request in step.requests} <= {-1, *range(len(step.holds))}
    assert plan_profile(module, step, int(0.95 * step.peak)).peak is not None
