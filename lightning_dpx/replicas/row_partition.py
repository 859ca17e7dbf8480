"""How the rows of a batch are dealt to K devices, and each device's part to its micro-batches.

rows --workload--> rows of K devices --neighbors on one device join--> the same --micro-batches--> rows of replicas
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lightning_dpx.devices import distinct_devices, is_host, num_usable_cpus
from lightning_dpx.replicas.balance import WorkloadBalancer
from lightning_dpx.replicas.batch_reading import RowShapes
from lightning_dpx.replicas.micro_batch_sizes import (
    MicroBatches,
    cut_into_micro_batches,
    parse_micro_batches,
    sum_by_device,
)
from lightning_dpx.replicas.slicing import parse_workload, split_sizes

_MOST_SHAPES = 4096  # that are remembered; a batch of a forgotten one counts as a full one


class RowPartition:
    """Says how many rows of a batch every replica gets.

    Args:
        devices: K devices.
        workload: See :class:`lightning_dpx.replicas.replica_set.ReplicaSet`.
        joins_slices: Whether replicas on one device take their consecutive slices as one.
        micro_batches: M, or M of each device.

    Attributes:
        devices: The same.
        micro_batches: K numbers, the most that any step has on each device: as many replicas live there.
        has_micro_batches: Whether one of them is more than 1.
        device_of: By replica, the index of its device in ``devices``: micro-batches are replicas of one device.
        joins_slices: As given ...
        joins_slices_in_training: ... and for training steps, which may have been found to be faster apart.
        balancer: What measures the devices' speed, under ``workload="auto"``.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        *,
        workload: str | Sequence[float],
        joins_slices: bool,
        micro_batches: MicroBatches,
    ) -> None:
        self.devices: tuple[torch.device, ...] = tuple(devices)
        self.joins_slices = joins_slices
        self.joins_slices_in_training = joins_slices
        self._num_physical = len(distinct_devices(devices))
        self._workload = parse_workload(workload, len(devices))
        # Replicas of one device are equally fast, so there is nothing to measure.
        is_measured = workload == "auto" and self._num_physical > 1
        self.balancer: WorkloadBalancer | None = WorkloadBalancer(devices) if is_measured else None
        self._usual_rows: dict[bool, int] = {}
        self._usual_rows_of: dict[tuple[bool, RowShapes], int] = {}
        self._sizes: dict[tuple[int, int, int, bool, tuple[int, ...], tuple[float, ...]], tuple[int, ...]] = {}
        numbers = parse_micro_batches(micro_batches, len(devices))
        self._numbers = {True: numbers, False: numbers}  # of steps for training, and of others
        self._lay_out_replicas()

    def _lay_out_replicas(self) -> None:
        """Lays out as many replicas on each device as any step needs."""
        self.micro_batches: tuple[int, ...] = tuple(map(max, self._numbers[True], self._numbers[False]))
        self.has_micro_batches: bool = max(self.micro_batches) > 1
        self.device_of: list[int] = []
        for place, number in enumerate(self.micro_batches):
            self.device_of += [place] * number
        self._sizes.clear()

    def cut_slices(self, micro_batches: MicroBatches, *, training: bool) -> None:
        """Steps in this mode have their slices cut into so many micro-batches; those in the other are as they were."""
        self._numbers[training] = parse_micro_batches(micro_batches, len(self.devices))
        self._lay_out_replicas()

    def stop_cutting_slices(self, *, training: bool) -> None:
        """From now on slices are not cut into micro-batches in this mode: each is run by the first of its device."""
        self._numbers[training] = self._ones
        # What is remembered is of the micro-batches that there were.
        self._sizes.clear()

    @property
    def _ones(self) -> tuple[int, ...]:
        return (1,) * len(self.devices)

    def numbers(self, *, training: bool) -> tuple[int, ...]:
        """K numbers: into how many micro-batches the slice of each device is cut in this mode."""
        return self._numbers[training]

    def cuts_slices(self, *, training: bool) -> bool:
        """Whether a step in this mode has its slices cut into micro-batches."""
        return max(self._numbers[training]) > 1

    @contextmanager
    def slices_in_one_piece(self, *, training: bool) -> Iterator[None]:
        """For the time of the block, slices in this mode are not cut into micro-batches."""
        before = self._numbers[training]
        self._numbers[training] = self._ones
        try:
            yield
        finally:
            self._numbers[training] = before

    def cuts_batches(self, *, training: bool) -> bool:
        """Whether a step in this mode may run on several replicas."""
        joins_slices = self.joins_slices_in_training if training else self.joins_slices
        number = self._num_physical if joins_slices else len(self.devices)
        return number > 1 or self.cuts_slices(training=training)

    @property
    def is_one_slice(self) -> bool:
        """Whether every batch is one slice of one replica, because all live on one device and join their slices."""
        return self.joins_slices_in_training and not self.has_micro_batches and self._num_physical == 1

    @property
    def may_train_apart(self) -> bool:
        """Whether a thread per replica is possible where nothing was asked for: on a host with a core for each."""
        return self.is_one_slice and is_host(self.devices[0]) and 1 < len(self.devices) <= num_usable_cpus()

    @property
    def why_one_slice(self) -> str:
        """What keeps replicas that have one slice between them from a thread for each."""
        if not is_host(self.devices[0]):
            return "they share it"
        return f"{num_usable_cpus()} usable cores are fewer than one for each"

    @property
    def trains_apart(self) -> bool:
        """Whether training steps run all replicas, though they share a device and join their slices in others."""
        return self.joins_slices and not self.joins_slices_in_training

    @property
    def num_active(self) -> int:
        """Replicas that take part in the step of a full batch: fewer than K where neighbors join their slices."""
        ones = (1,) * len(self.devices)
        sizes = join_neighbors(ones, self.devices) if self.joins_slices else ones
        return sum(number for size, number in zip(sizes, self.micro_batches, strict=True) if size)

    @property
    def workload(self) -> tuple[float, ...]:
        """Every device's share of a batch, in any unit."""
        if self.balancer is None:
            return self._workload
        return self.balancer.shares

    def sizes(self, num_rows: int, *, training: bool, row_shapes: RowShapes = ()) -> tuple[int, ...]:
        """Rows per replica, and so per micro-batch, of a batch of ``num_rows``.

        The largest batch so far in this mode is the usual one. For micro-batches it is the largest with rows of the
        same shapes: six long rows may need as much memory as fifty short ones.

        Args:
            num_rows: B.
            training: The mode.
            row_shapes: What is known of the shapes of one row.
        """
        usual = self._usual_rows[training] = max(num_rows, self._usual_rows.get(training, 0))
        usual_alike = self._usual_rows_alike(num_rows, (training, row_shapes)) if self.has_micro_batches else usual
        joins_slices = self.joins_slices_in_training if training else self.joins_slices
        numbers = self._numbers[training]
        # Asked in every step, mostly with the numbers of the one before.
        key = num_rows, usual, usual_alike, joins_slices, numbers, self.workload
        if key not in self._sizes:
            sizes = self._sizes_of_devices(num_rows, usual, joins_slices=joins_slices)
            if self.has_micro_batches:
                # The limit of a micro-batch is its size in a full batch, whatever this one's size
                # is.
                full = self._sizes_of_devices(usual_alike, usual_alike, joins_slices=joins_slices)
                sizes = cut_into_micro_batches(sizes, full, numbers, self.micro_batches)
            self._sizes[key] = sizes
        return self._sizes[key]

    def _usual_rows_alike(self, num_rows: int, key: tuple[bool, RowShapes]) -> int:
        """The rows of the largest batch so far that is like this one in ``key``."""
        known = self._usual_rows_of
        if len(known) >= _MOST_SHAPES:
            known.clear()
        known[key] = max(num_rows, known.get(key, 0))
        return known[key]

    def _sizes_of_devices(self, num_rows: int, usual: int, *, joins_slices: bool) -> tuple[int, ...]:
        sizes = split_sizes(num_rows, self.workload, usual)
        if joins_slices:
            return join_neighbors(sizes, self.devices)
        return sizes

    def forget_usual_rows(self) -> None:
        """The next batch is a full one, whatever came before."""
        self._usual_rows.clear()
        self._usual_rows_of.clear()

    def by_device(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Rows of K devices, from those of their replicas."""
        return sum_by_device(sizes, self.micro_batches)


def join_neighbors(sizes: Sequence[int], devices: Sequence[torch.device]) -> tuple[int, ...]:
    """Neighboring replicas on one physical device hand their rows to the first of them."""
    # Running one slice of n rows there costs less than several small ones, and equals one device more
    # closely. Only neighbors join them, so the samples stay in order.
    joined = list(sizes)
    first = 0
    for index in range(1, len(joined)):
        if devices[index] == devices[first]:
            joined[first] = joined[first] + joined[index]
            joined[index] = 0
        else:
            first = index
    return tuple(joined)
