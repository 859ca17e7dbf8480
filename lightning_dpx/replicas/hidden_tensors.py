"""Tensors that a module holds in lists, dicts, objects, or modules there: their values follow the first replica's.

    root's list -> tensor --written by a hook--> counted, moved, or seen by its bits --before a step--> a replica's copy

No parameter or buffer of the module, so nothing else looks after them: a teacher that is kept in a list to stay out of
checkpoints, say, and averaged after every batch.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_dpx.devices import is_host
from lightning_dpx.replicas.remote_tensor import version_of
from lightning_dpx.replicas.tensor_checksums import checksums

_PLAIN = (torch.Tensor, nn.Parameter)
_OFTEN = 4  # the first steps, before each of which the bits of parameters are looked at
_SELDOM = 64  # steps between two looks after those
_SMALL = 2**20  # elements of a tensor that is no parameter


@dataclass(slots=True)
class _Pair:
    """A tensor and its copy, as they were when they were equal; held weakly, as containers may drop them."""

    source: "weakref.ref[torch.Tensor]"
    copied: "weakref.ref[torch.Tensor]"
    version: int
    address: int
    version_of_copy: int
    checksum: int | None = None  # where it may be written through .data, without a trace
    is_written_silently: bool = False

    def has_changed(self, source: torch.Tensor, copied: torch.Tensor) -> bool:
        """Whether one of both was written, or has got other memory."""
        is_source_as_seen = self.version == version_of(source) and self.address == source.data_ptr()
        return not is_source_as_seen or self.version_of_copy != version_of(copied)

    def note(self, source: torch.Tensor, copied: torch.Tensor) -> None:
        """Remembers both as they are now, when they are equal."""
        self.version = version_of(source)
        self.address = source.data_ptr()
        self.version_of_copy = version_of(copied)


class HiddenTensors:
    """The hidden tensors of one replica.

    Args:
        pairs: Tensors of the first replica, and what this one has in their place.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        self._pairs: list[_Pair] = []
        self._steps = 0
        self._looks = False
        self.add(pairs)

    def add(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Watches more pairs, each of equal values."""
        plain = [pair for pair in pairs if _is_plain(pair[0])]
        watched = [source for source, _ in plain if _is_watched(source)]
        bits = dict(zip(map(id, watched), checksums(watched), strict=True))
        for source, copied in plain:
            pair = _Pair(weakref.ref(source), weakref.ref(copied), 0, 0, 0, bits.get(id(source)))
            pair.note(source, copied)
            self._pairs.append(pair)

    @property
    def sources(self) -> list[torch.Tensor]:
        """The tensors of the first replica that are still there."""
        found = [pair.source() for pair in self._pairs]
        return [source for source in found if source is not None]

    def mark_changed(self) -> None:
        """Before the next step, the bits of parameters and small tensors are looked at."""
        self._looks = True

    def follow(self) -> None:
        """Before a step: the copies get the values of their sources."""
        # Asked of every replica in every step, and most modules have none: the block alone took longer.
        if self._pairs:
            with torch.no_grad():
                self._follow()

    def _follow(self) -> None:
        self._steps += 1
        # To read the bits of all waits for the device. So it is done in the first steps, now and
        # then, and where writes without a trace are customary (mark_changed).
        looks = self._looks or self._steps <= _OFTEN or self._steps % _SELDOM == 0
        self._looks = False
        alive: list[tuple[_Pair, torch.Tensor, torch.Tensor]] = []
        for pair in self._pairs:
            source, copied = pair.source(), pair.copied()
            if source is not None and copied is not None:
                alive.append((pair, source, copied))
        self._pairs = [pair for pair, _, _ in alive]
        if looks:
            # Those without a checksum count how often they were written.
            _look([entry for entry in alive if entry[0].checksum is not None])
        for pair, source, copied in alive:
            if pair.version == version_of(source) and pair.address != source.data_ptr():
                pair.is_written_silently = True  # it has other memory, and may get the old one again
            if pair.is_written_silently or pair.has_changed(source, copied):
                _copy(source, copied)
                pair.note(source, copied)


def _look(watched: Sequence[tuple[_Pair, torch.Tensor, torch.Tensor]]) -> None:
    """Whether the bits of a source are others, though nothing says so: from then on it is always copied.

    Those of all are read together: a device is waited for once.
    """
    now = checksums([source for _, source, _ in watched])
    for (pair, source, copied), checksum in zip(watched, now, strict=True):
        if checksum != pair.checksum and not pair.has_changed(source, copied):
            pair.is_written_silently = True
        pair.checksum = checksum


def _is_watched(source: torch.Tensor) -> bool:
    """Whether its bits are looked at: of parameters always, and of a large data set, say, never."""
    return isinstance(source, nn.Parameter) or source.numel() <= _SMALL


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has memory of its own; no fake tensor of a compiler, say."""
    return type(tensor) in _PLAIN and tensor.layout == torch.strided and not tensor.is_meta


def _copy(source: torch.Tensor, copied: torch.Tensor) -> None:
    if source.shape == copied.shape and source.dtype == copied.dtype:
        copied.copy_(source, non_blocking=not is_host(copied.device))
    else:
        # The copy stays the same object: a container of the replica holds it.
        copied.data = source.detach().to(copied.device, copy=True)
