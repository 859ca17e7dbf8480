"""Recipes of normalizations."""

from collections.abc import Sequence
from typing import Any

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.memory.execute.recipes.registry import NotRecomputable, aten, recipe, signed


@recipe("NativeBatchNormBackward0")
def _batch_norm(node: Any) -> Any:
    return _of_batch_norm(node, aten.native_batch_norm.default, ("result1", "result2"), "eps")


@recipe("CudnnBatchNormBackward0")
def _batch_norm_of_cudnn(node: Any) -> Any:
    names = ("result1", "result2") if node.saves("result1") else ("save_mean", "save_var")
    return _of_batch_norm(node, aten.cudnn_batch_norm.default, names, "epsilon")


@recipe("MiopenBatchNormBackward0")
def _batch_norm_of_miopen(node: Any) -> Any:
    names = ("result1", "result2") if node.saves("result1") else ("save_mean", "save_var")
    return _of_batch_norm(node, aten.miopen_batch_norm.default, names, "epsilon")


def _of_batch_norm(node: Any, operator: Any, names: tuple[str, str], name_of_eps: str) -> Any:
    """Calls ``operator`` again, with the statistics of then where that rounds the same.

    No running statistic is updated again.
    """
    if node.output:
        raise NotRecomputable("only the first output of batch norm is computed again")
    affine = _affine(node)
    eps = getattr(node, name_of_eps)
    if getattr(node, "training", True):

        def scale(x: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
            if _is_folded(x, inverse, affine):
                return _folded(x, mean, inverse, affine)
            weight, bias = affine if affine else (None, None)
            # Without running statistics: those of this batch are in them already.
            normal: torch.Tensor = operator(x, weight, bias, None, None, True, 0.0, eps)[0]
            return normal

        return scale, [node.saved("input", edge=0), node.saved(names[0]), node.saved(names[1]), *affine]

    def infer(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
        weight, bias = affine if affine else (None, None)
        normal: torch.Tensor = operator(x, weight, bias, mean, variance, False, 0.0, eps)[0]
        return normal

    # A call in training mode in between writes into the running statistics, without counting up their version.
    mean, variance = node.copies("running_mean", "running_var")
    return infer, [node.saved("input", edge=0), mean, variance, *affine]


def _is_folded(x: torch.Tensor, inverse: torch.Tensor, affine: Sequence[torch.Tensor]) -> bool:
    """Whether batch norm in training multiplies the weight by the inverse deviation before it scales with both."""
    # So the host does with dense inputs. Elsewhere, and with strides, it scales with one after the other,
    # which rounds differently for weights that are not ones: a profile of a new model would not show it.
    if not is_host(x.device):
        return False
    if not affine:
        return True
    # With statistics of half precision it multiplies in single precision, and they do not show that.
    if inverse.dtype not in (torch.float32, torch.float64):
        return False
    orders = [torch.contiguous_format]
    if x.ndim == _DIMS_OF_IMAGES:
        orders.append(torch.channels_last)
    if x.ndim == _DIMS_OF_VOLUMES:
        orders.append(torch.channels_last_3d)
    if not any(x.is_contiguous(memory_format=order) for order in orders):
        return False
    return all(one.is_contiguous() for one in affine)


def _folded(x: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor, affine: Sequence[torch.Tensor]) -> torch.Tensor:
    """Batch norm from statistics that are known, so that nothing is reduced."""
    # Its own inference path does that, with a variance of one and the inverse deviation in the weight.
    # The weight takes the inverse deviation in, so there must be one.
    weight, bias = affine if affine else (torch.ones_like(inverse), torch.zeros_like(inverse))
    one = torch.ones_like(inverse)
    return torch.native_batch_norm(x, inverse * weight, bias, mean, one, False, 0.0, 0.0)[0]


@recipe("NativeGroupNormBackward0")
def _group_norm(node: Any) -> Any:
    if node.output:
        raise NotRecomputable("only the first output of group norm is computed again")
    rest = node.N, node.C, node.HxW, node.group
    # The node notes eps up to torch 2.13; since then the call does, see untracked_inputs.py.
    noted = node.eps if hasattr(node, "eps") else node.constant()
    eps = _DEFAULT_EPS if noted is None else noted

    def normalize(
        x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.native_group_norm(x, weight, bias, *rest, eps)[0]

    return normalize, [node.saved("input", edge=0), *_affine(node, place=1)]


def _affine(node: Any, place: int = 0) -> list[Any]:
    """Weight and bias, if there are any; a frozen bias is not saved, and has a ``place`` in what the call notes."""
    weight = node.optional("weight")
    if weight is None and not node.has_edge(1):
        return []
    bias = node.edge(2) if node.has_edge(2) else node.constant(place)
    if bias is None:
        raise NotRecomputable("a norm with a weight and no bias")
    return [node.edge(1) if weight is None else weight, bias]


@recipe("NativeLayerNormBackward0")
def _layer_norm(node: Any) -> Any:
    """The node does not note eps; the call does, see untracked_inputs.py."""
    if node.output:
        raise NotRecomputable("only the first output of layer norm is computed again")
    shape = list(node.normalized_shape)
    # Unlike other norms' it saves both, also frozen ones.
    weight = node.optional("weight")
    bias = node.optional("bias")

    def normalize(
        x: torch.Tensor, eps: float | None, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.native_layer_norm(x, shape, weight, bias, _DEFAULT_EPS if eps is None else eps)[0]

    return normalize, [node.saved("input", edge=0), node.constant(), weight, bias]


@recipe("FusedRmsNormBackward0")
def _rms_norm(node: Any) -> Any:
    if node.output:
        raise NotRecomputable("only the first output of RMS norm is computed again")
    shape = list(node.normalized_shape)
    weight = node.optional("weight")
    inputs = [node.saved("input", edge=0), node.constant()]
    if weight is not None:
        inputs.append(weight)

    def normalize(x: torch.Tensor, eps: float | None, weight: torch.Tensor | None = None) -> torch.Tensor:
        # Without eps the operator takes that of its dtype, by itself.
        normal: torch.Tensor = aten._fused_rms_norm.default(x, shape, weight, eps)[0]
        return normal

    return normalize, inputs


@recipe("WeightNormInterfaceBackward0")
def _weight_norm(node: Any) -> Any:
    dim = signed(node.dim)
    output = node.output  # the weight is the first result, its norms are the second
    inputs = [node.saved("v", edge=0), node.saved("g", edge=1)]
    return (lambda v, g: aten._weight_norm_interface.default(v, g, dim)[output]), inputs


_DIMS_OF_IMAGES = 4
_DIMS_OF_VOLUMES = 5
_DEFAULT_EPS = 1e-5  # of F.layer_norm and torch.layer_norm, where none is given
