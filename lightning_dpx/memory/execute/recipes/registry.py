"""The registry of recipes, and what the recipes share."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.python_objects.digest import Digest

Recipe = Callable[[Any], tuple[Callable[..., torch.Tensor], Sequence[Any]]]
RECIPES: dict[str, Recipe] = {}
OWN_RECIPES: dict[str, Recipe] = {}  # those among them that no file of this package has
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


def register_recipe(*names: str) -> Callable[[Recipe], Recipe]:
    """A decorator: how what a kind of autograd node makes is computed again, so that a plan may drop it.

    The node of an operator is called as ``tensor.grad_fn.name()`` says; that of a :class:`torch.autograd.Function` by
    its class, with ``Backward`` behind it. The recipe gets the node in the forward, and returns a function and the
    tensors that it is called with: ``node.edge(i)`` is the i-th input along the graph, ``node.saved("self")`` one that
    an operator of torch has kept, and other attributes are what the node noted of arguments that are no tensors. It
    must not hold on to the node, and raises ``lightning_dpx.memory.execute.recipes.NotRecomputable`` where this call
    cannot be repeated. What it makes must be the same bits: planning compares, and keeps what differs.

    Args:
        names: Of the nodes.

    Raises:
        ConfigurationError: a name is none, or has a recipe already; or what is decorated cannot be called.

    Examples:
        >>> class Cube(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x**3
        ...     @staticmethod
        ...     def backward(ctx, gradient):
        ...         (x,) = ctx.saved_tensors
        ...         return 3 * x**2 * gradient
        >>> @dpx.register_recipe("CubeBackward")
        ... def cube(node):
        ...     return lambda x: x**3, [node.edge(0)]
    """
    for name in names or ("",):
        if not isinstance(name, str) or not name:
            raise ConfigurationError(
                f"register_recipe({name!r}) is not allowed; give names of autograd nodes, as in "
                '@register_recipe("GeluBackward0"): tensor.grad_fn.name() says them.'
            )
    # Torch's own operators have theirs, and plans that were made before another one came would be others.
    taken = [name for name in names if name in RECIPES]
    if taken:
        raise ConfigurationError(f"register_recipe({taken[0]!r}): nodes of this name have a recipe already.")

    def add(function: Recipe) -> Recipe:
        if not callable(function):
            raise ConfigurationError(f"{function!r} is no recipe for {names[0]}; decorate a function of the node.")
        added = recipe(*names)(function)
        OWN_RECIPES.update(dict.fromkeys(names, added))
        return added

    return add


def own_recipes() -> str:
    """The recipes of the user's, each by the name of its nodes and a digest of its code, with spaces between."""
    found = []
    for name, function in sorted(OWN_RECIPES.items()):
        digest = Digest()
        digest.add(function)
        # Of what cannot be looked at nothing is known but its name.
        found.append(f"{name}:{digest.text()[:16] if digest.is_whole else '?'}")
    return " ".join(found)


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
