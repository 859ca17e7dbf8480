"""How a recipe is found, and what nodes note of their arguments."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.memory.execute.recipes import registry


def test_nodes_without_a_recipe_say_so_and_a_node_has_one_recipe() -> None:
    with pytest.raises(registry.NotRecomputable, match="no recipe for NobodyBackward0"):
        registry.recipe_for("NobodyBackward0")
    taken = next(iter(registry.RECIPES))
    with pytest.raises(ValueError, match=f"a recipe for {taken} already"):
        registry.recipe(taken)(lambda node: (torch.neg, ()))


def test_negative_dims_are_shown_as_large_numbers_and_read_as_negative_ones() -> None:
    node = SimpleNamespace(_saved_dim=2**64 - 1, _saved_dims=(0, 2**64 - 2), _saved_eps=0.5)
    assert registry.argument(node, "_saved_dim") == -1
    assert registry.argument(node, "_saved_dims") == [0, -2]
    assert registry.argument(node, "_saved_eps") == 0.5


class Node(SimpleNamespace):
    """What a recipe sees of a node."""

    def edge(self, index: int) -> str:
        return f"edge {index}"

    def saved(self, name: str, edge: int) -> str:
        return f"{name} or edge {edge}"


def test_a_recipe_of_arguments_takes_its_output_among_several() -> None:
    make = registry.with_arguments(torch.chunk, "chunks", "dim")
    again, inputs = make(Node(chunks=2, dim=2**64 - 1, output=1))
    assert list(inputs) == ["edge 0"]
    assert again(torch.arange(4).view(2, 2)).tolist() == [[1], [3]]


def test_a_recipe_of_saved_tensors_falls_back_to_the_edges() -> None:
    operator, inputs = registry.of_saved(torch.mul, "_saved_self", "_saved_other")(Node())
    assert operator is torch.mul
    assert list(inputs) == ["_saved_self or edge 0", "_saved_other or edge 1"]


class Cube(torch.autograd.Function):
    """Of somebody's own: no other recipe makes what it returns."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class Cubes(nn.Module):
    """Rows (B, 8) to (B, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 256), nn.Linear(256, 256), nn.Linear(256, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(Cube.apply(self.second(Cube.apply(self.first(rows)))))


def smallest(module: nn.Module) -> int:
    """The least bytes of activations that a plan reaches."""
    with pytest.raises(dpx.BudgetError) as told:
        dpx.search_plan(module, torch.ones(512, 8), budget=1)
    return told.value.smallest


@pytest.mark.usefixtures("own_registries")
def test_a_recipe_of_ones_own_lets_a_plan_drop_what_a_function_makes() -> None:
    kept = smallest(Cubes())
    dpx.register_recipe("CubeBackward")(lambda node: (lambda x: x**3, [node.edge(0)]))
    assert smallest(Cubes()) < 0.9 * kept


@pytest.mark.usefixtures("own_registries")
def test_what_a_recipe_makes_otherwise_is_kept() -> None:
    kept = smallest(Cubes())
    dpx.register_recipe("CubeBackward")(lambda node: (lambda x: x**2, [node.edge(0)]))
    assert smallest(Cubes()) == kept


@pytest.mark.usefixtures("own_registries")
def test_an_error_in_a_recipe_of_ones_own_names_it() -> None:
    dpx.register_recipe("CubeBackward")(lambda node: (torch.neg, [node.edge(9)]))
    with pytest.raises(IndexError) as told:
        dpx.search_plan(Cubes(), torch.ones(512, 8), budget=1)
    assert "It happened in the recipe that register_recipe('CubeBackward') was given." in told.value.__notes__


@pytest.mark.usefixtures("own_registries")
def test_a_plan_is_not_followed_with_another_recipe_than_it_was_made_with() -> None:
    def cube(node):
        return lambda x: x**3, [node.edge(0)]

    def square(node):
        return lambda x: x**2, [node.edge(0)]

    module = Cubes()
    dpx.register_recipe("CubeBackward")(cube)
    plan = dpx.search_plan(module, torch.ones(512, 8), budget=smallest(module))
    assert not plan.keeps_all
    for other in (None, square):
        for recipes in (registry.RECIPES, registry.OWN_RECIPES):
            recipes.pop("CubeBackward")
        if other is not None:
            dpx.register_recipe("CubeBackward")(other)
        with pytest.raises(dpx.PlanError, match="another recipe for CubeBackward than the one that is registered now"):
            dpx.apply_plan(module, plan)
        registry.RECIPES["CubeBackward"] = registry.OWN_RECIPES["CubeBackward"] = cube
    dpx.register_recipe("MineBackward")(square)
    dpx.apply_plan(module, plan)


@pytest.mark.parametrize(
    ("names", "function", "told"),
    [
        ((), len, r"register_recipe\(''\) is not allowed; give names of autograd nodes"),
        ((3,), len, r"register_recipe\(3\) is not allowed"),
        (("AddmmBackward0",), len, "nodes of this name have a recipe already"),
        (("MineBackward",), 3, "3 is no recipe for MineBackward; decorate a function of the node"),
    ],
)
def test_recipes_that_are_none(names: tuple[str, ...], function: object, told: str) -> None:
    with pytest.raises(dpx.ConfigurationError, match=told):
        dpx.register_recipe(*names)(function)
