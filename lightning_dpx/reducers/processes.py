"""Between processes: the mean of the owners' gradients over torch.distributed, weighted by samples."""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import distributed

from lightning_dpx.devices import canonical_device, is_host, is_out_of_memory, synchronize, wire_device
from lightning_dpx.errors import CollectiveError, describe_error
from lightning_dpx.reducers.base import HALVES, Gradients
from lightning_dpx.reducers.buckets import alike, flatten, split_at_boundaries, unflatten_like
from lightning_dpx.reducers.communication_hooks import CommunicationHook, HookBucket
from lightning_dpx.reducers.roll_call import current_roll_call, waits_for_others
from lightning_dpx.reducers.sparse import Rows, check_layout, sum_over_processes
from lightning_dpx.torch_compat import flatten_dense

Result = TypeVar("Result")
_Buckets = list[tuple[list[int], list[torch.Tensor]]]  # numbers of gradients that travel together, and their values


@dataclass(slots=True)
class Waits:
    """How long processes waited for the others before their gradients were sent, while that was watched.

    Attributes:
        own: Seconds of this process.
        everyone: Of every process, by rank; empty where not all of them watched, or none sent gradients.
    """

    own: float = 0.0
    everyone: list[float] = field(default_factory=list)


class ProcessReducer:
    """Sums gradients over all processes of the default process group.

    Args:
        num_splits: Buckets that travel at the same time.
        communication_dtype: What they travel in; their own dtype unless given.
        notice: Asked before every reduction for a flag that travels with it, at no cost of its own.
        on_notice: Called on all processes with the ranks whose flag was set, if any was.
        hook: A communication hook, which averages dense gradients instead, in whatever dtype it likes.
    """

    def __init__(
        self,
        num_splits: int = 8,
        communication_dtype: torch.dtype | None = None,
        notice: Callable[[], bool] = lambda: False,
        on_notice: Callable[[list[int]], None] = lambda ranks: None,
        hook: CommunicationHook | None = None,
    ) -> None:
        self._num_splits = max(1, num_splits)
        self._wire = communication_dtype
        self._hook = hook
        self._notice = notice
        self._on_notice = on_notice
        self._calls = 0
        self._waits: Waits | None = None

    def watch(self) -> Waits:
        """Measures from now on how long processes wait for each other; devices end what is queued before that."""
        self._waits = Waits()
        return self._waits

    def stop_watching(self) -> None:
        """The following reductions are not measured."""
        self._waits = None

    @torch.no_grad()
    def mean(self, grads: Gradients, like: Sequence[torch.Tensor], rows: float) -> Gradients:
        """N gradients, the mean over the samples of all processes; ``None`` only where no process has a gradient.

        A gradient is sparse where it is on every process that has one.

        Args:
            grads: This process's mean over its own samples.
            like: The parameters, for those that have a gradient on other processes only.
            rows: How many samples those are; 0 weighs nothing, unless it is 0 on all processes, where all count alike.
                Negative: sum the gradients as they are.

        Raises:
            CollectiveError: another process ended or did not come in time; names the ranks that are lost.
            UnsupportedError: a gradient is sparse, but not COO.
        """
        # All processes count alike, so the number in an error tells which reduction all were in.
        self._calls += 1
        for index, gradient in enumerate(grads):
            check_layout(index, gradient)
        return between_processes(f"reduction {self._calls}", lambda: self._mean(grads, like, rows))

    def _mean(self, grads: Gradients, like: Sequence[torch.Tensor], rows: float) -> Gradients:
        wires = []
        for own, tensor in zip(grads, like, strict=True):
            wires.append(wire_device(tensor.device if own is None else own.device))
        all_rows, kinds, is_alike = self._agree(grads, rows, _placement(wires))
        # Where owners lie otherwise on other processes, buckets by device would be others there, and wait for ever.
        if not is_alike:
            wires = _from_one_device(wires)
        factor = _factor(rows, all_rows)
        result: Gradients = [None] * len(grads)
        dense = [index for index, kind in enumerate(kinds) if kind is torch.strided]
        if self._hook is None:
            self._reduce_dense(self._buckets(grads, like, dense, wires), wires, factor, result)
        else:
            # Parameters without a gradient anywhere travel as zeros: the buckets of a hook stay the same.
            kept = [index for index, kind in enumerate(kinds) if kind is not torch.sparse_coo]
            trained = [index for index in kept if like[index].requires_grad]
            self._reduce_by_hook(self._hook, self._buckets(grads, like, trained, wires), like, wires, factor, result)
            for index in set(trained).difference(dense):
                result[index] = None
        sparse = [index for index, kind in enumerate(kinds) if kind is torch.sparse_coo]
        if sparse:
            self._reduce_sparse(grads, like, sparse, wires[sparse[0]], factor, result)
        return result

    def _agree(self, grads: Gradients, rows: float, placement: int) -> tuple[float, list[torch.layout | None], bool]:
        """The samples of all processes, what every gradient will be (dense, sparse or none), and if all lie alike."""
        rank = distributed.get_rank()
        world = distributed.get_world_size()
        # One message before the gradients, because its answer decides which collectives follow: processes that do not
        # make the same ones wait for each other until the timeout. What has been noticed (SIGTERM) travels with it.
        codes = [_code_of(gradient, world) for gradient in grads]
        watches = self._waits is not None
        about_all = [max(rows, 0.0), watches, placement, placement**2]
        header = torch.tensor([*about_all, *[0.0] * world, *codes], dtype=torch.float64)
        header[len(about_all) + rank] = self._notice()
        if self._waits is None:
            distributed.all_reduce(header)
        else:
            self._measure_wait(self._waits, header, grads)
        all_rows = float(header[0])
        # All or none: a callback may watch on one process alone.
        if self._waits is not None and header[1] == world:
            _share_waits(self._waits)
        # Only of equal numbers is the mean of the squares the square of the mean.
        is_alike = bool(header[2] ** 2 == world * header[3])
        sums = header[len(about_all) :].tolist()
        # On every process, as all have the same sums: what follows happens to all at one step.
        if noticed := [index for index, flag in enumerate(sums[:world]) if flag]:
            self._on_notice(noticed)
        return all_rows, [_kind_of(code, world) for code in sums[world:]], is_alike

    def _measure_wait(self, waits: Waits, header: torch.Tensor, grads: Gradients) -> None:
        """Sends the header, which is a few bytes: what that takes is the time until the last process has come."""
        # What is queued on a device is work of this process, for which the others wait.
        devices = {canonical_device(gradient.device) for gradient in grads if gradient is not None}
        for device in devices:
            synchronize(device)
        started = time.perf_counter()
        distributed.all_reduce(header)
        waits.own += time.perf_counter() - started

    def _reduce_dense(self, buckets: _Buckets, wires: Sequence[torch.device], factor: float, result: Gradients) -> None:
        # All are started before the first is waited for: one bucket is on its way while the next is put together.
        works = []
        for indices, members in buckets:
            wire = wires[indices[0]]
            bucket = self._on_wire(flatten([member.to(wire) for member in members]), wire, factor)
            works.append((distributed.all_reduce(bucket, async_op=True), bucket, indices, members))
        for work, bucket, indices, members in works:
            work.wait()
            _unpack(bucket, indices, members, result)

    def _reduce_by_hook(
        self,
        hook: CommunicationHook,
        buckets: _Buckets,
        like: Sequence[torch.Tensor],
        wires: Sequence[torch.device],
        factor: float,
        result: Gradients,
    ) -> None:
        # A hook divides by the number of processes, as if all had as many samples.
        scale = factor * distributed.get_world_size()
        waiting = []
        for number, (indices, members) in enumerate(buckets):
            wide = [_widened(member).to(wires[indices[0]]) for member in members]
            buffer = _scaled(flatten_dense(wide), scale)
            parameters = [like[index] for index in indices]
            is_last = number == len(buckets) - 1
            bucket = HookBucket(index=number, buffer=buffer, parameters=parameters, is_last=is_last)
            waiting.append((hook.start(bucket), indices, members))
        for wait, indices, members in waiting:
            _unpack(wait(), indices, members, result)

    def _buckets(
        self, grads: Gradients, like: Sequence[torch.Tensor], used: list[int], wires: Sequence[torch.device]
    ) -> _Buckets:
        """Which gradients travel together, the same on all processes: their numbers and their dense values."""
        own = [_dense(grads[index], like[index]) for index in used]
        places = list(dict.fromkeys(wires))
        targets = [places.index(wires[index]) for index in used]
        buckets: _Buckets = []
        for positions in alike(own, targets):
            # In several buckets, as one alone could not be on its way while it is put together.
            sizes = [own[position].numel() for position in positions]
            for split in split_at_boundaries(sizes, self._num_splits):
                together = [positions[place] for place in split]
                buckets.append(([used[position] for position in together], [own[position] for position in together]))
        return buckets

    def _reduce_sparse(
        self,
        grads: Gradients,
        like: Sequence[torch.Tensor],
        used: list[int],
        wire: torch.device,
        factor: float,
        result: Gradients,
    ) -> None:
        tensors = [like[index] for index in used]
        dtypes = [self._wire_dtype(tensor.dtype) for tensor in tensors]
        mine: list[Rows | None] = []
        for index, dtype in zip(used, dtypes, strict=True):
            gradient = grads[index]
            if gradient is None:
                mine.append(None)
                continue
            # A row that comes twice is added before it is scaled and narrowed, and not sent twice.
            own = _widened(gradient).coalesce()
            mine.append(Rows(own.indices(), _scaled(own.values(), factor).to(dtype)))
        sums = sum_over_processes(mine, tensors, dtypes, wire)
        for index, total, tensor in zip(used, sums, tensors, strict=True):
            result[index] = total.to(device=tensor.device, dtype=tensor.dtype)

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype in HALVES:
            return torch.float32  # a sum of halves overflows where no gradient does
        if self._wire is not None and self._wire.itemsize < dtype.itemsize:
            return self._wire
        return dtype

    def _on_wire(self, values: torch.Tensor, wire: torch.device, factor: float) -> torch.Tensor:
        shares = _scaled(_widened(values), factor)
        return shares.to(device=wire, dtype=self._wire_dtype(values.dtype))


def _placement(wires: Sequence[torch.device]) -> int:
    """A number of 16 bits, the same where gradients lie together alike, whatever their devices are called."""
    places = list(dict.fromkeys(wires))
    return zlib.crc32(repr([places.index(wire) for wire in wires]).encode()) & 0xFFFF


def _from_one_device(wires: Sequence[torch.device]) -> list[torch.device]:
    """All that is sent from accelerators is sent from the first of them."""
    first = next((wire for wire in wires if not is_host(wire)), torch.device("cpu"))
    return [wire if is_host(wire) else first for wire in wires]


def _share_waits(waits: Waits) -> None:
    """Tells all processes how long each has waited so far."""
    seconds = torch.zeros(distributed.get_world_size(), dtype=torch.float64)
    seconds[distributed.get_rank()] = waits.own
    distributed.all_reduce(seconds)
    waits.everyone = seconds.tolist()


def _unpack(bucket: torch.Tensor, indices: list[int], members: list[torch.Tensor], result: Gradients) -> None:
    """The gradients of a bucket that has arrived, each where its owner is, into ``result``."""
    arrived = bucket.to(members[0].dtype)
    for index, member, tensor in zip(indices, members, unflatten_like(arrived, members), strict=True):
        result[index] = tensor.to(member.device)


def _factor(rows: float, all_rows: float) -> float:
    """What this process's gradients are multiplied by before they are sent, so that the sum over all is the mean."""
    if rows < 0:
        return 1.0
    # A mean over no tokens anywhere: one device steps with whatever gradients that has, zeros or NaN, and a term of
    # the loss that counts no tokens keeps its own.
    if all_rows == 0:
        return 1.0 / distributed.get_world_size()
    return rows / all_rows


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    # The mean over no tokens may be NaN, which no weight of zero takes out of a sum.
    if factor:
        return tensor * factor
    return torch.zeros_like(tensor)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in HALVES:
        return tensor.float()
    return tensor


@waits_for_others
def between_processes(what: str, call: Callable[[], Result]) -> Result:
    """What ``call``, a collective of torch.distributed, returns.

    Raises:
        CollectiveError: another process is lost; names its rank.
    """
    try:
        return call()
    except RuntimeError as error:
        # Like those of lost processes, but nothing of theirs.
        if is_out_of_memory(error):
            raise
        raise CollectiveError(f"{describe_loss(what)} ({error})") from error


def is_loss_of_a_process(error: BaseException) -> bool:
    """Whether torch.distributed raised ``error`` for lack of another process, and the roll has not been called yet."""
    if isinstance(error, CollectiveError):
        return False
    return isinstance(error, distributed.DistError) or (
        # gloo raises plain RuntimeErrors, which only their text tells from others.
        isinstance(error, RuntimeError) and "gloo" in describe_error(error)
    )


@waits_for_others
def describe_loss(during: str) -> str:
    """Which processes are lost, after a collective has failed; see :class:`RollCall`."""
    rank = distributed.get_rank()
    world = distributed.get_world_size()
    calling = current_roll_call()
    try:
        lost = {} if calling is None else calling.lost()
    except RuntimeError:  # the store itself went with the process that kept it
        lost = {0: ""}
    who = f"rank {', '.join(map(str, lost))} of {world} processes" if lost else "an unknown rank"
    known = "".join(f"; rank {other} {what}" for other, what in lost.items() if what)
    return f"Process {rank} lost {who} during {during}: it ended, or did not come within the timeout{known}"


def _code_of(gradient: torch.Tensor | None, world: int) -> int:
    """What a process tells of a gradient. The sum over ``world`` processes says which kinds there are among them."""
    if gradient is None:
        return 0
    # More than all dense ones together, so that one sum holds both counts.
    if gradient.layout == torch.strided:
        return 1
    return world + 1


def _kind_of(code: float, world: int) -> torch.layout | None:
    """What a gradient will be, from the sum of its codes: sparse only where no process has a dense one."""
    if code == 0:
        return None
    if code % (world + 1) == 0:
        return torch.sparse_coo
    return torch.strided


def _dense(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """A dense gradient for a sum to which every process must add one."""
    if gradient is None:
        return torch.zeros_like(like)
    if gradient.is_sparse:
        return gradient.to_dense()
    return gradient
