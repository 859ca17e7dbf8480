"""Tensor-parallel layers: what they save of distributed tensors is dropped and made again by its part."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.memory import profile_module
from lightning_dpx.memory.execute.distributed_tensors import origin_of, part_of
from lightning_dpx.memory.execute.module_anatomy import Anatomy
from tests.memory.plan.test_planning import measured_peak
from tests.memory.steps import train

WIDTH = 64


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """Of this process alone, which has the whole of every tensor for its part."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


class Block(nn.Module):
    """Rows (B, T, C) to such rows, with ``between`` two tensor-parallel layers."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.between(self.up(self.norm(x))))
        return out


def mixed(x: Tensor) -> Tensor:
    """As attention does: another order of the dims in memory."""
    heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
    return (heads.softmax(-1) * heads.tanh()).transpose(1, 2).flatten(2)


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "mixed": mixed,
    "transposed": lambda x: F.gelu(x.transpose(0, 1)).transpose(0, 1),
    "half": lambda x: F.gelu(x.repeat(2, 1, 1))[: len(x)],
    "written to": lambda x: F.gelu(x).mul_(0.5).add_(0.1),
}


def model(mesh: DeviceMesh, between: Callable[[Tensor], Tensor], **more: Any) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(between) for _ in range(4)))
    for block in blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(), **more})
    return blocks


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    found = train(module, x)
    return [one.to_local() if isinstance(one, DTensor) else one for one in found]


@pytest.mark.parametrize("between", BETWEEN)
def test_planned_steps_have_the_same_bits_and_the_predicted_peak(mesh: DeviceMesh, between: str) -> None:
    x = torch.randn(8, 16, WIDTH)
    module = model(mesh, BETWEEN[between])
    plain = model(mesh, BETWEEN[between])
    unplanned = measured_peak(plain, x)
    plan = dpx.search_plan(module, x)
    assert plan.unplanned_peak == pytest.approx(unplanned, rel=0.01)
    assert plan.peak < 0.92 * unplanned
    dpx.apply_plan(module, plan)
    for _ in range(3):  # the first step is followed call by call
        assert all(map(torch.equal, gradients(module, x), gradients(plain, x)))
    assert measured_peak(module, x) <= 1.01 * plan.peak


def test_what_a_layer_saves_of_a_distributed_tensor_is_made_again(mesh: DeviceMesh) -> None:
    profile = profile_module(model(mesh, F.gelu), torch.randn(8, 16, WIDTH))
    made = {value.name: value.operator for value in profile.values if value.name and not value.refused}
    assert made["0.up:1"] == "NativeLayerNormBackward0"
    assert made["0.down:1"] == "GeluBackward0"


def test_a_sequence_parallel_norm_keeps_what_only_its_process_can_give(mesh: DeviceMesh) -> None:
    """It is an operator on distributed tensors, which may talk to other processes when it is repeated."""
    x = torch.randn(8, 16, WIDTH)
    module, plain = (model(mesh, F.gelu, norm=SequenceParallel(use_local_output=True)) for _ in range(2))
    profile = profile_module(module, x)
    made = {value.operator for value in profile.values if value.name and not value.refused}
    assert made == {"GeluBackward0"}
    dpx.apply_plan(module, dpx.search_plan(module, x))
    assert all(map(torch.equal, gradients(module, x), gradients(plain, x)))


def test_a_distributed_tensor_that_is_written_to_after_it_was_saved_is_refused(mesh: DeviceMesh) -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = parallelize_module(nn.Linear(WIDTH, WIDTH), mesh, ColwiseParallel(use_local_output=False))
            self.writes = False

        def forward(self, x: Tensor) -> Tensor:
            rows = DTensor.from_local(F.gelu(x), mesh, run_check=False)
            out: Any = self.layer(rows)
            if self.writes:
                rows.add_(1)
            found: Tensor = out.to_local()
            return found

    messages = []
    for planned in (False, True):
        module = Written()
        x = torch.randn(64, WIDTH, requires_grad=True)
        if planned:
            plan = dpx.search_plan(module, x)
            dpx.apply_plan(module, plan.with_actions({"layer:1": "recompute"}))
        module.writes = True
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            module(x).sum().backward()
        messages.append(str(caught.value))
    assert "a distributed tensor of shape [64, 64]" in messages[1]


def test_a_part_is_found_over_views_and_no_further(mesh: DeviceMesh) -> None:
    x = torch.randn(4, 8, 16, requires_grad=True)
    made = F.gelu(x)
    rows: Any = DTensor.from_local(made, mesh, run_check=False)
    flat = rows.view(32, 16)
    part = part_of(flat)
    assert part is not None
    origin = origin_of(flat, part, lambda node, output: None)
    assert origin is not None
    assert origin.node is made.grad_fn
    assert origin.base.shape == made.shape
    assert origin.base.data_ptr() == made.data_ptr()
    added = rows + 1  # an operator of the distributed tensors themselves
    part = part_of(added)
    assert part is not None
    assert origin_of(added, part, lambda node, output: None) is None
    assert part_of(made) is None


@pytest.mark.parametrize("side", ["plain", "distributed"])
def test_a_part_is_found_over_aliases(mesh: DeviceMesh, side: str) -> None:
    made = F.gelu(torch.randn(4, 8, 16, requires_grad=True))
    given = torch.ops.aten.alias(made) if side == "plain" else made
    rows: Any = DTensor.from_local(given, mesh, run_check=False)
    if side == "distributed":
        rows = torch.ops.aten.alias(rows)
    part = part_of(rows)
    assert part is not None
    origin = origin_of(rows, part, lambda node, output: None)
    assert origin is not None
    assert origin.node is made.grad_fn, "and not the alias, for which a recipe would make a copy"
    assert origin.base.data_ptr() == made.data_ptr()


def test_what_is_saved_of_an_alias_is_made_again(mesh: DeviceMesh) -> None:
    x = torch.randn(8, 16, WIDTH)
    module, plain = (model(mesh, lambda x: torch.ops.aten.alias(F.gelu(x))) for _ in range(2))
    profile = profile_module(module, x)
    made = {value.name: value.operator for value in profile.values if value.name and not value.refused}
    assert made["0.down:1"] == "GeluBackward0"
    dpx.apply_plan(module, dpx.search_plan(module, x))
    for _ in range(3):
        assert all(map(torch.equal, gradients(module, x), gradients(plain, x)))


def test_no_cache_is_asked_for_which_processes_would_meet_in_a_step_or_not(mesh: DeviceMesh, tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    dpx.search_plan(model(mesh, F.gelu), torch.randn(8, 16, WIDTH), plan_cache=folder)
    assert not folder.exists()


class Remembers(PrepareModuleInput):
    """A style of the user's own, which counts."""

    def _prepare_input_fn(self, inputs: Any, device_mesh: DeviceMesh) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return super()._prepare_input_fn(inputs, device_mesh)


def remembers(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> None:
    module.count = 1


def test_only_what_torch_itself_brings_to_another_layout_is_called_again(mesh: DeviceMesh) -> None:
    layouts: Any = {"input_layouts": (Replicate(),), "desired_input_layouts": (Replicate(),)}
    torchs = {"up": ColwiseParallel(), "norm": SequenceParallel(), "down": PrepareModuleInput(**layouts)}
    assert Anatomy(parallelize_module(Block(F.gelu), mesh, torchs)).obstacle == ""
    own = parallelize_module(Block(F.gelu), mesh, {"up": Remembers(**layouts)})
    assert Anatomy(own).obstacle == "a Linear in it has forward hooks"
    given = Block(F.gelu)
    distribute_module(given.up, mesh, input_fn=remembers)
    assert Anatomy(given).obstacle == "a Linear in it has forward hooks"
