"""How a recipe is found, and what nodes note of their arguments."""

from types import SimpleNamespace

import pytest
import torch

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
