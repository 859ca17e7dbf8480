"""Recipes of normalisations."""

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_dpx.recompute.recipes.registry import NotRecomputable, aten, recipe, signed


@recipe("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")
def _batch_norm(node: Any) -> Any:
    """Scales and shifts with the statistics of then: nothing is reduced, and no running statistic is updated again.

    The operator's own inference path does that, with a variance of one and the saved inverse deviation in the weight;
    on the host it then rounds exactly as it did in training.
    """
    if node.output:
        raise NotRecomputable("only the first output of batch norm is computed again")
    names = ("result1", "result2") if hasattr(node, "result1") else ("save_mean", "save_var")
    affine = _affine(node)
    if getattr(node, "training", True):

        def scale(x: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
            weight, bias = affine if affine else (torch.ones_like(inverse), torch.zeros_like(inverse))
            one = torch.ones_like(inverse)
            return torch.native_batch_norm(x, inverse * weight, bias, mean, one, False, 0.0, 0.0)[0]

        return scale, [node.saved("input", edge=0), node.saved(names[0]), node.saved(names[1]), *affine]
    eps = node.eps if hasattr(node, "eps") else node.epsilon

    def infer(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
        weight, bias = affine if affine else (None, None)
        return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]

    return infer, [node.saved("input", edge=0), node.saved("running_mean"), node.saved("running_var"), *affine]


@recipe("NativeGroupNormBackward0")
def _group_norm(node: Any) -> Any:
    if node.output:
        raise NotRecomputable("only the first output of group norm is computed again")
    rest = node.N, node.C, node.HxW, node.group, node.eps
    inputs = [node.saved("input", edge=0), *_affine(node)]
    return (lambda x, weight=None, bias=None: torch.native_group_norm(x, weight, bias, *rest)[0]), inputs


def _affine(node: Any) -> list[Any]:
    """Weight and bias, if there are any; a frozen bias is not saved."""
    weight = node.optional("weight")
    if weight is None and not node.has_edge(1):
        return []
    bias = node.operand(2)
    if bias is None:
        raise NotRecomputable("a norm with a weight and no bias")
    return [node.edge(1) if weight is None else weight, bias]


@recipe("NativeLayerNormBackward0")
def _layer_norm(node: Any) -> Any:
    """The node does not note eps, so the one that gives the saved inverse deviations is looked for."""
    if node.output:
        raise NotRecomputable("only the first output of layer norm is computed again")
    x, inverse, shape = node.saved("input", edge=0), node.saved("result2"), list(node.normalized_shape)
    weight, bias = node.optional("weight"), node.optional("bias")
    places = [place for place, entry in enumerate((weight, bias)) if entry is not None]
    inputs = [x, inverse, *(entry for entry in (weight, bias) if entry is not None)]
    key = node.leaf(1)
    known = _given_eps(node) if key is None else None

    def normalise(x: torch.Tensor, inverse: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        affine = dict(zip(places, given, strict=True))
        eps = known if key is None or key not in _KNOWN_EPS else _KNOWN_EPS[key]
        if eps is None:
            eps = _find_eps(x, shape, inverse)
            if key is not None:
                _KNOWN_EPS[key] = eps
        return torch.native_layer_norm(x, shape, affine.get(0), affine.get(1), eps)[0]

    return normalise, inputs


@recipe("FusedRmsNormBackward0")
def _rms_norm(node: Any) -> Any:
    if node.output:
        raise NotRecomputable("only the first output of RMS norm is computed again")
    shape, weight = list(node.normalized_shape), node.optional("weight")
    inputs = [node.saved("input", edge=0), node.constant(), *([] if weight is None else [weight])]

    def normalise(x: torch.Tensor, eps: float | None, weight: torch.Tensor | None = None) -> torch.Tensor:
        normal: torch.Tensor = aten._fused_rms_norm.default(x, shape, weight, eps)[0]
        return normal

    return normalise, inputs


@recipe("WeightNormInterfaceBackward0")
def _weight_norm(node: Any) -> Any:
    dim, output = signed(node.dim), node.output
    inputs = [node.saved("v", edge=0), node.saved("g", edge=1)]
    return (lambda v, g: aten._weight_norm_interface.default(v, g, dim)[output]), inputs


def _given_eps(node: Any) -> float | None:
    """From the call, where there is no weight to remember it by."""
    try:
        eps: float = node.constant()
    except NotRecomputable:
        return None
    return eps


_LIKELY_EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 1e-4, 1e-7, 1e-10, 1e-9, 1e-2, 1e-1, 0.0)
_KNOWN_EPS = WeakTensorKeyDictionary()  # by the layer's weight


def _find_eps(x: torch.Tensor, shape: list[int], inverse: torch.Tensor) -> float:
    rows = x.reshape(-1, *x.shape[x.ndim - len(shape) :])[:4]
    expected = inverse.reshape(-1)[:4]
    for eps in _LIKELY_EPS:
        if torch.equal(torch.native_layer_norm(rows, shape, None, None, eps)[2].reshape(-1), expected):
            return eps
    raise NotRecomputable(f"a layer norm over {shape} with an eps that is none of {_LIKELY_EPS}")
