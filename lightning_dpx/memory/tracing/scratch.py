"""What an operator allocates and frees inside itself on a device that is not there: by rule.

The rules are those of the libraries that torch calls for an operator. A convolution whose tensors do not have their
channels last copies them into the library's own layout, there and back; on the host oneDNN was seen to do so in
channels of a whole block (torch 2.13, AVX-512), and on GPUs cuDNN does for kernels on tensor cores. With channels last
only weights are copied. Operators without a rule take nothing inside. On a device that is there all this is measured
instead; see allocator_account.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten: Any = torch.ops.aten
Rule = Callable[[Sequence[Any], Sequence[torch.Tensor]], int]


def inside_bytes(func: Any, args: Sequence[Any], out: Any, kind: str) -> int:
    """The most bytes that ``func`` has at once beyond its results, on a device of this type."""
    if kind not in _RULES_OF:
        return 0  # nothing is known of its libraries
    rule = _RULES_OF[kind].get(func.overloadpacket) or _RULES.get(func.overloadpacket)
    if rule is None:
        return 0
    leaves = out if isinstance(out, list | tuple) else [out]
    results = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return rule(args, results)


def _convolution(args: Sequence[Any], results: Sequence[torch.Tensor]) -> int:
    given = args[0]
    weight = args[1]
    out = results[0]
    # The library works in this layout itself, but for the weight.
    if _channels_last(given) or _channels_last(weight):
        return int(weight.nbytes)
    if args[6]:  # transposed: the result is there three times, in two layouts of the library's and in ours
        return 2 * _in_blocks(out)
    return max(int(given.nbytes + weight.nbytes), _in_blocks(out))


def _convolution_backward(args: Sequence[Any], results: Sequence[torch.Tensor]) -> int:
    gradient = args[0]
    given = args[1]
    weight = args[2]
    if _channels_last(given) or _channels_last(weight):
        return 2 * int(weight.nbytes)
    return max(_in_blocks(gradient) + int(given.nbytes), int(weight.nbytes))


def _in_blocks(tensor: torch.Tensor) -> int:
    """Its bytes with its channels filled up to whole blocks."""
    channels = tensor.size(1)
    return tensor.nbytes // max(1, channels) * (-(-channels // _BLOCK) * _BLOCK)


def _channels_last(tensor: torch.Tensor) -> bool:
    """Whether its channels are neighbors in memory."""
    return tensor.ndim > 2 and tensor.size(1) > 1 and tensor.stride(1) == 1


def _first_result(args: Sequence[Any], results: Sequence[torch.Tensor]) -> int:
    if results:
        return results[0].nbytes
    return 0


def _given_and_result(args: Sequence[Any], results: Sequence[torch.Tensor]) -> int:
    return int(args[0].nbytes) + _first_result(args, results)


def _copies(args: Sequence[Any], results: Sequence[torch.Tensor]) -> int:
    """Bytes of copies that are made of what the operator takes in a row only."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_contiguous())


def _copies_of_factors(args: Sequence[Any], results: Sequence[torch.Tensor]) -> int:
    """Bytes of copies of what a product of matrices does not take as it lies.

    Rows or columns have to be neighbors, and nothing may be expanded.
    """
    factors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.ndim > 1]
    return sum(factor.nbytes for factor in factors if 1 not in factor.stride()[-2:] and min(factor.shape) > 1)


def _attention_backward(args: Sequence[Any], results: Sequence[torch.Tensor]) -> int:
    return 4 * int(args[1].numel())  # the gradient of the queries is summed in float32


def _attention_on_host(args: Sequence[Any], results: Sequence[torch.Tensor]) -> int:
    # Of every thread, in float32: a block of scores, the largest score and the sum of each row, and
    # the rows of the output.
    rows, columns = _blocks_on_host(args[0], args[1])
    return 4 * torch.get_num_threads() * rows * (columns + 2 + int(args[0].size(-1)))


def _attention_backward_on_host(args: Sequence[Any], results: Sequence[torch.Tensor]) -> int:
    # Likewise: a block of scores, one of their gradients, and a sum for each row.
    rows, columns = _blocks_on_host(args[1], args[2])
    return 4 * torch.get_num_threads() * rows * (2 * columns + 1)


def _blocks_on_host(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of the scores that a thread has at once."""
    # The sizes that torch's kernel is compiled for, of which it takes one by the number of queries.
    length = query.size(-2)
    if length >= 768:
        most = 256
    elif length >= 192:
        most = 64
    else:
        most = 32
    return min(most, length), min(512, key.size(-2))


_BLOCK = 16  # channels
# What all devices have in common comes first, then what one type adds or does in another way.
_RULES: dict[Any, Rule] = {
    aten.addmm: _copies_of_factors,
    aten.bmm: _copies_of_factors,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten.mm: _copies_of_factors,
    aten.native_layer_norm: _copies,
    aten.native_layer_norm_backward: _copies,
}
_RULES_OF: dict[str, dict[Any, Rule]] = {
    "cpu": {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_host,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_on_host,
        aten.native_batch_norm_backward: _first_result,
        aten.upsample_bilinear2d: _given_and_result,
        aten.upsample_bilinear2d_backward: _copies,
        aten.upsample_nearest2d: _given_and_result,
        aten.upsample_nearest2d_backward: _copies,
    },
    "cuda": {
        aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
        aten._scaled_dot_product_flash_attention_backward: _attention_backward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,  # stands for the one above
        aten.sort: _given_and_result,
    },
}
