"""Modules that FSDP1 wraps, as what they were before."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import lightning_dpx as dpx
from lightning_dpx.memory.execute.calls import Call
from lightning_dpx.memory.execute.flat_units import holds_views, inside, is_flat_unit, unwrapped
from lightning_dpx.memory.execute.sharded_units import sharded_units
from lightning_dpx.memory.module_step import profile_module
from tests.memory.sharded_program import WIDTH, Block, Model, Steps, wrapped

# One process has nothing to shard, and is told so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*switching to use `NO_SHARD`.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*NO_SHARD.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*barrier.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Tied(nn.Module):
    """Two layers have one weight, and one has nothing to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.fixed(self.block(self.first(x))))


@pytest.mark.parametrize("keeps", [True, False])
def test_names_and_shapes_are_those_of_before_and_all_is_put_back(keeps: bool) -> None:
    model = wrapped(use_orig_params=keeps)
    x = torch.randn(8, WIDTH)
    before = Steps(model, x).gradients()
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    with unwrapped(model) as whole:
        assert whole is inside(model)
        assert [name for name, _ in whole.named_modules()] == [name for name, _ in Model().named_modules()]
        shapes = {name: one.shape for name, one in whole.named_parameters()}
        assert shapes == {name: one.shape for name, one in Model().named_parameters()}
        assert all(one.is_meta for one in whole.parameters())
        assert sharded_units(whole) == ["", "blocks.0", "blocks.1", "blocks.2"]
        assert holds_views(whole.head)
    assert not is_flat_unit(whole)
    assert dict(model.named_modules()) == modules
    assert list(dict(model.named_parameters())) == list(parameters)
    assert all(one is parameters[name] for name, one in model.named_parameters())
    assert all(map(torch.equal, Steps(model, x).gradients(), before))


def test_tied_parameters_stay_tied_and_fixed_ones_are_trained_beside_others_of_their_unit() -> None:
    policy = ModuleWrapPolicy({Block})
    model = FullyShardedDataParallel(
        Tied(), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    with unwrapped(model) as whole:
        assert whole.first.weight is whole.last.weight
        assert whole.fixed.weight.requires_grad
        assert whole.block.up.weight.requires_grad


@pytest.mark.filterwarnings("ignore:.*has both parameters with requires_grad.*:UserWarning")
@pytest.mark.parametrize("late", [False, True])
def test_steps_with_frozen_parameters_take_what_is_predicted(late: bool) -> None:
    """All of a unit, and some beside others of theirs; frozen before they are wrapped, or afterwards."""
    plain = Model()
    frozen = [plain.blocks[0], plain.blocks[1].down, plain.blocks[2].down]
    for part in () if late else frozen:
        part.requires_grad_(False)
    policy = ModuleWrapPolicy({Block})
    model = FullyShardedDataParallel(
        plain, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    for part in frozen:
        part.requires_grad_(False)
    x = torch.randn(2048, WIDTH)
    peak = Steps(model, x).peak()
    assert dpx.search_plan(model, x, budget=1.0).unplanned_peak == pytest.approx(peak, rel=0.05)


def test_a_module_without_wrappers_is_left_alone() -> None:
    model = Model()
    with unwrapped(model) as whole:
        assert whole is model
        assert not any(one.is_meta for one in whole.parameters())
    assert inside(model) is model


def test_what_another_unit_makes_is_kept() -> None:
    profile = profile_module(wrapped(use_orig_params=True), torch.randn(64, WIDTH))
    refused = {value.name: value.refused for value in profile.values if value.name}
    assert refused["blocks.2.norm:1"] == "it is made from parameters of another sharded unit"
    assert refused["blocks.2.up:1"] == "", "it is made from parameters of its own unit"


def test_a_plan_that_was_made_before_is_refused_as_it_may_need_two_units_at_once() -> None:
    plan = dpx.search_plan(Model(), torch.randn(64, WIDTH), budget=0.7)
    model = wrapped(use_orig_params=True)
    with pytest.raises(dpx.PlanError, match=r"sharded in units \(none\), and this one is in blocks\.0 blocks\.1 bl"):
        dpx.apply_plan(model, plan)
    Steps(model, torch.randn(64, WIDTH)).run()


def test_a_plan_goes_through_a_file_to_a_module_with_the_same_units(tmp_path: Path) -> None:
    x = torch.randn(64, WIDTH)
    plan = dpx.search_plan(wrapped(use_orig_params=True), x, budget=0.7)
    plan.save(str(tmp_path / "plan.yaml"))
    model = wrapped(use_orig_params=False)
    before = Steps(model, x).gradients()
    applied = dpx.apply_plan(model, dpx.MemoryPlan.load(str(tmp_path / "plan.yaml")))
    assert all(map(torch.equal, Steps(model, x).gradients(), before))
    assert applied.plan.dropped | applied.plan.replayed
    assert not applied.not_found


def test_a_call_that_holds_a_unit_is_not_made_again() -> None:
    model = wrapped(use_orig_params=True)
    call = Call(model.module, "", (torch.randn(2, WIDTH),), {}, 0)
    assert call.obstacle == "a unit of FullyShardedDataParallel in it meets the other processes"


class Scaled(Model):
    """A buffer of the outermost unit, which takes part in what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale.to(x.dtype))


POLICIES = [
    MixedPrecision(param_dtype=torch.bfloat16),
    MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16),
    MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True, cast_root_forward_inputs=False),
    MixedPrecision(reduce_dtype=torch.bfloat16),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("runs_before", [False, True])
def test_units_are_planned_in_the_dtype_that_they_compute_in(policy: MixedPrecision, runs_before: bool) -> None:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        Scaled(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        mixed_precision=policy,
    )
    x = torch.randn(2048, WIDTH)
    steps = Steps(model, x)
    if runs_before:  # which casts buffers
        steps.run()
    plan = dpx.search_plan(model, x, budget=0.6)
    buffer = model.module.scale
    assert buffer.dtype is (policy.buffer_dtype if runs_before and policy.buffer_dtype else torch.float32)
    before = steps.gradients()
    assert plan.unplanned_peak == pytest.approx(steps.peak(), rel=0.05)
    dpx.apply_plan(model, plan)
    assert plan.dropped | plan.replayed, "whichever takes less here"
    assert all(map(torch.equal, steps.gradients(), before))
    assert steps.peak() == pytest.approx(plan.peak, rel=0.05)
