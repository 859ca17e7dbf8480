"""Gradients of operators, where a backward records gradients itself: forces, gradient penalties.

Most formulas of derivatives consist of ordinary operators. These are the ones that have an operator of their own.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lightning_dpx.memory.execute.recipes.registry import Recipe, argument, aten, recipe, signed


def _of_result(operator: Callable[..., torch.Tensor]) -> Recipe:
    """A recipe that takes the gradient and the result of the forward."""
    return lambda node: (operator, [node.saved("grad_output", edge=0), node.saved("output", edge=1)])


def _of_input(operator: Callable[..., torch.Tensor], *names: str) -> Recipe:
    """A recipe that takes the gradient, the input of the forward and other arguments."""

    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        rest = {name: argument(node, name) for name in names}
        return partial(operator, **rest), [node.saved("grad_output", edge=0), node.saved("self", edge=1)]

    return make


recipe("TanhBackwardBackward0")(_of_result(aten.tanh_backward.default))
recipe("SigmoidBackwardBackward0")(_of_result(aten.sigmoid_backward.default))
recipe("GeluBackwardBackward0")(_of_input(aten.gelu_backward.default, "approximate"))
recipe("SoftplusBackwardBackward0")(_of_input(aten.softplus_backward.default, "beta", "threshold"))
recipe("HardswishBackwardBackward0")(_of_input(aten.hardswish_backward.default))


@recipe("ThresholdBackwardBackward0")
def _threshold(node: Any) -> Any:
    # The gradient that comes in is not saved: the result is linear in it.
    threshold = node.threshold
    inputs = [node.edge(0), node.saved("self", edge=1)]
    return (lambda gradient, result: aten.threshold_backward.default(gradient, result, threshold)), inputs


@recipe("LeakyReluBackwardBackward0")
def _leaky_relu(node: Any) -> Any:
    slope = node.negative_slope
    # Only the sign of what was saved counts, be it the input or, in place, the result.
    inputs = [node.edge(0), node.saved("self", edge=1)]
    return (lambda gradient, x: aten.leaky_relu_backward.default(gradient, x, slope, False)), inputs


@recipe("EluBackwardBackward0")
def _elu(node: Any) -> Any:
    # ``is_result`` tells whether the forward's result was saved: in place there is no input left.
    numbers = node.alpha, node.scale, node.input_scale, node.is_result
    inputs = [node.saved("grad_output", edge=0), node.saved("self_or_result", edge=1)]
    return (lambda gradient, x: aten.elu_backward.default(gradient, *numbers, x)), inputs


def _softmax(operator: Callable[..., torch.Tensor]) -> Recipe:
    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        dim = signed(node.dim)
        dtype = node.dtype
        inputs = [node.saved("grad_output", edge=0), node.saved("output", edge=1)]
        return (lambda gradient, result: operator(gradient, result, dim, dtype)), inputs

    return make


recipe("SoftmaxBackwardDataBackward0")(_softmax(aten._softmax_backward_data.default))
recipe("LogSoftmaxBackwardDataBackward0")(_softmax(aten._log_softmax_backward_data.default))
