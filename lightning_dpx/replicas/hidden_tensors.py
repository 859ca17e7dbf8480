"""Tensors that a module holds in lists, dicts, objects, or modules there: their values follow the first replica's.

    root's list -> tensor --written by a hook--> counted, moved, or seen by its bits --before a step--> a replica's copy

No parameter or buffer of the module, so nothing else looks after them: a teacher that is kept in a list to stay out of
checkpoints, say, and averaged after every batch.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from lightning_dpx.replicas.remote_tensor import version_of
from lightning_dpx.replicas.tensor_checksums import checksums

_PLAIN = (torch.Tensor, nn.Parameter)
_OFTEN = 4  # the first steps, before each of which the bits of parameters are looked at
_SELDOM = 64  # steps between two looks after those


@dataclass(slots=True)
class _Pair:
    """A tensor and its copy, as they were when they were equal; held weakly, as containers may drop them."""

    source: "weakref.ref[torch.Tensor]"
    copied: "weakref.ref[torch.Tensor]"
    version: int
    address: int
    version_of_copy: int
    checksum: int | None = None  # of parameters, which are customarily written through .data, without a trace
    is_written_silently: bool = False

    def has_changed(self, source: torch.Tensor, copied: torch.Tensor) -> bool:
        """Whether one of both was written, or has got other memory."""
        is_source_as_seen = self.version == version_of(source) and self.address == source.data_ptr()
        return not is_source_as_seen or self.version_of_copy != version_of(copied)

    def note(self, source: torch.Tensor, copied: torch.Tensor) -> None:
        """Both are equal now."""
        self.version = version_of(source)
        self.address = source.data_ptr()
        self.version_of_copy = version_of(copied)


class HiddenTensors:
    """Of one replica.

    Args:
        pairs: Tensors of the first replica, and what this one has in their place.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        self._pairs: list[_Pair] = []
        self._steps = 0
        self._looks = False
        for source, copied in pairs:
            self.add(source, copied)

    def add(self, source: torch.Tensor, copied: torch.Tensor) -> None:
        """One more pair, of equal values."""
        if type(source) not in _PLAIN or source.layout != torch.strided or source.is_meta:
            return  # fake tensors of a compiler, say
        pair = _Pair(weakref.ref(source), weakref.ref(copied), 0, 0, 0)
        pair.note(source, copied)
        if isinstance(source, nn.Parameter):
            pair.checksum = checksums([source])[0]
        self._pairs.append(pair)

    def mark_changed(self) -> None:
        """Before the next step, the bits of all parameters are looked at."""
        self._looks = True

    @torch.no_grad()
    def follow(self) -> None:
        """Before a step: the copies get the values of their sources."""
        if not self._pairs:
            return
        self._steps += 1
        looks = self._looks or self._steps <= _OFTEN or self._steps % _SELDOM == 0
        self._looks = False
        left: list[_Pair] = []
        for pair in self._pairs:
            source, copied = pair.source(), pair.copied()
            if source is None or copied is None:
                continue
            left.append(pair)
            if looks and pair.checksum is not None:
                self._look(pair, source, copied)
            if pair.version == version_of(source) and pair.address != source.data_ptr():
                pair.is_written_silently = True  # it has other memory, and may get the old one again
            if pair.is_written_silently or pair.has_changed(source, copied):
                _copy(source, copied)
                pair.note(source, copied)
        self._pairs = left

    def _look(self, pair: _Pair, source: torch.Tensor, copied: torch.Tensor) -> None:
        """Whether the bits of a source are others, though nothing says so: from then on it is always copied."""
        checksum = checksums([source])[0]
        if checksum != pair.checksum and not pair.has_changed(source, copied):
            pair.is_written_silently = True
        pair.checksum = checksum


def _copy(source: torch.Tensor, copied: torch.Tensor) -> None:
    if source.shape == copied.shape and source.dtype == copied.dtype:
        copied.copy_(source, non_blocking=True)
    else:
        copied.data = source.detach().to(copied.device, copy=True)
