"""The gradients of all replicas become those of the owners: what an optimizer finds.

    K x N gradients --bucket by bucket--> reducer --> N sums, each on its owner --(several processes)--> N means

On one device a bucket is a handful of parameters, whose gradients fit into a cache. Between devices it is what travels
together, as soon as backward has filled it on all replicas; what did not come in time travels after backward.
"""

import operator
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, overload

import torch

from lightning_dpx.reducers import GradientReducer, OverlappedReduction, ProcessReducer, make_reducer
from lightning_dpx.replicas import BatchSlice, ReplicaSet

# On one device. Objects for more gradients of eight replicas would also start the garbage collector (700 new objects),
# which took a third of the reduction's time in a module of 2,000 parameters.
_AT_A_TIME = 64
_DEVICE = operator.attrgetter("device")  # mapped over every parameter of every step, not looped


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """Parameters that are reduced together, looked up once: K x n of them are asked for in every step.

    Attributes:
        indices: Their n places among all N.
        everything: K x N, all parameters of each replica, as they were when these were looked up.
        columns: K x n.
        owners: The replica that owns each of them.
        owned: The copy of each that its owner has.
        names: For errors.
    """

    indices: list[int]
    everything: list[list[torch.nn.Parameter]]
    columns: list[list[torch.nn.Parameter]]
    owners: list[int]
    owned: list[torch.nn.Parameter]
    names: list[str]


class GradientSums:
    """Sums the gradients of all replicas into their owners', and averages those over processes.

    Args:
        replicas: The replicas.
        reducer: A registered name, ``"auto"`` or a reducer.
        communication_dtype: What gradients travel in between devices; their own dtype unless given.
        gradient_buckets: Between devices the gradients travel in this many buckets, each as soon as backward has filled
            it on all replicas; 0 sends all after backward.
        processes: Averages the owners' gradients over several processes, where there are several.

    Attributes:
        processes: As given.
        buckets: The places of the parameters that are reduced together, each in one bucket.
        has_other_owners: Whether replicas beside the first own parameters.
        overlapped: Sends buckets while backward still runs; ``None`` where nothing travels, or not so early.
        memory_of_first: Addresses of parameters that only the first replica may own, as an optimizer writes their
            memory on it by way of another tensor: of a parameter that the module has dropped during the run.

    Raises:
        ConfigurationError: the reducer is not known, or cannot work between these devices.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        reducer: str | GradientReducer = "auto",
        communication_dtype: torch.dtype | None = None,
        gradient_buckets: int = 8,
        processes: ProcessReducer | None = None,
    ) -> None:
        self._replicas = replicas
        self._communication_dtype = communication_dtype
        self._gradient_buckets = gradient_buckets
        self.processes = processes
        self.memory_of_first: set[int] = set()
        self._reducer = make_reducer(reducer, replicas.devices, communication_dtype)
        self.follow_replicas()

    def follow_replicas(self) -> None:
        """Chooses owners and buckets again, after the replicas or the reducer changed."""
        parameters = self.columns
        self._names = [name for name, _ in self._replicas.root.module.named_parameters()]
        owners = list(self._reducer.owners([parameter.numel() for parameter in parameters[0]]))
        if self.memory_of_first:
            for index, parameter in enumerate(parameters[0]):
                if parameter.data_ptr() in self.memory_of_first:
                    owners[index] = 0
        self._owners = owners
        self._replicas.state.parameters.set_owners(self._owners)
        self.has_other_owners: bool = any(self._owners)
        several_devices = len(self._reducer.distinct_devices) > 1
        # A reducer that overrides reduce() may return views of its buckets.
        self._sums_in_place = not several_devices and type(self._reducer).reduce is GradientReducer.reduce
        self.overlapped: OverlappedReduction | None = None
        # A module without parameters has nothing to hook; on one device there is no way to overlap.
        if several_devices and self._gradient_buckets > 0 and parameters[0]:
            self.overlapped = OverlappedReduction(parameters, self._gradient_buckets, self._reduce_early, self._names)
        self.buckets: list[list[int]] = self._make_buckets()
        self._known_buckets: dict[int, _Bucket] = {}  # by their first parameter

    def exchange_reducer(self, reducer: str | GradientReducer) -> None:
        """Before the first step: gradients are summed by another reducer, on the owners that it chooses."""
        # The hooks are those of the reduction that is about to be forgotten.
        self.close()
        self._reducer = make_reducer(reducer, self._replicas.devices, self._communication_dtype)
        self.follow_replicas()

    @property
    def devices(self) -> Sequence[torch.device]:
        """Those that gradients are summed between."""
        return self._reducer.distinct_devices

    @property
    def columns(self) -> list[list[torch.nn.Parameter]]:
        """K x N: the parameters of every replica that has its own."""
        return [replica.parameters for replica in self._replicas.primaries]

    @property
    def owner_parameters(self) -> list[torch.nn.Parameter]:
        """Every parameter's copy on its owner, which is what an optimizer changes."""
        replicas = self._replicas.primaries
        return [replicas[owner].parameters[index] for index, owner in enumerate(self._owners)]

    # ---- of one step ----

    def traveling(self, slices: Sequence[BatchSlice], *, waits_for_last: bool = False) -> AbstractContextManager[Any]:
        """For backwards in which gradients travel as soon as all devices have them.

        Args:
            slices: Those whose backwards run; none where gradients stay with the replicas.
            waits_for_last: Each device runs several, of which the last completes its gradients: the
                ``begin_last`` of :attr:`overlapped` is to be called before it.
        """
        if self.overlapped is None or not slices:
            return nullcontext()
        # Micro-batches of one device have one place in what travels.
        device_of = self._replicas.partition.device_of
        active = sorted({device_of[batch_slice.replica.index] for batch_slice in slices})
        return self.overlapped.during_backward(active, waits_for_last=waits_for_last)

    def reduce(self) -> None:
        """Sums the gradients of all replicas into the owners' and drops the others."""
        if len(self._replicas.primaries) == 1:  # gradients are where the optimizer finds them, and are their own sum
            return
        # What left while backward was running has its sum already.
        done: Collection[int] = () if self.overlapped is None else self.overlapped.done
        for indices in self.buckets:
            left = [index for index in indices if index not in done] if done else indices
            if left:
                bucket = self._bucket(left)
                self._give_to_owners(bucket, self._sum_bucket(bucket))
        # What has travelled counts for this reduction alone: the next one must not leave it out.
        self.forget()

    def average_over_processes(self, weight: float) -> None:
        """The owners' gradients become the means over all processes.

        Args:
            weight: What this process's count; -1 adds them instead.
        """
        if self.processes is None:
            return
        parameters = self.owner_parameters
        means = self.processes.mean([parameter.grad for parameter in parameters], parameters, weight)
        for parameter, gradient in zip(parameters, means, strict=True):
            parameter.grad = gradient

    def totals(self, columns: Sequence[Sequence[torch.Tensor | None]], weight: float) -> list[torch.Tensor | None]:
        """The sums of K x N gradients over the replicas, each on the device of its owner; of all processes.

        Args:
            columns: By replica, a gradient of its part of the loss for every parameter, or ``None``.
            weight: As of :meth:`average_over_processes`.
        """
        totals: list[torch.Tensor | None] = [None] * len(self._owners)
        for bucket in self.buckets:
            # A parameter that no replica used stays without a gradient, and is looked up in no
            # bucket.
            indices = [index for index in bucket if _is_any_there(columns, index)]
            if not indices:
                continue
            chosen = [[column[index] for index in indices] for column in columns]
            sums = self._sum_columns(self._bucket(indices), chosen)
            for index, total in zip(indices, sums, strict=True):
                totals[index] = total
        # At the end, and once for all: processes must make the same collectives in the same order.
        if self.processes is not None:
            totals = list(self.processes.mean(totals, self.owner_parameters, weight))
        return totals

    def forget(self) -> None:
        """Resets the record of buckets that were reduced during backward: all have been, or there was an error."""
        if self.overlapped is not None:
            self.overlapped.forget()

    def close(self) -> None:
        """Takes its hooks off the parameters; the next backward puts them on again."""
        if self.overlapped is not None:
            self.overlapped.close()

    # ---- bucket by bucket ----

    def _make_buckets(self) -> list[list[int]]:
        """The parameters that are reduced at a time: what travels together or fits a cache."""
        if self.overlapped is not None:
            return self.overlapped.buckets
        indices = list(range(len(self._owners)))
        # Between devices, but not during backward: reducers make their own buckets of all there is.
        if len(self._reducer.distinct_devices) > 1:
            return [indices]
        buckets = []
        for start in range(0, len(indices), _AT_A_TIME):
            buckets.append(indices[start : start + _AT_A_TIME])
        return buckets or [[]]

    def _bucket(self, indices: list[int]) -> _Bucket:
        """The parameters at ``indices``; looked up again only where they are not those of the last step."""
        known = self._known_buckets.get(indices[0])
        everything = [replica.parameters for replica in self._replicas.primaries]
        # A replica that was made anew has another list of parameters, and only then.
        if known is None or known.indices != indices or not all(map(operator.is_, known.everything, everything)):
            owners = [self._owners[index] for index in indices]
            known = _Bucket(
                indices=indices,
                everything=everything,
                columns=[_chosen(parameters, indices) for parameters in everything],
                owners=owners,
                owned=[everything[owner][index] for index, owner in zip(indices, owners, strict=True)],
                names=[self._names[index] for index in indices],
            )
            self._known_buckets[indices[0]] = known
        return known

    def _reduce_early(self, indices: list[int]) -> None:
        """Sums a bucket while backward runs.

        If that backward was abandoned meanwhile, gradients are left alone: they may belong to another one.
        """
        bucket = self._bucket(indices)
        totals = self._sum_bucket(bucket)
        if self.overlapped is not None and self.overlapped.is_during_backward:
            self._give_to_owners(bucket, totals)

    def _sum_bucket(self, bucket: _Bucket) -> list[torch.Tensor | None]:
        """The sums of the gradients that the bucket's parameters have now, each where its owner's copy lives."""
        return self._sum_columns(bucket, [[parameter.grad for parameter in column] for column in bucket.columns])

    def _give_to_owners(self, bucket: _Bucket, totals: Sequence[torch.Tensor | None]) -> None:
        """Makes the sums the gradients of the owners' copies, and drops those of all others."""
        # First the replicas', then the owners', whose copies are among those of the replicas.
        for column in bucket.columns:
            for parameter in column:
                parameter.grad = None
        for parameter, total in zip(bucket.owned, totals, strict=True):
            parameter.grad = total

    def sum_of_bucket(
        self, indices: list[int], grads: Sequence[Sequence[torch.Tensor | None]]
    ) -> list[torch.Tensor | None]:
        """The sums of K x n gradients of the parameters at ``indices``, which nothing is done with.

        Args:
            indices: All, or some, of one of :attr:`buckets`.
            grads: By replica, a gradient for each of them, or ``None``.
        """
        return self._sum_columns(self._bucket(indices), grads)

    def _sum_columns(
        self, bucket: _Bucket, grads: Sequence[Sequence[torch.Tensor | None]]
    ) -> list[torch.Tensor | None]:
        """K x n gradients of the bucket's parameters, summed, each where its owner's copy lives."""
        if len(grads) == 1:  # what is shifted elsewhere stays there
            # One replica is its own sum: no copy, and no reducer that would want it at home.
            return [None if grad is None else grad.data for grad in grads[0]]
        # Reducers work between the replicas' own devices, where shifted gradients must come first.
        is_shifted = self._is_shifted(bucket)
        if is_shifted:
            grads = self._brought_home(grads)
        totals = self._reducer.reduce([list(row) for row in grads], owners=bucket.owners, names=bucket.names)
        if self._sums_in_place and not is_shifted:
            return totals  # no views: to make plain data of them, too, would take 4 ms of 400 for 2,000 parameters
        # As plain data: a view would hold its whole bucket on the device, wherever the module is moved later.
        homes = [parameter.device for parameter in bucket.owned]
        return [None if total is None else _on(total, home).data for total, home in zip(totals, homes, strict=True)]

    def _is_shifted(self, bucket: _Bucket) -> bool:
        """Whether a replica has some of these parameters on another device than its own."""
        for column, device in zip(bucket.columns, self._replicas.devices, strict=True):
            if not set(map(_DEVICE, column)) <= {device}:
                return True
        return False

    def _brought_home(self, grads: Sequence[Sequence[torch.Tensor | None]]) -> list[list[torch.Tensor | None]]:
        """Every replica's gradients on its own device, between which reducers work."""
        brought: list[list[torch.Tensor | None]] = []
        for row, device in zip(grads, self._replicas.devices, strict=True):
            brought.append([_on(gradient, device) for gradient in row])
        return brought


def _chosen(parameters: list[torch.nn.Parameter], indices: list[int]) -> list[torch.nn.Parameter]:
    return [parameters[index] for index in indices]


def _is_any_there(columns: Sequence[Sequence[torch.Tensor | None]], index: int) -> bool:
    return any(column[index] is not None for column in columns)


@overload
def _on(gradient: torch.Tensor, device: torch.device) -> torch.Tensor: ...
@overload
def _on(gradient: None, device: torch.device) -> None: ...
def _on(gradient: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Parameters of shifted parts live elsewhere than their replica."""
    if gradient is None or gradient.device == device:
        return gradient
    return gradient.to(device)
