"""Steps with automatic optimization that run a backward themselves, as of an auxiliary loss.

What it leaves in ``.grad`` is of a slice, and weighs nothing: on one device it is zeroed before Lightning's backward,
or added to the gradients of an accumulation window. So such a step has its batches whole. Gradients of inputs, which
reach no parameter, are each slice's own, and stay; so do those of a step that seeks directions for its inputs and then
drops what parameters have got (``zero_grad()``), as is seen when it ends.

``loss.backward()`` ends in ``torch.autograd.backward``, which asks here while steps run on slices.
"""

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_dpx.lightning.run_again import StaysWhole
from lightning_dpx.python_objects.shared_patch import SharedPatch, Undo
from lightning_dpx.torch_compat import nodes_of_graph, roots_of

REASON = "It runs a backward itself, which adds to the gradients of parameters what a slice has."
ADVICE = "For all devices to take part, add that loss to the one that the step returns."


class OwnBackwardError(StaysWhole):
    """A step runs a backward on a slice, which has left no gradient: it is to run on the whole batch."""

    def __init__(self) -> None:
        super().__init__(REASON, ADVICE)


class BackwardWatch:
    """Looks for backwards of a step that reach parameters, while :data:`BACKWARDS_ASK` is entered.

    Args:
        refuses: Whether such a backward ends the step.
    """

    def __init__(self, *, refuses: bool) -> None:
        self._refuses = refuses
        self._reached: dict[int, torch.Tensor] = {}

    @property
    def seen(self) -> bool:
        """Whether there was one."""
        return bool(self._reached)

    @property
    def leaves_gradients(self) -> bool:
        """Whether any of the parameters that such backwards have reached has a gradient now."""
        # Some set it to zero in place of None.
        left = [parameter.grad for parameter in self._reached.values() if parameter.grad is not None]
        return any(bool(gradient.any()) for gradient in left)

    def refuse_gradients(self) -> None:
        """The step ends, and must have dropped what its backwards gave to parameters.

        Raises:
            OwnBackwardError: it has not; there are no such gradients any more.
        """
        if not self.leaves_gradients:
            return
        for parameter in self._reached.values():
            parameter.grad = None
        raise OwnBackwardError

    def follow(self, roots: Iterable[Any], inputs: Any, parameters: Iterable[nn.Parameter]) -> None:
        """A backward begins.

        Args:
            roots: What it begins from.
            inputs: The tensors that shall get gradients; ``None`` for all.
            parameters: Of the module whose step it is.

        Raises:
            OwnBackwardError: it would write gradients of slices.
        """
        # By id: to compare parameters is to compare their numbers.
        trained = set(map(id, parameters))
        leaves = _leaves_of(roots) if inputs is None else roots_of(inputs)
        for leaf in leaves:
            if id(leaf) in trained:
                self._reached[id(leaf)] = leaf
        if self._reached and self._refuses:
            raise OwnBackwardError


def may_drop_gradients(trainer: Any) -> bool:
    """Whether slices may run backwards whose gradients they drop: none of an earlier batch is lost with these."""
    return bool(trainer.accumulate_grad_batches == 1)


# The step that the calling code belongs to, and the parameters of its module.
RUNNING: ContextVar[tuple[BackwardWatch, nn.Module] | None] = ContextVar("lightning_dpx_step", default=None)


class step_of:  # noqa: N801  a context manager, entered for every slice: no generator
    """The calling code is a step of ``module`` for a while.

    Args:
        watch: What is told of its backwards; ``None`` where nothing is.
        module: Of the replica.
    """

    __slots__ = ("_token", "_value")

    def __init__(self, watch: BackwardWatch | None, module: nn.Module) -> None:
        self._value = None if watch is None else (watch, module)

    def __enter__(self) -> None:
        self._token = RUNNING.set(self._value)

    def __exit__(self, *_: object) -> None:
        RUNNING.reset(self._token)


def _have_backwards_ask() -> Undo:
    # Asked for now: it may be another one than when this was imported.
    before = torch.autograd.backward
    # As overridden() does, without its calls: this is done in every step.
    names = vars(torch.autograd)
    names["backward"] = partial(_ask_first, before)
    return partial(names.__setitem__, "backward", before)


# While it is entered, in any thread, ``torch.autograd.backward`` asks first.
BACKWARDS_ASK = SharedPatch(_have_backwards_ask)


def _ask_first(backward: Callable[..., None], tensors: Any, *args: Any, **options: Any) -> None:
    running = RUNNING.get()
    if running is not None:
        watch, module = running
        # By position it is the last of five.
        inputs = args[4] if len(args) > 4 else options.get("inputs")
        watch.follow(roots_of(tensors), inputs, module.parameters())
        # Activation checkpointing runs a backward inside of this one, which is a part of it.
        with step_of(None, module):
            backward(tensors, *args, **options)
        return
    backward(tensors, *args, **options)


def _leaves_of(roots: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The leaves that a backward from ``roots`` comes to."""
    nodes: list[Any] = []
    for root in roots:
        if isinstance(root, torch.Tensor) and root.grad_fn is None:
            yield root
        else:
            nodes.append(root.grad_fn if isinstance(root, torch.Tensor) else root.node)
    for node in nodes_of_graph(nodes):
        # Only the node that adds to a leaf's gradient has one.
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
