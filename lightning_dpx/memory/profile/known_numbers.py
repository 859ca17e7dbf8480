"""Small whole numbers stay real in a step on fake tensors, so that the step takes the branches of a real one.

Which way a step goes may depend on numbers: whether a mask masks anything, whether positions count up, how many rows
an index names. Those are whole numbers and truth values, nearly always, that are made from constants and from the
batch and never from a parameter; they take little memory, and no time. So as long as an operator is given nothing else,
it is run for real, and what it gives is real as well::

    ids (real) -> != 0 -> .all() (real, True) -> no mask is made            embedding(fake weight, ids) -> fake

Libraries also ask whether a tensor is fake before they look at its numbers, and keep a mask that a real step would do
without: here they are told the truth.

What is made from a fake is fake. Where such numbers are to be written into real ones, the real ones would no
longer be true: that is an error, and the step is run once more with nothing but fakes.
"""

from typing import Any

import torch

from lightning_dpx.torch_compat import FakeTensor, disable_current_modes, schema_of, tree_leaves

aten: Any = torch.ops.aten
MOST_BYTES = 2**24  # of a tensor: with more, computing would take longer than everything else
# Memory that was only allocated: what it holds must not be taken for numbers that the step made.
_UNKNOWN = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.empty_permuted,
}  # fmt: skip


def with_known_numbers(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What an operator gives within a mode of fakes: real small whole numbers where it is given nothing else.

    Raises:
        RuntimeError: it writes numbers that no fake knows into real ones; and whatever the mode of fakes raises.
    """
    is_mutable = schema_of(func).is_mutable
    if not is_mutable and any(type(argument) is FakeTensor for argument in args):
        return func(*args, **kwargs)  # nearly all
    if func.overloadpacket in _UNKNOWN:
        return func(*args, **kwargs)
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not all(is_known(tensor) for tensor in given):
        if is_mutable:
            _check_no_real_one_is_written(func, args, kwargs)
        return func(*args, **kwargs)
    if is_mutable:
        return _for_real(func, args, kwargs)
    # On fakes first, which tells whether the result is small: a large one is never made for real.
    try:
        out = func(*args, **kwargs)
    except (NotImplementedError, RuntimeError):  # its size, or it itself, depends on the numbers
        out = _for_real(func, args, kwargs)
        if all(not isinstance(leaf, torch.Tensor) or is_whole(leaf) for leaf in tree_leaves(out)):
            return out
        raise
    made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    if made and all(is_whole(leaf) for leaf in made):
        return _for_real(func, args, kwargs)
    return out


def is_known(tensor: torch.Tensor) -> bool:
    """Whether its numbers are there, and few enough to be computed with."""
    return type(tensor) is torch.Tensor and is_whole(tensor) and not tensor.requires_grad


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether it is a small tensor of whole numbers or truth values on the host."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)
        and tensor.numel() * tensor.element_size() <= MOST_BYTES
    )


def _for_real(func: Any, args: Any, kwargs: Any) -> Any:
    with disable_current_modes():
        return func(*args, **kwargs)


def _check_no_real_one_is_written(func: Any, args: Any, kwargs: Any) -> None:
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        for leaf in tree_leaves(given):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                raise RuntimeError(f"{func} writes numbers that no fake tensor knows into real ones")
