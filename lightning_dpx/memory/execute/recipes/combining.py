"""Recipes of operators on two or more inputs."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch

from lightning_dpx.memory.execute.recipes.registry import Recipe, aten, of_saved, recipe, signed


@recipe("AddBackward0")
def _add(node: Any) -> Any:
    add = torch.add if node.alpha == 1 else partial(torch.add, alpha=node.alpha)
    return add, [node.operand(0), node.operand(1)]


@recipe("SubBackward0")
def _sub(node: Any) -> Any:
    return partial(torch.sub, alpha=node.alpha), [node.operand(0), node.operand(1)]


@recipe("RsubBackward0", "RsubBackward1")
def _rsub(node: Any) -> Any:
    # One edge: the other operand is a number. Two: it is a tensor, which may need no gradient.
    number = node.constant() if node.num_edges == 1 else node.operand(1)
    return partial(torch.rsub, alpha=node.alpha), [node.operand(0), number]


@recipe("MaskedFillBackward0", "MaskedFillBackward1")
def _masked_fill(node: Any) -> Any:
    # One edge: it is filled with a number. Two: with a tensor, which may need no gradient.
    number = node.constant() if node.num_edges == 1 else node.operand(1)
    return torch.masked_fill, [node.edge(0), node.saved("mask"), number]


@recipe("MulBackward0")
def _mul(node: Any) -> Any:
    return _in_dtype_of(node, torch.mul), [node.saved("self", edge=0), node.saved("other", edge=1)]


@recipe("DivBackward0")
def _div(node: Any) -> Any:
    return _in_dtype_of(node, torch.div), [node.saved("self", edge=0), node.saved("other", edge=1)]


def _in_dtype_of(node: Any, operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``operator``, with numbers in the dtype of the result."""
    # A number is saved as a tensor without dims, which has forgotten that it was a number: a complex one
    # would widen the result.
    dtype = node.dtype
    if not dtype.is_complex:
        return operator

    def combine(*given: torch.Tensor) -> torch.Tensor:
        return operator(*(entry.to(dtype) if not entry.ndim else entry for entry in given))

    return combine


@recipe("AddcmulBackward0")
def _addcmul(node: Any) -> Any:
    return partial(torch.addcmul, value=node.value), [
        node.operand(0),
        node.saved("tensor1", edge=1),
        node.saved("tensor2", edge=2),
    ]


@recipe("WhereBackward0")
def _where(node: Any) -> Any:
    # Autograd saves the condition alone: gradients of the others do not depend on their numbers.
    return torch.where, [node.saved("condition"), node.operand(0), node.operand(1)]


def _joined(operator: Callable[..., torch.Tensor]) -> Recipe:
    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        dim = signed(node.dim)
        # The call noted those of its tensors that need no gradient, in order: the first of them
        # stands in the first place without an edge.
        missing = count()
        parts = []
        for index in range(node.num_edges):
            part = node.edge(index) if node.has_edge(index) else node.constant(next(missing))
            parts.append(part)
        return (lambda *parts: operator(parts, dim)), parts

    return make


recipe("CatBackward0")(_joined(torch.cat))
recipe("StackBackward0")(_joined(torch.stack))


@recipe("LerpBackward0")
def _lerp(node: Any) -> Any:
    weight = node.weight
    return (lambda start, end: torch.lerp(start, end, weight)), [node.edge(0), node.edge(1)]


@recipe("LerpBackward1")
def _lerp_by_tensor(node: Any) -> Any:
    return torch.lerp, [node.edge(0), node.saved("end", edge=1), node.saved("weight", edge=2)]


@recipe("AddcdivBackward0")
def _addcdiv(node: Any) -> Any:
    inputs = [node.edge(0), node.saved("tensor1", edge=1), node.saved("tensor2", edge=2)]
    return partial(torch.addcdiv, value=node.value), inputs


@recipe("LinalgCrossBackward0")
def _cross(node: Any) -> Any:
    return partial(torch.linalg.cross, dim=signed(node.dim)), [node.saved("self", edge=0), node.saved("other", edge=1)]


@recipe("ClampBackward0")
def _clamp(node: Any) -> Any:
    # Bounds that are tensors; with numbers it is another node. Either of them may be left out.
    bounds = {}
    for name in ("min", "max"):
        bound = node.optional(name)
        if bound is not None:
            bounds[name] = bound

    def clamp(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return torch.clamp(x, **dict(zip(bounds, given, strict=True)))

    return clamp, [node.saved("self", edge=0), *bounds.values()]


recipe("MaximumBackward0")(of_saved(torch.maximum, "self", "other"))
recipe("MinimumBackward0")(of_saved(torch.minimum, "self", "other"))
recipe("Atan2Backward0")(of_saved(torch.atan2, "self", "other"))
recipe("HypotBackward0")(of_saved(torch.hypot, "self", "other"))
recipe("XlogyBackward0")(of_saved(torch.xlogy, "self", "other"))
recipe("LogaddexpBackward0")(of_saved(torch.logaddexp, "self", "other"))
recipe("PowBackward1")(of_saved(torch.pow, "self", "exponent"))
recipe("ComplexBackward0")(of_saved(torch.complex, "real", "imag"))
# This node saves its result in place of its inputs.
recipe("PolarBackward0")(lambda node: (torch.polar, [node.edge(0), node.edge(1)]))


@recipe("PreluKernelBackward0")
def _prelu(node: Any) -> Any:
    return aten._prelu_kernel.default, [node.saved("self", edge=0), node.saved("weight", edge=1)]


@recipe("NativeDropoutBackward0")
def _dropout(node: Any) -> Any:
    if node.constant() is False:  # of the call: the node does not note whether it was in training
        return torch.clone, [node.edge(0)]
    # The mask was drawn once and is saved. With ``p=1`` torch scales by zero as well.
    scale = 1.0 / (1.0 - node.p) if node.p < 1 else 0.0
    return (lambda x, mask: x * mask * scale), [node.edge(0), node.saved("result1")]
