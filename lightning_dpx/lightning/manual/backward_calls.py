"""Every backward that user code runs inside a manual step, however it calls it.

``manual_backward``, ``strategy.backward``, an own ``LightningModule.backward`` and a plain ``loss.backward()`` all end
in ``torch.autograd.backward``. While replicas run a manual step, that function and ``torch.autograd.grad`` ask the
replica which calls them first. Threads that run no replica's code get the functions as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from lightning_dpx.lightning.manual.acts_once import current_view
from lightning_dpx.torch_compat import roots_of

# Activation checkpointing runs a backward inside a backward, which is a part of the one that is under way.
_INSIDE: ContextVar[bool] = ContextVar("lightning_dpx_inside_backward", default=False)
_backward = torch.autograd.backward
_grad = torch.autograd.grad


@contextmanager
def backwards_intercepted() -> Iterator[None]:
    """The calling replica's view runs the backwards of this process's manual step, for a while."""
    before = torch.autograd.backward, torch.autograd.grad
    torch.autograd.backward = _backward_of_replica
    torch.autograd.grad = _grad_of_replica  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = before


def _backward_of_replica(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    view = current_view()
    # Some callers pass these by position, so the signature is that of torch.
    options = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
    # grad_variables is the name that torch has deprecated.
    given = grad_tensors if grad_variables is None else grad_variables
    if view is None or _INSIDE.get():
        _backward(tensors, given, **options)
        return
    roots = roots_of(tensors)
    gradients = weighted(roots, given, view.weight)

    def run() -> None:
        # A backward that checkpointing runs in here goes on from this one, which has
        # the weight already.
        token = _INSIDE.set(True)
        try:
            _backward(roots, gradients, **options)
        finally:
            _INSIDE.reset(token)

    view.run_backward(run, create_graph=create_graph)


def _grad_of_replica(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **options: Any) -> Any:
    view = current_view()
    if view is None or _INSIDE.get():
        return _grad(outputs, inputs, grad_outputs, *args, **options)
    wanted = list(inputs.values()) if isinstance(inputs, dict) else list(roots_of(inputs))
    # By position it comes after retain_graph.
    create_graph = options.get("create_graph", args[1] if len(args) > 1 else False)
    # Gradients of inputs are those of this slice's rows, and nothing to sum.
    if not view.sums_gradients_of(wanted, create_graph=bool(create_graph)):
        return _grad(outputs, inputs, grad_outputs, *args, **options)
    roots = roots_of(outputs)
    found = _grad(roots, inputs, weighted(roots, grad_outputs, view.weight), *args, **options)
    if isinstance(found, dict):
        return dict(zip(found, view.total_of(wanted, list(found.values())), strict=True))
    return tuple(view.total_of(wanted, list(found)))


def weighted(roots: tuple[Any, ...], gradients: Any, weight: float) -> Any:
    """The gradients that a backward of ``roots`` starts with, times what this slice's loss weighs in the batch's."""
    # Torch's own default is a gradient of ones.
    if weight == 1:
        return gradients
    given = [None] * len(roots) if gradients is None else list(roots_of(gradients))
    result = []
    for root, gradient in zip(roots, given, strict=True):
        if gradient is not None:
            result.append(gradient * weight)
        elif isinstance(root, torch.Tensor) and root.numel() == 1:
            result.append(torch.full_like(root, weight))
        else:
            result.append(None)  # torch has its own words for a root that is no scalar
    return tuple(result)
