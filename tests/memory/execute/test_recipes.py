"""Every recipe repeats its operator to the bit, and a value that has to be kept says why."""

import pytest
import torch
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.memory.execute.graph_tape import Node
from lightning_dpx.memory.execute.recipes import RECIPES, NotRecomputable
from lightning_dpx.memory.plan.problem import Choice, Planner, Problem
from tests.memory.execute.recipes import (
    test_attention,
    test_combining,
    test_matrices,
    test_norms,
    test_pointwise,
    test_pooling,
    test_shapes,
)
from tests.memory.execute.recipes.probe import Function, Probe, node_name
from tests.memory.execute.recipes.test_second_order import SECOND_ORDER, node_of
from tests.memory.steps import train

ALL_EXAMPLES = [module.EXAMPLES for module in (
    test_attention, test_combining, test_matrices, test_norms, test_pooling, test_pointwise, test_shapes,
)]  # fmt: skip
# Made by other devices, other builds of torch, or autograd itself.
ELSEWHERE = {
    "BackwardHookFunctionBackward", "CudnnBatchNormBackward0", "LinearBackward0", "MiopenBatchNormBackward0",
    "ReshapeAliasBackward0", "SqueezeBackward1", "SqueezeBackward2", "ClampBackward1", "MeanBackward1", "SumBackward1",
    "CudnnGridSamplerBackward0", "FusedRmsNormBackward0", "ScaledDotProductCudnnAttentionBackward0",
    "ScaledDotProductEfficientAttentionBackward0", "ScaledDotProductFlashAttentionBackward0",
    "ThnnFusedGruCellBackward0", "ThnnFusedLstmCellBackward0",
    *map(node_of, SECOND_ORDER),
}  # fmt: skip


def test_every_recipe_has_an_example() -> None:
    names = {node_name(name) for examples in ALL_EXAMPLES for name in examples} | ELSEWHERE
    assert set(RECIPES) <= names


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda _, x: torch.special.i0(x), "no recipe for I0Backward0"),
        (lambda _, x: torch.ops.aten.add(x, 1), "an operand of AddBackward0 is not part of the graph"),
        (lambda _, x: x + torch.ones(1, 8, 8, 8), "an operand outside of the graph is gone"),
        (lambda p, x: p.count(x), "an operand outside of the graph was changed in place"),
        (lambda p, x: x + p.large, "an operand outside of the graph is as large as the result"),
        (lambda p, x: F.group_norm(x, 4, p.bias, None), "a norm with a weight and no bias"),
        (
            lambda _, x: torch.native_layer_norm(x, (8,), None, None, 0.1)[0],
            "an operand of NativeLayerNormBackward0 is",
        ),
    ],
)
def test_what_has_no_recipe_is_kept_and_says_why(function: Function, why: str) -> None:
    torch.manual_seed(0)
    module = Probe(function)
    seen: list[str] = []

    class Look(Planner):
        name = "look"

        def choose(self, problem: Problem, budget: int | None) -> Choice:
            seen.extend(value.refused for value in problem.profile.values)
            return Choice(frozenset(problem.droppable))

    plan = dpx.search_plan(module, torch.ones(1), planner=Look())
    assert any(why in refused for refused in seen), set(seen)
    plain = Probe(function)
    plain.load_state_dict(module.state_dict())
    dpx.apply_plan(module, plan)
    assert all(map(torch.equal, train(module, torch.ones(1)), train(plain, torch.ones(1))))


def test_what_another_version_of_torch_does_not_note_is_a_reason_to_keep() -> None:
    """A node's attributes are torch's own: group norm lost its eps in torch 2.14."""
    made = torch.ones(2, requires_grad=True).exp()
    node = Node(owner=None, node=made.grad_fn, output=0, depth=0)  # type: ignore[arg-type]
    assert not hasattr(node, "eps")
    with pytest.raises(NotRecomputable, match=r"ExpBackward0 of torch .* notes no eps"):
        _ = node.eps
