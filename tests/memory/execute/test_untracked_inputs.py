"""Inputs outside of the graph are known to recipes as they were in this very call, or not at all."""

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.memory.execute.recipes import NotRecomputable
from lightning_dpx.memory.execute.untracked_inputs import UntrackedInputs, WeakTensor, operand_of
from tests.memory.steps import DropsEverything, train

X = torch.rand(8, 8, requires_grad=True)


def _constant(result: Tensor, index: int = 0) -> object:
    found = operand_of(result.grad_fn, index)
    return found.base(10**6) if isinstance(found, WeakTensor) else found


def test_a_number_is_noted_as_it_is() -> None:
    with UntrackedInputs():
        result = torch.rsub(input=X, other=3)
    assert _constant(result) == 3


def test_a_tensor_is_noted_by_identity_and_not_kept_alive() -> None:
    mask, gone = torch.ones(8), torch.ones(8)
    reference = weakref.ref(gone)
    with UntrackedInputs():
        result, other = X + mask, X - gone
    del gone
    gc.collect()
    assert _constant(result) is mask
    assert reference() is None
    with pytest.raises(NotRecomputable, match="is gone"):
        _constant(other)


def test_of_a_view_the_base_is_known() -> None:
    table = nn.Parameter(torch.rand(16, 8), requires_grad=False)
    with UntrackedInputs():
        result = X + table[4:12]
    found = operand_of(result.grad_fn, 0)
    assert found.base(0) is table  # a parameter lives anyway
    assert found.view == ((8, 8), (8, 1), 32)


def test_a_tensor_that_was_written_to_since_is_unknown() -> None:
    mask = torch.ones(8)
    with UntrackedInputs():
        result = X + mask
    mask.mul_(2)
    with pytest.raises(NotRecomputable, match="changed in place"):
        _constant(result)


def test_a_tensor_that_would_have_to_be_kept_in_place_of_the_result_is_refused() -> None:
    noise = torch.ones(8, 8)
    with UntrackedInputs():
        result = X + noise
    with pytest.raises(NotRecomputable, match="as large as the result"):
        operand_of(result.grad_fn, 0).base(noise.nbytes - 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.cos(),
        lambda x: x + x,
        lambda x: torch.ops.aten.add(x, 1),
        lambda x: torch.rsub(x, 1, 2),
        lambda x: x.add(np.float32(1)),
        lambda x: F.pad(x, (1, 1)).view(-1),
    ],
)
def test_what_is_not_noted_is_unknown(call: Callable[[Tensor], Tensor]) -> None:
    with UntrackedInputs():
        result = call(X)
    with pytest.raises(NotRecomputable, match="is not part of the graph"):
        operand_of(result.grad_fn, 0)


HANDED_OUT = {
    "torch.ops": lambda x: torch.ops.aten.add.Tensor(x, 0.5),
    "a view": lambda x: torch.ops.aten.add.Tensor(x, 0.5).view(64, 1),
    "two with gradients": lambda x: x + x,
    "a norm": lambda x: torch.native_layer_norm(x, [8], None, None, 0.1)[0],
}
HANDS_OUT = {
    "F.dropout": lambda y: F.dropout(y, 0.1, training=False),
    "F.dropout in place": lambda y: F.dropout(input=y, p=0.1, training=False, inplace=True),
    "torch.dropout": lambda y: torch.dropout(y, 0.1, False),
    "F.dropout of nothing": lambda y: F.dropout(y, 0.0, training=True),
}


@pytest.mark.parametrize("hands_out", HANDS_OUT)
@pytest.mark.parametrize("handed_out", HANDED_OUT)
def test_a_call_that_hands_out_its_input_notes_nothing_at_the_node_of_another_operator(
    handed_out: str, hands_out: str
) -> None:
    watched = list[object]()
    with UntrackedInputs(watched.append):
        y = HANDED_OUT[handed_out](X)
        num_watched = len(watched)
        assert HANDS_OUT[hands_out](y) is y
    assert len(watched) == num_watched
    node = y.grad_fn.next_functions[0][0] if handed_out == "a view" else y.grad_fn
    with pytest.raises(NotRecomputable, match="is not part of the graph"):
        operand_of(node, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda y: y.add_(1.5),
        lambda y: y.masked_fill_(torch.zeros(8, dtype=torch.bool), 1.5),
        lambda y: y.masked_fill(torch.zeros(8, dtype=torch.bool), 1.5),
        lambda y: F.pad(y, (0, 0), value=1.5),
        lambda y: torch.nan_to_num(y, 1.5),
        lambda y: y.where(torch.ones(8, dtype=torch.bool), 1.5),
        lambda y: y + 1.5,
    ],
)
def test_a_call_that_changes_nothing_has_a_node_of_its_own(call: Callable[[Tensor], Tensor]) -> None:
    y = torch.ops.aten.add.Tensor(X, 0.5)
    before = y.grad_fn
    with UntrackedInputs():
        result = call(y)
    assert result.grad_fn is not before
    assert _constant(result) == 1.5
    with pytest.raises(NotRecomputable, match="is not part of the graph"):
        operand_of(before, 0)


class AddsNumber(nn.Module):
    """Adds by an operator that is not noted, and hands the sum through a dropout in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.number = nn.Linear(64, 64), nn.Linear(64, 64), 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.ops.aten.add.Tensor(self.one(x), self.number)
        x = F.dropout(x, 0.1, training=False)
        return self.two(torch.sin(x)).cos()


def test_what_a_dropout_hands_out_is_not_made_again_with_an_operand_of_the_dropout() -> None:
    torch.manual_seed(0)
    module, plain, x = AddsNumber(), AddsNumber(), torch.rand(64, 64)
    plain.load_state_dict(module.state_dict())
    dpx.apply_plan(module, dpx.search_plan(module, x, planner=DropsEverything()))
    for number in (0.0, 5.0):  # False, which the dropout was called with, is 0
        module.number = plain.number = number
        assert all(map(torch.equal, train(module, x, steps=2), train(plain, x, steps=2)))


class Changing(nn.Module):
    """Other numbers, masks and frozen biases in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.step = nn.Linear(64, 64), nn.Linear(64, 64), 0
        self.register_buffer("masks", torch.rand(16, 64))
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(64), requires_grad=False) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        x = torch.tanh(self.one(x)) + self.step
        x = (1.5 * self.step - x) * torch.sigmoid(x + self.masks[self.step])
        bias = self.biases[self.step]
        out: Tensor = torch.tanh(F.linear(x, self.two.weight, bias)) * x
        return out


def test_operands_that_change_from_step_to_step_are_the_ones_of_the_step() -> None:
    torch.manual_seed(0)
    module, x = Changing(), torch.rand(64, 64)
    plain = Changing()
    plain.load_state_dict(module.state_dict())
    plan = dpx.search_plan(module, x, planner=DropsEverything())
    dropped = {decision.operator for decision in plan.decisions if decision.action == "recompute"}
    assert {"RsubBackward1", "SigmoidBackward0", "TanhBackward0"} <= dropped
    plain.step = module.step
    applied = dpx.apply_plan(module, plan)
    assert all(map(torch.equal, train(module, x), train(plain, x)))
    assert not applied.not_found


class Replaced(nn.Module):
    """The frozen bias is written to between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.one.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(torch.tanh(self.one(x)))
        return out


def test_a_frozen_bias_that_is_written_to_before_backward_is_reported() -> None:
    module, x = Replaced(), torch.rand(64, 64)
    dpx.apply_plan(module, dpx.search_plan(module, x, planner=DropsEverything()))
    loss = module(x).sum()
    with torch.no_grad():
        module.one.bias.add_(1)
    with pytest.raises(RuntimeError, match="changed in place: a parameter of shape \\[64\\], the output of constant"):
        loss.backward()


def test_nothing_is_noted_for_a_plan_that_needs_nothing() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.rand(64, 64)
    applied = dpx.apply_plan(module, dpx.search_plan(module, x, planner=DropsEverything()))
    seen: list[bool] = []
    module[1].register_forward_hook(lambda *_: seen.append(torch._C._len_torch_function_stack() > 0))
    for _ in range(3):
        module(x).sum().backward()
    assert seen == [True, False, False]
    assert not applied.not_found


class Padded(nn.Module):
    """Pads in every step but the first, with something else than zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.pad = nn.Linear(64, 64), False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(x))
        x = F.pad(x, (1, 1), value=7.0) if self.pad else F.pad(x, (1, 1))
        return torch.tanh(x) * x


def test_what_a_pad_is_filled_with_is_that_of_the_step_in_a_routine_too() -> None:
    torch.manual_seed(0)
    module, x = Padded(), torch.rand(64, 64)
    plain = Padded()
    plain.load_state_dict(module.state_dict())
    applied = dpx.apply_plan(module, dpx.search_plan(module, x, planner=DropsEverything()))
    for _ in range(2):
        module(x).sum().backward()
    module.pad = plain.pad = True
    assert all(map(torch.equal, train(module, x, steps=1), train(plain, x, steps=1)))
    assert not applied.not_found


class Remembers(nn.Module):
    """Reads what it has kept of the call before without a graph, as attention does with a cache of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(64, 128)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        now, values = self.keys(x).chunk(2, -1)
        seen = now if self.kept is None else torch.cat([self.kept, now])
        # Gone before the sum is saved, as only a view of it is kept.
        self.kept = now.detach()[-48:]
        return (seen.sin().sum(0) + now * values).tanh()


class Chunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Remembers()

    def forward(self, x: Tensor) -> Tensor:
        self.layer.kept = None
        return sum((self.layer(chunk).mean() for chunk in x.chunk(4)), torch.zeros(()))


def follow_a_plan(kind: type[nn.Module]) -> None:
    """Three steps at 0.6 of the peak have the gradients of one without a plan."""
    torch.manual_seed(0)
    module, rows = kind(), torch.rand(256, 64)
    module(rows).backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    plan = dpx.search_plan(module, rows, budget=0.6, progress=False)
    applied = dpx.apply_plan(module, plan)
    for _ in range(3):  # the first one is followed call by call, the others in a routine
        module.zero_grad()
        peak = peak_of_passing(lambda: module(rows).backward())
        assert all(map(torch.equal, [parameter.grad for parameter in module.parameters()], expected))
        assert not applied.not_found
        assert peak <= plan.budget


def test_a_detached_part_of_a_value_is_dropped_and_made_again_with_it() -> None:
    follow_a_plan(Chunks)


def test_an_operand_without_numbers_is_known_although_it_is_gone() -> None:
    gone = torch.ones(3, 0, 8)[:, :, 2:]
    with UntrackedInputs():
        result = torch.cat([X.expand(3, 8, 8)[:, :, 2:], gone], 1)
    del gone
    found = _constant(result)
    assert isinstance(found, Tensor)
    assert found.shape == (3, 0, 6)


class BeginsEmpty(nn.Module):
    """Puts its keys behind those in a cache, which is new and empty in every step, as decoders of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            cache = torch.tensor([], dtype=x.dtype)
            cache = torch.cat([cache, layer(x)])
            x = (cache * x).tanh()
        return x.mean()


def test_what_is_put_behind_nothing_is_dropped_and_made_again() -> None:
    follow_a_plan(BeginsEmpty)
