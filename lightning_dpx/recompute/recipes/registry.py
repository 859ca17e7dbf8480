"""The registry of recipes, and what the recipes share."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Recipe = Callable[[Any], tuple[Callable[..., torch.Tensor], Sequence[Any]]]
RECIPES: dict[str, Recipe] = {}
VIEWS: set[str] = set()  # names among them: nothing is allocated, and it is done again for everybody who looks
aten = torch.ops.aten


class NotRecomputable(Exception):  # noqa: N818  it is an answer more than an error
    """The value must be kept; says why."""


def recipe(*names: str) -> Callable[[Recipe], Recipe]:
    """Registers a recipe for the outputs of the autograd nodes called ``names``."""

    def add(function: Recipe) -> Recipe:
        for name in names:
            if RECIPES.setdefault(name, function) is not function:
                raise ValueError(f"There is a recipe for {name} already.")
        return function

    return add


def view(*names: str) -> Callable[[Recipe], Recipe]:
    """Likewise, for nodes that show their only input in another shape."""
    VIEWS.update(names)
    return recipe(*names)


def recipe_for(name: str) -> Recipe:
    """The recipe for nodes of this name.

    Raises:
        NotRecomputable: there is none.
    """
    found = RECIPES.get(name)
    if found is None:
        raise NotRecomputable(f"there is no recipe for {name}")
    return found


def signed(number: int) -> int:
    """Nodes show negative dims as unsigned 64-bit numbers."""
    return number - 2**64 if number >= 2**63 else number


def with_arguments(operator: Callable[..., torch.Tensor], *arguments: str) -> Recipe:
    """Of one tensor and what the node noted of the other arguments, in the operator's order."""

    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        given = [getattr(node, argument) for argument in arguments]
        given = [signed(value) if type(value) is int else value for value in given]
        return (lambda x: operator(x, *given)), [node.edge(0)]

    return make
