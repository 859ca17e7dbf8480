"""The registry of recipes, and what the recipes share."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Recipe = Callable[[Any], tuple[Callable[..., torch.Tensor], Sequence[Any]]]
RECIPES: dict[str, Recipe] = {}
VIEWS: set[str] = set()  # names among them: nothing is allocated, and it is done again for everybody who looks
aten: Any = torch.ops.aten


class NotRecomputable(Exception):  # noqa: N818  it is an answer more than an error
    """The value must be kept; says why."""


class NotNoted(NotRecomputable, AttributeError):  # noqa: N818
    """The node has nothing of this name: other versions of torch note other things."""


def recipe(*names: str) -> Callable[[Recipe], Recipe]:
    """Registers a recipe for the outputs of the autograd nodes called ``names``."""

    def add(function: Recipe) -> Recipe:
        for name in names:
            if RECIPES.setdefault(name, function) is not function:
                raise ValueError(f"There is a recipe for {name} already.")
        return function

    return add


def view(*names: str) -> Callable[[Recipe], Recipe]:
    """Registers a recipe for nodes that show their only input in another shape."""
    VIEWS.update(names)
    return recipe(*names)


def recipe_for(name: str) -> Recipe:
    """The recipe for nodes of this name.

    Raises:
        NotRecomputable: there is none.
    """
    recipe_of_name = RECIPES.get(name)
    if recipe_of_name is None:
        raise NotRecomputable(f"there is no recipe for {name}")
    return recipe_of_name


def signed(number: int) -> int:
    """Nodes show negative dims as unsigned 64-bit numbers."""
    if number >= 2**63:
        return number - 2**64
    return number


def argument(node: Any, name: str) -> Any:
    """What the node noted of an argument that is no tensor."""
    value = getattr(node, name)
    if isinstance(value, tuple):
        return [signed(entry) if type(entry) is int else entry for entry in value]
    if type(value) is int:
        return signed(value)
    return value


def with_arguments(operator: Callable[..., Any], *arguments: str) -> Recipe:
    """A recipe of one tensor and of what the node noted of the other arguments, in order."""

    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        # Read at once: the function that is returned must not hold on to the node.
        given = [argument(node, name) for name in arguments]
        output = node.output

        # An operator of several results has one node; ``output`` is the one that is asked for.
        def again(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor | Sequence[torch.Tensor] = operator(x, *given)
            if isinstance(result, torch.Tensor):
                return result
            selected: torch.Tensor = result[output]
            return selected

        return again, [node.edge(0)]

    return make


def of_saved(operator: Callable[..., torch.Tensor], *names: str) -> Recipe:
    """A recipe of tensors that the node saved under ``names``, or of its edges in this order."""

    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        return operator, [node.saved(name, edge=index) for index, name in enumerate(names)]

    return make
