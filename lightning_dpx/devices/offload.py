"""A tensor that is offloaded: its values are on another device until they are fetched."""

import math
from functools import cache
from typing import NamedTuple

import torch

from lightning_dpx.devices.identity import is_host
from lightning_dpx.devices.links import moved

_LOADED = 16  # bytes that kernels load at once


def pins_offloaded(device: torch.device) -> bool:
    """Whether what is offloaded from ``device`` to the host is in pinned memory there."""
    return device.type == "cuda"


@cache
def _fetch_stream(device: torch.device) -> torch.cuda.Stream:
    """Where a CUDA device fetches, beside what it computes."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def _send_stream(device: torch.device) -> torch.cuda.Stream:
    """Where a CUDA device sends away what is offloaded, beside what it computes and fetches."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Arriving(NamedTuple):
    tensor: torch.Tensor
    there: torch.cuda.Event  # when it has arrived
    owner: torch.cuda.Stream  # of its memory


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that is in memory."""
    for dim, (size, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _strides_with_small_gaps(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides by which kernels loop as over ``tensor``, without the memory between its elements.

    float32 in rows of 64 in a storage of rows of 512: (512, 1) --> (68, 1), and dims without a gap have none here

    Returns:
        ``None`` where one place of memory may be more than one element, as in windows that overlap.
    """
    strides = list(tensor.stride())
    reach = 0  # from the first element to the last of the dims so far
    whole = 1  # the stride of a dim that follows on them without a gap ...
    found_whole = 1  # ... and here
    for stride, size, dim in sorted(zip(strides, tensor.size(), range(tensor.ndim), strict=True)):
        if size <= 1:
            continue
        if stride <= reach:
            return None
        # Loops over dims without a gap are one loop, so a gap must stay one, be it of one element; or of as many as
        # keep rows aligned that were, since kernels of attention load 16 bytes at a time and take no others.
        aligned = math.gcd(stride, max(1, _LOADED // tensor.element_size()))
        strides[dim] = found_whole if stride == whole else (found_whole // aligned + 1) * aligned
        reach += (size - 1) * stride
        whole = size * stride
        found_whole = size * strides[dim]
    return tuple(strides)


def _has_gaps(tensor: torch.Tensor) -> bool:
    """Whether its elements, in whichever order of dims, do not lie side by side."""
    whole = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride != whole:
            return True
        whole *= size
    return False


class OffloadedTensor:
    """The values of a tensor, on another device until they are fetched; what CUDA leaves on the host is pinned.

    On CUDA they go there beside what the device computes; the tensor itself stays until :meth:`free_original`. They lie
    there side by side. What is fetched has gaps where the original has them, of a few elements, as a kernel may round
    by them: on a CPU an exponential is computed in another way for elements that are apart.

    Args:
        tensor: Where it is now is where it comes back to. It must not be written to before :meth:`free_original`.
        device: Where the values are until they are fetched.
    """

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        self._device = tensor.device
        self._arriving: _Arriving | torch.Tensor | None = None
        self._original: torch.Tensor | None = tensor
        self._copied: torch.cuda.Event | None = None
        # Ragged tensors have no strides, and those of a class of their own are made anew by nothing but a move.
        has_strides = not (tensor.is_nested or tensor.is_quantized)
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and has_strides
        unique = _without_repeats(tensor) if is_plain else tensor
        self._size = tensor.size() if unique is not tensor else None
        # Nothing can be written to windows that overlap, so they come back side by side.
        self._strides = _strides_with_small_gaps(unique) if is_plain else None
        if not pins_offloaded(tensor.device):
            self._values = moved(unique, device)
            return
        # Kept for later, when another stream may be current.
        self._sender = torch.cuda.current_stream(tensor.device)
        side = _send_stream(tensor.device)
        # The values may still be under way on the stream that computes them.
        side.wait_stream(self._sender)
        with torch.cuda.stream(side):
            if is_host(device):
                # Only with pinned memory does CUDA copy to the host while it computes. What has gaps it copies to the
                # plain order of dims alone, and to all others through pageable memory.
                order = torch.preserve_format
                if has_strides and _has_gaps(unique):
                    order = torch.contiguous_format
                pinned = torch.empty_like(unique, device=device, pin_memory=True, memory_format=order)
                self._values = pinned.copy_(unique, non_blocking=True)
            else:
                self._values = moved(unique, device)
            self._copied = side.record_event()

    def free_original(self) -> None:
        """Gives the tensor's memory free: what the device computes from now on waits until the values are gone."""
        if self._original is not None and self._copied is not None:
            self._sender.wait_event(self._copied)
        self._original = None

    def start_fetch(self) -> None:
        """Begins to fetch; on CUDA the device goes on computing meanwhile."""
        self._arriving = self._arriving_now()

    def _arriving_now(self) -> "torch.Tensor | _Arriving":
        """What is fetched, begun unless it was before."""
        if self._arriving is not None:
            return self._arriving
        if self._copied is None:
            # The copy that is made anyway may have them.
            if self._strides is None or self._strides == self._values.stride():
                return self._repeated(moved(self._values, self._device))
            return self._repeated(self._room().copy_(self._values))
        owner = torch.cuda.current_stream(self._device)
        side = _fetch_stream(self._device)
        # Allocated before the side stream is entered: the memory belongs to the
        # stream that computes.
        tensor = self._room()
        side.wait_stream(owner)  # kernels that are queued there may still read what this memory held before
        side.wait_event(self._copied)
        with torch.cuda.stream(side):
            tensor.copy_(self._values, non_blocking=True)
            return _Arriving(self._repeated(tensor), side.record_event(), owner)

    def _repeated(self, tensor: torch.Tensor) -> torch.Tensor:
        """What was fetched, expanded as the original was."""
        return tensor if self._size is None else tensor.expand(self._size)

    def _room(self) -> torch.Tensor:
        """Memory for what is fetched."""
        if self._strides is None:
            return torch.empty_like(self._values, device=self._device)
        size = self._values.size()
        return torch.empty_strided(size, self._strides, dtype=self._values.dtype, device=self._device)

    def fetch(self) -> torch.Tensor:
        """The tensor where it was, for the stream that is current there; fetched once until :meth:`release`."""
        arriving = self._arriving = self._arriving_now()
        if not isinstance(arriving, _Arriving):
            return arriving
        tensor, there, owner = arriving
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(there)
        if stream != owner:
            # Or the allocator may give the memory to its owner's stream again while this
            # one still reads.
            tensor.record_stream(stream)
        return tensor

    def release(self) -> None:
        """Gives the memory of what was fetched free; the values stay offloaded."""
        if isinstance(self._arriving, _Arriving):
            self._arriving.owner.wait_event(self._arriving.there)  # or the next owner of the memory writes too early
        self._arriving = None

    def __del__(self) -> None:
        # A graph may be dropped without a backward, which would have done both.
        self.free_original()
        self.release()
