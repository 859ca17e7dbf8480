"""Recipes of normalisations."""

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_dpx.recompute.recipes.registry import NotRecomputable, recipe


@recipe("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")
def _batch_norm(node: Any) -> Any:
    """Scales and shifts with the statistics of then: nothing is reduced, and no running statistic is updated again.

    The operator's own inference path does that, with a variance of one and the saved inverse deviation in the weight;
    on the host it then rounds exactly as it did in training.
    """
    if node.output:
        raise NotRecomputable("only the first output of batch norm is computed again")
    names = ("result1", "result2") if hasattr(node, "result1") else ("save_mean", "save_var")
    parameters = [node.edge(1), node.edge(2)] if node.has_edge(1) and node.has_edge(2) else None
    if parameters is None and node.optional("weight") is not None:
        raise NotRecomputable("batch norm with a frozen weight or bias")
    affine = parameters or []
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
    inputs = [node.saved("input", edge=0)]
    if node.has_edge(1) and node.has_edge(2):
        inputs += [node.edge(1), node.edge(2)]
    elif node.optional("weight") is not None:
        raise NotRecomputable("group norm with a frozen weight or bias")
    return (lambda x, weight=None, bias=None: torch.native_group_norm(x, weight, bias, *rest)[0]), inputs


@recipe("NativeLayerNormBackward0")
def _layer_norm(node: Any) -> Any:
    """The node does not note eps, so the one that gives the saved inverse deviations is looked for."""
    if node.output:
        raise NotRecomputable("only the first output of layer norm is computed again")
    x, inverse, shape = node.saved("input", edge=0), node.saved("result2"), list(node.normalized_shape)
    affine = [entry for name in ("weight", "bias") if (entry := node.optional(name)) is not None]
    inputs = [x, inverse, *affine]
    if len(affine) == 1:
        raise NotRecomputable("layer norm with a weight and no bias")
    key = node.leaf(1)

    def normalise(x: torch.Tensor, inverse: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
        eps = _KNOWN_EPS[key] if key is not None and key in _KNOWN_EPS else None
        if eps is None:
            eps = _find_eps(x, shape, inverse)
            if key is not None:
                _KNOWN_EPS[key] = eps
        weight, bias = affine if affine else (None, None)
        return torch.native_layer_norm(x, shape, weight, bias, eps)[0]

    return normalise, inputs


_LIKELY_EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 1e-4, 1e-7, 1e-10, 1e-9, 1e-2, 1e-1, 0.0)
_KNOWN_EPS = WeakTensorKeyDictionary()  # by the layer's weight


def _find_eps(x: torch.Tensor, shape: list[int], inverse: torch.Tensor) -> float:
    rows = x.reshape(-1, *x.shape[x.ndim - len(shape) :])[:4]
    expected = inverse.reshape(-1)[:4]
    for eps in _LIKELY_EPS:
        if torch.equal(torch.native_layer_norm(rows, shape, None, None, eps)[2].reshape(-1), expected):
            return eps
    raise NotRecomputable(f"a layer norm over {shape} with an eps that is none of {_LIKELY_EPS}")
