"""What a step saves and asks for, with everything kept."""

import pytest
import torch
from torch import Tensor, nn

from lightning_dpx.memory import profile_module, profile_step
from lightning_dpx.memory.profile.held_output import HeldOutput
from tests.conftest import SIMULATED


class Doubled(nn.Module):
    """Nobody saves ``h``, and the sum asks for it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        y = h + h
        return y * y


def test_a_value_that_nobody_saves_is_asked_for_twice_by_one_operator() -> None:
    profile = profile_module(Doubled(), torch.randn(32, 64))
    (total,) = [value for value in profile.values if value.operator == "AddBackward0"]
    assert not total.refused
    assert len(total.inputs) == 2


class _Codes(nn.Module):
    """Chooses codes by what a chain of layers gives, and nothing leads from the loss back to that chain."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
        self.beside = nn.Linear(64, 64)
        self.codes = nn.Embedding(16, 64)

    def forward(self, rows: Tensor) -> Tensor:
        features = self.encode(rows)
        # A second branch, which dies before the end of the first does.
        self.beside(features.tanh()).sin()
        chosen = torch.mm(features, self.codes.weight.T).argmax(1)
        del features
        return self.codes(chosen).square().mean()


def test_a_whole_chain_that_dies_in_the_forward_is_dropped_for_nothing() -> None:
    profile = profile_module(_Codes(), torch.randn(64, 64))
    names = [f"encode.{number}:1" for number in range(1, 8)]
    dead = {value.name: value for value in profile.values if value.name in names}
    assert sorted(dead) == names
    assert not any(value.refused or value.seconds for value in dead.values())


class _Remembers(nn.Module):
    """Leaves a tensor on itself, and puts another buffer in the place of the one that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.last: Tensor | None = None
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, rows: Tensor) -> Tensor:
        found = self.layer(rows).tanh()
        self.last = found.detach()
        self.mean = self.mean * 0.9 + self.last.mean(0)
        return found.square().mean()


def test_what_a_step_leaves_on_its_module_is_told_with_a_buffer_beside_the_one_that_it_replaces() -> None:
    module = _Remembers()
    rows = torch.randn(32, 64)
    step = HeldOutput(lambda: module(rows), lambda loss: loss)
    assert profile_step(module, step, torch.device("cpu")).left_behind == 32 * 64 * 4 + 64 * 4


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_on_a_device_what_comes_in_the_place_of_another_tensor_is_not_left_beside_it() -> None:
    device = torch.device("sim", 0)
    module = _Remembers().to(device)
    rows = torch.randn(32, 64).to(device)
    step = HeldOutput(lambda: module(rows), lambda loss: loss)
    first = profile_step(module, step, device).left_behind
    module(rows)
    # Only the buffer, which replicas list until the next step.
    assert profile_step(module, step, device).left_behind == first - 32 * 64 * 4
