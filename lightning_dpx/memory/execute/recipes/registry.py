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


def argument(node: Any, name: str) -> Any:
    """What the node noted of an argument that is no tensor."""
    value = getattr(node, name)
    if isinstance(value, tuple):
        return [signed(entry) if type(entry) is int else entry for entry in value]
    return signed(value) if type(value) is int else value


def with_arguments(operator: Callable[..., Any], *arguments: str) -> Recipe:
    """Of one tensor and what the node noted of the other arguments, in the operator's order."""

    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        given = [argument(node, name) for name in arguments]
        output = node.output

        def again(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor | Sequence[torch.Tensor] = operator(x, *given)
            return result if isinstance(result, torch.Tensor) else result[output]

        return again, [node.edge(0)]

    return make


def of_saved(operator: Callable[..., torch.Tensor], *names: str) -> Recipe:
    """Of tensors that the node saved under ``names``, or that come along its edges in this order."""
    return lambda node: (operator, [node.saved(name, edge=index) for index, name in enumerate(names)])
