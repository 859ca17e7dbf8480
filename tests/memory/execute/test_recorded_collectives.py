"""What collectives give in a call is kept for its replay, which meets no other process."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_dpx as dpx
from lightning_dpx.memory import profile_module
from lightning_dpx.memory.execute.recorded_collectives import (
    AnswersCollectives,
    RecordsCollectives,
    needed,
    results_apart,
    sharing_memory,
)
from tests.memory.execute.test_whole_call_replays import by_hand
from tests.memory.plan.test_planning import measured_peak

WIDTH = 32
Meet = Callable[[Tensor, str], Tensor]
ops: Any = torch.ops._c10d_functional


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """Of this process alone, whose collectives run all the same."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


class Counts(TorchDispatchMode):
    """The collectives that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func) and "wrap" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Sum(torch.autograd.Function):
    """Over all processes; each has the gradient of the sum already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return ops.wait_tensor(ops.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class SumInPlace(Sum):
    """The same with the collective of ``torch.distributed``, which writes to what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        result = x.clone()
        distributed.all_reduce(result)
        return result


class Exponential(torch.autograd.Function):
    """A function of the user's own: what it saves only a call of the module round it can give again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradient * result


class Block(nn.Module):
    """Rows (B, T, C) to such rows: two layers, between which processes meet."""

    def __init__(self, mesh: DeviceMesh, meet: Meet) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(distribute_tensor(torch.ones(WIDTH), mesh, [Replicate()]))
        self.meet = meet
        self.group = str(mesh.get_group().group_name)

    def forward(self, x: Tensor) -> Tensor:
        scale: Any = self.scale
        met = self.meet(self.down(F.gelu(self.up(self.norm(x)))) * scale.to_local(), self.group)
        out: Tensor = x + met.tanh() * met.sigmoid()
        return out


def blocks(mesh: DeviceMesh, meet: Meet = Sum.apply) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(mesh, meet) for _ in range(4)))


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    module(x).square().mean().backward()
    found = [one.grad for one in module.parameters() if one.grad is not None]
    return [one.to_local() if isinstance(one, DTensor) else one for one in found]


def test_replays_have_the_same_bits_and_collectives_and_the_predicted_peak(mesh: DeviceMesh) -> None:
    x = torch.randn(8, 64, WIDTH)
    module, plain = blocks(mesh), blocks(mesh)
    plan = by_hand(module, "0", "1", "2", "3")
    predicted = dpx.estimate_cost(module, plan, x)["peak"]
    assert predicted < 0.6 * measured_peak(plain, x)
    dpx.apply_plan(module, plan)
    for _ in range(3):
        with Counts() as counts:
            found = gradients(module, x)
        assert len(counts.names) == 4, "one in each block"
        assert all(map(torch.equal, found, gradients(plain, x)))
    assert measured_peak(module, x) == pytest.approx(predicted, rel=0.01)


class WithoutParts(nn.Module):
    """Processes meet in it as well, and each has all of its parameters."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.group = str(mesh.get_group().group_name)

    def forward(self, x: Tensor) -> Tensor:
        return Exponential.apply(Sum.apply(self.linear(x), self.group))


@pytest.mark.parametrize("kind", ["parts", "whole"])
def test_nothing_that_is_tried_meets_other_processes(mesh: DeviceMesh, kind: str) -> None:
    """They run steps of a profile as often, and may have nothing to try."""
    module = blocks(mesh) if kind == "parts" else nn.Sequential(*(WithoutParts(mesh) for _ in range(4)))
    forwards = list[int]()
    module.register_forward_pre_hook(lambda *_: forwards.append(1))
    group: Any = mesh.get_group()
    before = group._get_sequence_number_for_group()
    profile_module(module, torch.randn(8, 64, WIDTH))
    assert group._get_sequence_number_for_group() - before == 4 * len(forwards) > 0


def written(x: Tensor, group: str) -> Tensor:
    found: Tensor = Sum.apply(x, group)
    return found.mul_(2)


@pytest.mark.parametrize("meet", [written, SumInPlace.apply])
def test_calls_are_kept_whose_collectives_cannot_be_given_again(mesh: DeviceMesh, meet: Any) -> None:
    x = torch.randn(8, 64, WIDTH)
    module, plain = blocks(mesh, meet), blocks(mesh, meet)
    assert not {call.name for call in profile_module(module, x).calls} & {"0", "1", "2", "3"}
    dpx.apply_plan(module, by_hand(module, "0", "1", "2", "3"))
    with Counts() as counts:
        found = gradients(module, x)
    assert len(counts.names) == 4
    assert all(map(torch.equal, found, gradients(plain, x)))


class Returns(Block):
    """Goes on with what a collective gave, and returns that as well."""

    def forward(self, x: Tensor) -> Any:
        scale: Any = self.scale
        met = self.meet(x * scale.to_local(), self.group)
        return met, self.down(F.gelu(self.up(self.norm(met * 2))))


@dataclass
class Both:
    """What no tree of outputs opens."""

    met: Tensor
    out: Tensor


class ReturnsBoth(Returns):
    def forward(self, x: Tensor) -> Both:
        return Both(*super().forward(x))


class FillsBox(Returns):
    def forward(self, x: Tensor, box: dict[str, Tensor]) -> Tensor:
        box["met"], out = super().forward(x)
        return cast(Tensor, out)


@pytest.mark.parametrize("kind", [Returns, ReturnsBoth, FillsBox])
def test_a_result_that_leaves_a_call_may_be_written_to_later(mesh: DeviceMesh, kind: type[Returns]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.returns = kind(mesh, Sum.apply)

        def forward(self, x: Tensor) -> Tensor:
            box = dict[str, Tensor]()
            if kind is FillsBox:
                out = self.returns(x, box)
                met = box["met"]
            else:
                both = self.returns(x)
                met, out = (both.met, both.out) if isinstance(both, Both) else both
            changed: Tensor = met.mul_(0.5)
            return changed + out

    x = torch.randn(8, 64, WIDTH)
    module, plain = Model(), Model()
    dpx.apply_plan(module, by_hand(module, "returns"))
    with Counts() as counts:
        found = gradients(module, x)
    assert len(counts.names) == 1
    assert all(map(torch.equal, found, gradients(plain, x)))


def recorded(mesh: DeviceMesh, forward: Callable[[Tensor], Any]) -> RecordsCollectives:
    with RecordsCollectives(lambda: 0) as record:
        forward(torch.ones(4))
    return record


def test_what_is_written_to_or_does_not_arrive_is_told(mesh: DeviceMesh) -> None:
    whole = recorded(mesh, lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", mesh)) + 1)
    changed = recorded(mesh, lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", mesh)).add_(1))
    results = list[Tensor]()
    waiting = recorded(mesh, lambda x: results.append(functional.all_reduce(x, "sum", mesh)))
    other = recorded(mesh, distributed.all_reduce)
    functional.wait_tensor(results[0])  # or torch warns of it at the end
    obstacles = [record.found[0].obstacle for record in (whole, changed, waiting, other)]
    assert obstacles == [
        "",
        "it writes to what its _c10d_functional::all_reduce has given",
        "what its _c10d_functional::all_reduce gives does not arrive in it",
        "it talks to other processes by c10d::allreduce_",
    ]


def test_a_replay_that_meets_processes_otherwise_is_refused(mesh: DeviceMesh) -> None:
    def meet(x: Tensor) -> Tensor:
        return functional.wait_tensor(functional.all_reduce(x, "sum", mesh))

    record = recorded(mesh, meet)
    with Counts() as counts, AnswersCollectives("block", record.found):
        again = meet(torch.zeros(4))
        with pytest.raises(RuntimeError, match=r"'block' runs _c10d_functional::all_reduce .* did not before"):
            meet(torch.zeros(4))
    assert torch.equal(again, torch.ones(4)), "what the first one gave"
    with (
        AnswersCollectives("block", record.found),
        pytest.raises(RuntimeError, match="on other tensors or with other options"),
    ):
        meet(torch.zeros(5))
    with AnswersCollectives("block", record.found), pytest.raises(RuntimeError, match="'block' writes to what its"):
        meet(torch.zeros(4)).add_(1)
    with AnswersCollectives("block"), pytest.raises(RuntimeError, match="allreduce_ when it is called again"):
        distributed.all_reduce(torch.zeros(4))
    assert not counts.names


def test_only_results_before_the_last_saved_tensor_are_needed(mesh: DeviceMesh) -> None:
    saved = iter([3, 5])
    with RecordsCollectives(lambda: next(saved)) as record:
        results = [functional.wait_tensor(functional.all_reduce(torch.ones(4), "sum", mesh)) for _ in range(2)]
    kept = needed(record.found, 5)
    assert kept == record.found[:1]
    # What is returned may be written to by others.
    (apart,) = results_apart(kept)
    results[0].add_(1)
    assert torch.equal(apart.result, torch.ones(4))
    assert sharing_memory([results[0][1:], results[1], 3], [results[0]])[0].shape == (3,)
    results.clear()
    # Threads of the backend hold a result until they have told that it is there.
    deadline = time.monotonic() + 30
    while results_apart(kept) != kept and time.monotonic() < deadline:
        time.sleep(0.01)
    assert results_apart(kept) == kept, "nobody else is left who could write to it"
