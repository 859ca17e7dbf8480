"""How the rows of a batch are dealt to K devices, and each device's part to its micro-batches.

rows --workload--> rows of K devices --neighbours on one device merge--> the same --micro-batches--> rows of replicas
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lightning_dpx.devices import distinct_devices, is_host, num_usable_cpus
from lightning_dpx.replicas.balance import WorkloadBalancer
from lightning_dpx.replicas.micro_batches import (
    MicroBatches,
    cut_into_micro_batches,
    parse_micro_batches,
    sum_by_device,
)
from lightning_dpx.replicas.slicing import parse_workload, split_sizes


class RowPartition:
    """Says how many rows of a batch every replica gets.

    Args:
        devices: K devices.
        workload: See :class:`lightning_dpx.replicas.replica_set.ReplicaSet`.
        merges: Whether replicas on one device take their consecutive slices as one.
        micro_batches: M, or M of each device.

    Attributes:
        devices: The same.
        micro_batches: K numbers, M of each device.
        has_micro_batches: Whether one of them is more than 1.
        device_of: By replica, the place of its device among ``devices``: micro-batches are replicas of one device.
        merges: As given ...
        merges_in_training: ... and for training steps, which may have been found to be faster apart.
        balancer: What measures the devices' speed, under ``workload="auto"``.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        *,
        workload: str | Sequence[float],
        merges: bool,
        micro_batches: MicroBatches,
    ) -> None:
        self.devices = tuple(devices)
        self.merges = merges
        self.merges_in_training = merges
        self._num_physical = len(distinct_devices(devices))
        self._workload = parse_workload(workload, len(devices))
        is_measured = workload == "auto" and self._num_physical > 1
        self.balancer = WorkloadBalancer(devices) if is_measured else None
        self._in_one_piece: set[bool] = set()  # modes (training or not) in which slices are not cut any further
        self._usual_rows: dict[bool, int] = {}
        self._sizes: dict[tuple[int, int, bool, bool, tuple[float, ...]], tuple[int, ...]] = {}
        self._set_micro_batches(micro_batches)

    def _set_micro_batches(self, micro_batches: MicroBatches) -> None:
        self.micro_batches = parse_micro_batches(micro_batches, len(self.devices))
        self.has_micro_batches = max(self.micro_batches) > 1
        self.device_of = [place for place, number in enumerate(self.micro_batches) for _ in range(number)]

    def cut_slices(self, micro_batches: MicroBatches) -> None:
        """Training steps have their slices cut into so many micro-batches.

        Others stay as they are: what keeps nothing for a backward need not be cut.
        """
        self._set_micro_batches(micro_batches)
        self._in_one_piece = {False}
        self._sizes.clear()

    def leave_slices(self, *, training: bool) -> None:
        """From now on slices are not cut into micro-batches in this mode: each is run by the first of its device."""
        self._in_one_piece.add(training)

    def cuts_slices(self, *, training: bool) -> bool:
        """Whether a step in this mode has its slices cut into micro-batches."""
        return self.has_micro_batches and training not in self._in_one_piece

    @contextmanager
    def slices_in_one_piece(self) -> Iterator[None]:
        """For the time of the block, slices for training are not cut into micro-batches."""
        before = self._in_one_piece
        self._in_one_piece = {*before, True}
        try:
            yield
        finally:
            self._in_one_piece = before

    def cuts_batches(self, *, training: bool) -> bool:
        """Whether a step in this mode may run on several replicas."""
        merges = self.merges_in_training if training else self.merges
        number = self._num_physical if merges else len(self.devices)
        return number > 1 or self.cuts_slices(training=training)

    @property
    def always_merged(self) -> bool:
        """Whether one replica does all the work, because all live on one device and are merged."""
        return self.merges_in_training and not self.has_micro_batches and self._num_physical == 1

    @property
    def may_train_apart(self) -> bool:
        """Whether a thread per replica is possible where nothing was asked for: on a host with a core for each."""
        return self.always_merged and is_host(self.devices[0]) and 1 < len(self.devices) <= num_usable_cpus()

    @property
    def trains_apart(self) -> bool:
        """Whether training steps run all replicas, though they share a device and others are merged."""
        return self.merges and not self.merges_in_training

    @property
    def num_active(self) -> int:
        """Replicas that take part in the step of a full batch: fewer than K where neighbours are merged."""
        ones = (1,) * len(self.devices)
        sizes = merge_neighbours(ones, self.devices) if self.merges else ones
        return sum(number for size, number in zip(sizes, self.micro_batches, strict=True) if size)

    @property
    def workload(self) -> tuple[float, ...]:
        """Every device's share of a batch, in any unit."""
        return self._workload if self.balancer is None else self.balancer.shares

    def sizes(self, num_rows: int, *, training: bool) -> tuple[int, ...]:
        """Rows per replica, and so per micro-batch, of a batch of ``num_rows``.

        The largest batch so far in this mode is the usual one.
        """
        usual = self._usual_rows[training] = max(num_rows, self._usual_rows.get(training, 0))
        merges = self.merges_in_training if training else self.merges
        cuts = self.cuts_slices(training=training)
        key = num_rows, usual, merges, cuts, self.workload
        if key not in self._sizes:
            sizes = self._sizes_of_devices(num_rows, usual, merges=merges)
            if self.has_micro_batches:
                full = self._sizes_of_devices(usual, usual, merges=merges)
                sizes = cut_into_micro_batches(sizes, full, self.micro_batches, is_cut=cuts)
            self._sizes[key] = sizes
        return self._sizes[key]

    def _sizes_of_devices(self, num_rows: int, usual: int, *, merges: bool) -> tuple[int, ...]:
        sizes = split_sizes(num_rows, self.workload, usual)
        return merge_neighbours(sizes, self.devices) if merges else sizes

    def forget_usual_rows(self) -> None:
        """The next batch is a full one, whatever came before."""
        self._usual_rows.clear()

    def by_device(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Rows of K devices, from those of their replicas."""
        return sum_by_device(sizes, self.micro_batches)


def merge_neighbours(sizes: Sequence[int], devices: Sequence[torch.device]) -> tuple[int, ...]:
    """Neighbouring replicas on one physical device hand their rows to the first of them.

    Running one slice of n rows there costs less than several small ones, and equals one device more closely. Only
    neighbours are merged, so the samples stay in order.
    """
    merged = list(sizes)
    first = 0
    for index in range(1, len(merged)):
        if devices[index] == devices[first]:
            merged[first] = merged[first] + merged[index]
            merged[index] = 0
        else:
            first = index
    return tuple(merged)
