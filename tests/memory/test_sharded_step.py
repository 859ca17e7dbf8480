"""The memory of a rank on fakes is that of real steps of it."""

from typing import Any

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.memory.absent_ranks import absent_ranks, shard_units
from lightning_dpx.memory.sharded_step import rank_memory, shard_bytes
from tests.memory.sharded_program import WIDTH, Model, Steps, sharded

CUDA = torch.device("cuda:0")


def step_of(model: Model) -> Any:
    return lambda rows: lambda: model(rows).square().mean()


@pytest.mark.host
@pytest.mark.parametrize("budget", [1.0, 0.5, None])
def test_what_comes_and_goes_is_that_of_real_steps_with_and_without_a_plan(budget: float | None) -> None:
    with absent_ranks(2):
        model, rows = sharded(), torch.randn(1024, WIDTH)
        plan = dpx.search_plan(model, rows, budget=budget)
        found = rank_memory(model, rows, CUDA, step_of(model), plan)
        dpx.apply_plan(model, plan)
        steps = Steps(model, rows)
        steps.run()
        # Gradients outlive the step, and so are no part of what passes.
        assert found.peak - found.gradients == pytest.approx(steps.peak(), rel=0.001)
        dpx.remove_plan(model)


def test_the_module_is_what_it_was_and_can_be_followed_again() -> None:
    with absent_ranks(2):
        model, rows = sharded(), torch.randn(256, WIDTH)
        Steps(model, rows).run()  # from its first forward on, torch looks no more for other parameters
        model.zero_grad()
        before = dict(model.named_parameters())
        values = [one.to_local().clone() for one in model.parameters()]
        first = rank_memory(model, rows, CUDA, step_of(model), None)
        assert rank_memory(model, rows, CUDA, step_of(model), None) == first
        assert all(one is before[name] and one.grad is None for name, one in model.named_parameters())
        assert all(map(torch.equal, [one.to_local() for one in model.parameters()], values))
        found = Steps(model, rows).gradients()
        assert all(type(one) is torch.Tensor for one in found), "no fakes are left in it"
        # Before, what a fake process group gathers from the others is whatever was there in memory.
        if torch.__version__ >= (2, 13):
            assert all(map(torch.equal, found, Steps(sharded(), rows).gradients()))


def test_gradients_of_an_earlier_step_are_added_to() -> None:
    with absent_ranks(2):
        model, rows = sharded(), torch.randn(8, WIDTH)
        first = rank_memory(model, rows, CUDA, step_of(model), None)
        later = rank_memory(model, rows, CUDA, step_of(model), None, accumulates=True)
        assert first.gradients > 0, "of so few rows, activations are the least of it"
        assert later.gradients == 0
        assert later.peak < first.peak


def test_shards_are_padded_and_states_are_not() -> None:
    with absent_ranks(3) as mesh:
        model = torch.nn.Sequential(torch.nn.Linear(2, 4, bias=False), torch.nn.Linear(4, 6, bias=False))
        model[1].requires_grad_(False)
        shard_units(model, ["."], mesh["data_parallel"])
        held = shard_bytes(model)
    # Of 4 rows every rank has room for 2, and the first one has 2; of 6 rows every rank has 2.
    assert held == (4 * (2 * 2 + 2 * 4), 4 * 2 * 2, 4 * 2 * 2)


def test_parameters_in_no_unit_are_whole() -> None:
    with absent_ranks(2) as mesh:
        model = Model()
        torch.distributed.fsdp.fully_shard(model.blocks[0], mesh=mesh["data_parallel"])
        whole = sum(
            one.nbytes for block in (model.blocks[1], model.blocks[2], model.head) for one in block.parameters()
        )
        part = sum(one.nbytes for one in Model().blocks[0].parameters()) // 2
        assert shard_bytes(model) == (whole + part,) * 3


def test_a_step_that_looks_at_numbers_says_so() -> None:
    with absent_ranks(2):
        model = sharded()
        model.head.register_forward_hook(lambda module, args, output: output * output.sum().item())
        with pytest.raises(dpx.PlanError, match=r"What a rank takes .* cannot run this step of \w*Model .*\.item\(\)"):
            rank_memory(model, torch.randn(8, WIDTH), CUDA, step_of(model), None)


def test_a_unit_that_is_not_called_itself_is_named_as_the_reason() -> None:
    with absent_ranks(2) as mesh:
        model = torch.nn.Sequential(Model())
        shard_units(model, ["."], mesh["data_parallel"])
        with pytest.raises(dpx.PlanError, match="A unit gathers its parameters when it is called itself"):
            rank_memory(model, torch.randn(8, WIDTH), CUDA, lambda rows: lambda: model[0](rows).sum(), None)
