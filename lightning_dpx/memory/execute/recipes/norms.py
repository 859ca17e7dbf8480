"""Recipes of normalisations."""

from typing import Any

import torch

from lightning_dpx.memory.execute.recipes.registry import NotRecomputable, aten, recipe, signed


@recipe("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")
def _batch_norm(node: Any) -> Any:
    """Scales and shifts with the statistics of then: nothing is reduced, and no running statistic is updated again.

    The operator's own inference path does that, with a variance of one and the saved inverse deviation in the weight;
    on the host it then rounds exactly as it did in training.
    """
    if node.output:
        raise NotRecomputable("only the first output of batch norm is computed again")
    names = ("result1", "result2") if node.saves("result1") else ("save_mean", "save_var")
    affine = _affine(node)
    if getattr(node, "training", True):

        def scale(x: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
            # The weight takes the inverse deviation in, so there must be one.
            weight, bias = affine if affine else (torch.ones_like(inverse), torch.zeros_like(inverse))
            one = torch.ones_like(inverse)
            return torch.native_batch_norm(x, inverse * weight, bias, mean, one, False, 0.0, 0.0)[0]

        return scale, [node.saved("input", edge=0), node.saved(names[0]), node.saved(names[1]), *affine]
    # The nodes of cuDNN's and MIOpen's operators spell it out.
    eps = node.eps if hasattr(node, "eps") else node.epsilon

    def infer(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
        weight, bias = affine if affine else (None, None)
        return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]

    # A call in training mode in between writes into the running statistics, without counting up their version.
    mean, variance = node.copies("running_mean", "running_var")
    return infer, [node.saved("input", edge=0), mean, variance, *affine]


@recipe("NativeGroupNormBackward0")
def _group_norm(node: Any) -> Any:
    if node.output:
        raise NotRecomputable("only the first output of group norm is computed again")
    rest = node.N, node.C, node.HxW, node.group
    # The node notes eps up to torch 2.13; since then the call does, see untracked_inputs.py.
    noted = node.eps if hasattr(node, "eps") else node.constant()
    eps = _DEFAULT_EPS if noted is None else noted

    def normalise(
        x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.native_group_norm(x, weight, bias, *rest, eps)[0]

    return normalise, [node.saved("input", edge=0), *_affine(node, place=1)]


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

    def normalise(
        x: torch.Tensor, eps: float | None, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.native_layer_norm(x, shape, weight, bias, _DEFAULT_EPS if eps is None else eps)[0]

    return normalise, [node.saved("input", edge=0), node.constant(), weight, bias]


@recipe("FusedRmsNormBackward0")
def _rms_norm(node: Any) -> Any:
    if node.output:
        raise NotRecomputable("only the first output of RMS norm is computed again")
    shape = list(node.normalized_shape)
    weight = node.optional("weight")
    inputs = [node.saved("input", edge=0), node.constant()]
    if weight is not None:
        inputs.append(weight)

    def normalise(x: torch.Tensor, eps: float | None, weight: torch.Tensor | None = None) -> torch.Tensor:
        # Without eps the operator takes that of its dtype, by itself.
        normal: torch.Tensor = aten._fused_rms_norm.default(x, shape, weight, eps)[0]
        return normal

    return normalise, inputs


@recipe("WeightNormInterfaceBackward0")
def _weight_norm(node: Any) -> Any:
    dim = signed(node.dim)
    output = node.output  # the weight is the first result, its norms are the second
    inputs = [node.saved("v", edge=0), node.saved("g", edge=1)]
    return (lambda v, g: aten._weight_norm_interface.default(v, g, dim)[output]), inputs


_DEFAULT_EPS = 1e-5  # of F.layer_norm and torch.layer_norm, where none is given
