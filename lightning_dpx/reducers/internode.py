"""Between processes: the mean of the owners' gradients over torch.distributed, weighted by samples."""

import datetime
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed

from lightning_dpx.devices import wire_device
from lightning_dpx.errors import CollectiveError, UnsupportedError
from lightning_dpx.reducers.base import HALVES, Gradients
from lightning_dpx.reducers.packing import alike, flatten, split_at_boundaries, unpack_like

Result = TypeVar("Result")

ROLL_CALL_SECONDS = 3.0  # how long a survivor waits for the others to report, before it names the lost ones


class ProcessReducer:
    """Sums gradients over all processes of the default process group.

    Args:
        num_splits: Packs that travel at the same time.
        communication_dtype: What they travel in; their own dtype unless given.
    """

    def __init__(self, num_splits: int = 8, communication_dtype: torch.dtype | None = None) -> None:
        self._num_splits, self._wire = max(1, num_splits), communication_dtype
        self._calls = 0

    @torch.no_grad()
    def mean(self, grads: Gradients, like: Sequence[torch.Tensor], rows: float) -> Gradients:
        """N gradients, the mean over the samples of all processes; ``None`` only where no process has a gradient.

        Args:
            grads: This process's mean over its own samples.
            like: The parameters, for those that have a gradient on other processes only.
            rows: How many samples those are; 0 weighs nothing. Negative: sum the gradients as they are.

        Raises:
            CollectiveError: another process ended or did not come in time; names the ranks that are lost.
            UnsupportedError: a gradient is sparse.
        """
        self._calls += 1
        for index, gradient in enumerate(grads):
            if gradient is not None and gradient.layout != torch.strided:
                raise UnsupportedError(
                    f"Gradient {index} is sparse, which several processes do not support yet; use sparse=False."
                )
        return between_processes(f"reduction {self._calls}", lambda: self._mean(grads, like, rows))

    def _mean(self, grads: Gradients, like: Sequence[torch.Tensor], rows: float) -> Gradients:
        present = torch.tensor([max(rows, 0.0), *(float(gradient is not None) for gradient in grads)])
        distributed.all_reduce(present)
        used = [index for index in range(len(grads)) if present[index + 1] > 0]
        own = [torch.zeros_like(like[i]) if (gradient := grads[i]) is None else gradient for i in used]
        factor = 1.0 if rows < 0 else rows / float(present[0])
        wires = [wire_device(gradient.device) for gradient in own]  # owners may lie otherwise on other processes
        targets = [list(dict.fromkeys(wires)).index(wire) for wire in wires]
        result: Gradients = [None] * len(grads)
        works = []
        for indices in alike(own, targets):
            for split in split_at_boundaries([own[i].numel() for i in indices], self._num_splits):
                members = [own[indices[position]] for position in split]
                pack = self._on_wire(flatten([member.to(wire_device(member.device)) for member in members]) * factor)
                work = distributed.all_reduce(pack, async_op=True)
                works.append((work, pack, [used[indices[position]] for position in split], members))
        for work, pack, indices, members in works:
            work.wait()
            arrived = pack.to(members[0].dtype)
            for index, member, tensor in zip(indices, members, unpack_like(arrived, members), strict=True):
                result[index] = tensor.to(member.device)
        return result

    def _on_wire(self, pack: torch.Tensor) -> torch.Tensor:
        dtype = self._wire if self._wire is not None and self._wire.itemsize < pack.dtype.itemsize else pack.dtype
        dtype = torch.float32 if pack.dtype in HALVES else dtype
        return pack.to(device=wire_device(pack.device), dtype=dtype)


def between_processes(what: str, call: Callable[[], Result]) -> Result:
    """What ``call``, a collective of torch.distributed, returns.

    Raises:
        CollectiveError: another process is lost; names its rank.
    """
    try:
        return call()
    except torch.OutOfMemoryError:
        raise  # its own story, and others know it by its type
    except RuntimeError as error:
        raise CollectiveError(f"{describe_loss(what)} ({error})") from error


def is_loss_of_a_process(error: BaseException) -> bool:
    """Whether torch.distributed raised ``error`` for lack of another process, and nobody has called the roll yet."""
    if isinstance(error, CollectiveError):
        return False
    return isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def describe_loss(during: str) -> str:
    """Calls the roll: every survivor of a failed collective reports to the store; the others are lost."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    store = distributed.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    lost: list[int] = []
    try:
        store.set(f"dpx/alive/{during}/{rank}", "yes")
        for other in range(world):
            if other != rank and not _reports(store, f"dpx/alive/{during}/{other}"):
                lost.append(other)
    except RuntimeError:  # the store itself went with the process that kept it
        lost = [0]
    who = f"rank {', '.join(map(str, lost))} of {world} processes" if lost else "an unknown rank"
    return f"Process {rank} lost {who} during {during}: it ended, or did not come within the timeout"


def _reports(store: Any, key: str) -> bool:
    try:
        store.wait([key], datetime.timedelta(seconds=ROLL_CALL_SECONDS))
    except distributed.DistStoreError:
        return False
    return True
