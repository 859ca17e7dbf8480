"""Plans of modules whose parameters ``fully_shard`` has spread over processes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lightning_dpx as dpx
from lightning_dpx.memory.module_step import profile_module
from lightning_dpx.memory.sharding import plan_of_first_rank, unsharded
from tests.memory.sharded_program import WIDTH, Model, Steps, followed, sharded
from tests.programs import start

pytestmark = pytest.mark.filterwarnings("ignore:.*barrier.*:UserWarning")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes print."""
    store = tmp_path_factory.mktemp("sharded") / "store"
    program = Path(__file__).with_name("sharded_program.py")
    processes = [start(program, rank, store) for rank in range(2)]
    printed = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, printed, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in printed]


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("budget", ["0.7", "0.5", "None", "wrapped True", "wrapped False"])
def test_planned_steps_have_the_same_bits_and_collectives_on_all_processes(
    found: list[dict[str, Any]], budget: str
) -> None:
    first, second = (one[budget] for one in found)
    assert first["dropped"] == second["dropped"] != []
    for one in (first, second):
        assert one["same"]
        assert one["same_collectives"]


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("budget", ["0.7", "0.5", "wrapped True", "wrapped False"])
def test_the_peak_falls_by_what_was_predicted_on_all_processes(found: list[dict[str, Any]], budget: str) -> None:
    for one in found:
        assert one["peak"] == pytest.approx(one["predicted"], rel=0.05)
        assert one[budget]["peak"] == pytest.approx(one[budget]["predicted"], rel=0.05)


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_refusal_of_the_first_process_is_that_of_all(found: list[dict[str, Any]]) -> None:
    assert "A budget of 1.00 KiB for activations cannot be met" in found[0]["refusal"]
    assert found[1]["refusal"] == f"The first process found no plan: {found[0]['refusal']}"
    # Whatever retries when memory runs out does so in all of them.
    assert found[1]["smallest"] == found[0]["smallest"] > 1024


@pytest.fixture
def one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_sharded_module_is_profiled_as_what_it_was_and_stays_sharded() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, WIDTH)
    whole = profile_module(Model(), x)
    model = sharded()
    before = Steps(model, x).gradients()
    parameters = dict(model.named_parameters())
    with unsharded(model):
        assert {tuple(one.shape) for one in model.parameters()} == {tuple(one.shape) for one in Model().parameters()}
        assert all(one.is_meta for one in model.parameters())
        assert not model.blocks[0]._forward_pre_hooks
    assert profile_module(model, x).peak == whole.peak
    assert all(one is parameters[name] for name, one in model.named_parameters())
    assert "_apply" not in vars(model)
    assert all(map(torch.equal, Steps(model, x).gradients(), before))


@pytest.mark.usefixtures("one_process")
def test_what_another_unit_makes_is_kept() -> None:
    profile = profile_module(sharded(), torch.randn(64, WIDTH))
    refused = {value.name: value.refused for value in profile.values if value.name}
    assert refused["blocks.2.norm:1"] == "it is made from parameters of another sharded unit"
    assert refused["blocks.2.up:1"] == "", "it is made from parameters of its own unit"


def sharded_in_blocks(inner: MixedPrecisionPolicy, outer: MixedPrecisionPolicy) -> Model:
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=inner)
    return fully_shard(model, mesh=mesh, mp_policy=outer)


HALVES = MixedPrecisionPolicy(torch.bfloat16)
POLICIES = [
    (HALVES, HALVES),
    (HALVES, MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)),
    (MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32), MixedPrecisionPolicy()),
    (MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False), HALVES),
]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("inner", "outer"), POLICIES)
@pytest.mark.parametrize("budget", [0.6, None])
def test_units_are_planned_in_the_dtypes_of_their_policy(
    inner: MixedPrecisionPolicy, outer: MixedPrecisionPolicy, budget: float | None
) -> None:
    steps = Steps(sharded_in_blocks(inner, outer), torch.randn(2048, WIDTH))
    before = steps.gradients()
    unplanned = steps.peak()
    plan = dpx.search_plan(steps.model, steps.x, budget=budget)
    assert plan.unplanned_peak == pytest.approx(unplanned, rel=0.05)
    found = followed(steps, plan, dpx.estimate_cost(steps.model, plan, steps.x)["peak"])
    assert found["dropped"]
    assert found["same"]
    # Gathered parameters are small here, and come on top.
    assert found["peak"] == pytest.approx(found["predicted"], rel=0.05)
    assert found["peak"] < 0.75 * unplanned
    assert all(map(torch.equal, steps.gradients(), before))


def sharded_in_two_dims() -> Model:
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


@pytest.mark.usefixtures("one_process")
def test_units_that_are_tensor_parallel_as_well_are_planned() -> None:
    steps = Steps(sharded_in_two_dims(), torch.randn(2048, WIDTH))
    before = steps.gradients()
    unplanned = steps.peak()
    plan = dpx.search_plan(steps.model, steps.x, budget=0.6)
    found = followed(steps, plan, plan.peak)
    assert plan.replayed  # blocks, within which processes meet
    assert found["same"]
    assert found["peak"] <= plan.peak * 1.05
    assert found["peak"] < 0.65 * unplanned
    assert all(map(torch.equal, steps.gradients(), before))


def test_without_processes_a_plan_is_made_here() -> None:
    assert plan_of_first_rank(lambda: 3) == 3


@pytest.mark.usefixtures("one_process")
def test_a_step_that_fake_tensors_cannot_run_says_what_to_do() -> None:
    model = sharded()
    model.head.register_forward_hook(lambda module, args, output: output * output.sum().item())
    with pytest.raises(dpx.PlanError) as raised:
        dpx.search_plan(model, torch.randn(64, WIDTH), budget=0.5)
    message = str(raised.value)
    assert "_local_scalar_dense" in message
    assert "such as .item()" in message
    assert "a plan that was made before fully_shard can be applied afterwards" in message
    # The module is neither on the meta device nor fake, nor can a real one be given.
    assert "meta" not in message
