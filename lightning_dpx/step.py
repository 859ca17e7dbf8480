"""The data flow of one training step, on one page.

    batch --slices--> slices --run--> losses --merge--> one leaf loss --(Lightning: scale, backward)--> its gradient
          --run--> each replica's own backward --reduce--> gradients on the owner --(optimizer)--> new parameters
          --synchronize--> replicas

The merged loss is a leaf without history: autograd keeps one thread per device, and a backward of the replicas nested
in the backward of the loss would wait for the very thread that it occupies. Two plain phases cannot deadlock. A loss
over the whole batch works in the same way: it is computed from leaves that hold the replicas' outputs.
"""

import operator
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args, overload

import torch

from lightning_dpx.devices import canonical_device
from lightning_dpx.errors import GatherError
from lightning_dpx.memory import MemoryTrace
from lightning_dpx.reducers import GradientReducer, OverlappedReduction, ProcessReducer, make_reducer
from lightning_dpx.replicas import (
    BatchSlice,
    EarlyBackward,
    ExpectedGradient,
    MergeRules,
    Replica,
    ReplicaSet,
    Roots,
    Weights,
    check_choice,
    loss_of,
    weighted_mean,
    weights_of,
)
from lightning_dpx.torch_compat import tree_map_only

# On one device. Objects for more gradients of eight replicas would also start the garbage collector (700 new objects),
# which took a third of the reduction's time in a module of 2,000 parameters.
_AT_A_TIME = 64
_DEVICE = operator.attrgetter("device")  # mapped over every parameter of every step, not looped
LossReduction = Literal["auto", "mean", "sum"]


@dataclass(slots=True, eq=False)  # not frozen: K are made in every step
class Pending:
    """A replica's tensors that wait for their gradients, which the first backward leaves in ``leaves``."""

    batch_slice: BatchSlice
    tensors: list[torch.Tensor]
    leaves: list[torch.Tensor]
    weight: float = 1.0

    def roots(self, weighted: dict[tuple[int, float], torch.Tensor]) -> Roots:
        """Where this replica's own backward starts, and with which gradients; those in ``weighted`` are known."""
        tensors = []
        gradients = []
        for tensor, leaf in zip(self.tensors, self.leaves, strict=True):
            of_leaf = leaf.grad
            if of_leaf is not None:
                key = id(leaf), self.weight
                if key not in weighted:
                    weighted[key] = of_leaf if self.weight == 1 else of_leaf * self.weight
                gradient = weighted[key].to(tensor.device)
                tensors.append(tensor)
                gradients.append(gradient if gradient.shape == tensor.shape else gradient.view_as(tensor))
        return tensors, gradients


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


class TrainingStep:
    """Forward, backward and reduction over the replicas, for one batch at a time.

    Args:
        replicas: The replicas and their workers.
        reducer: A registered name, ``"auto"`` or a reducer.
        loss_reduction: How the user's loss treats its batch: ``"mean"`` weights the replicas' losses by their rows,
            ``"sum"`` adds them; ``"auto"`` is a mean until the rules say otherwise.
        communication_dtype: What gradients travel in between devices; their own dtype unless given.
        gradient_buckets: Between devices the gradients travel in this many buckets, each as soon as backward has filled
            it on all replicas; 0 sends all after backward.
        processes: Averages the owners' gradients over several processes, where there are several.

    Attributes:
        rules: How losses and outputs are merged; a rehearsal finds them out.
        has_other_owners: Whether replicas beside the first own parameters.

    Raises:
        ConfigurationError: an argument has a value that is not allowed.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        reducer: str | GradientReducer = "auto",
        loss_reduction: LossReduction = "mean",
        communication_dtype: torch.dtype | None = None,
        gradient_buckets: int = 8,
        processes: ProcessReducer | None = None,
    ) -> None:
        check_choice("loss_reduction", loss_reduction, get_args(LossReduction))
        self._replicas = replicas
        self.rules = MergeRules(loss_reduction="sum" if loss_reduction == "sum" else "mean")
        self._communication_dtype = communication_dtype
        self._reducer = make_reducer(reducer, replicas.devices, communication_dtype)
        self._gradient_buckets = gradient_buckets
        self._take_replicas()
        self._processes = processes
        self._rows = 0.0
        self._pending: list[Pending] = []
        self._active: list[Replica] = []
        self._rows_of_active: list[int] = []
        self._early: EarlyBackward | None = None  # of a step whose micro-batches have run theirs
        self._unreduced = self._said_none = False

    def _take_replicas(self) -> None:
        parameters = [replica.parameters for replica in self._replicas.primaries]
        self._names = [name for name, _ in self._replicas.root.module.named_parameters()]
        self._owners = self._reducer.owners([parameter.numel() for parameter in parameters[0]])
        self._replicas.state.set_owners(self._owners)
        self.has_other_owners = any(self._owners)
        several = len(self._reducer.distinct_devices) > 1 and self._gradient_buckets > 0 and bool(parameters[0])
        self._overlapped = (
            OverlappedReduction(parameters, self._gradient_buckets, self._reduce_early, self._names)
            if several
            else None
        )
        self._buckets = self._make_buckets()
        self._known_buckets: dict[int, _Bucket] = {}  # by their first parameter
        is_ours = type(self._reducer).reduce is GradientReducer.reduce
        self._sums_in_place = is_ours and len(self._reducer.distinct_devices) == 1

    def exchange_reducer(self, reducer: str | GradientReducer) -> None:
        """Before the first step: gradients are summed by another reducer, on the owners that it chooses."""
        self.close()
        self._reducer = make_reducer(reducer, self._replicas.devices, self._communication_dtype)
        self._take_replicas()

    def remake_replicas(self) -> None:
        """Makes the replicas anew from the user's module; gradients that have accumulated stay.

        Raises:
            ReplicationError: the module cannot be copied faithfully.
        """
        if self._unreduced:
            self._reduce_here()
        for parameter, owned in zip(self._replicas.root.parameters, self.owner_parameters, strict=True):
            _hand_gradient(owned, parameter)
        self.close()
        self._replicas.remake()
        self._take_replicas()
        for parameter, owned in zip(self._replicas.root.parameters, self.owner_parameters, strict=True):
            _hand_gradient(parameter, owned)  # where the optimizer zeroes it

    def forward(
        self,
        slices: Sequence[BatchSlice],
        call: Callable[[BatchSlice], Any],
        finish: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Runs ``call`` on every slice and merges what the replicas return.

        Args:
            slices: The parts of the batch.
            call: A replica's step.
            finish: Computes the loss from the merged outputs, where the loss needs the whole batch.

        Returns:
            What one device would return: a scalar leaf loss, a mapping with ``"loss"`` and merged extras, or ``None``
            if every replica returned ``None`` (those that do drop out, the rest are weighted anew).
        """
        self.begin()
        return self.merge(slices, self._replicas.run("training_step", slices, call), finish)

    def begin(self) -> None:
        """Before every replica's own step: all of them have the parameters and buffers of the first."""
        self._replicas.state.synchronize()
        self._replicas.state.remember_buffers()

    def run_early(
        self,
        slices: Sequence[BatchSlice],
        call: Callable[[BatchSlice], Any],
        expected: ExpectedGradient,
        *,
        zeroed: Collection[int],
        shown: bool,
        last: bool,
    ) -> list[Any]:
        """Runs ``call`` on every batch_slice, each with its backward before the next one on its device begins.

        Args:
            slices: The micro-batches.
            call: A replica's step.
            expected: What the merged loss's gradient will be.
            zeroed: See :meth:`EarlyBackward.put_aside`.
            shown: Likewise.
            last: See :meth:`backward`.
        """
        replicas = self._replicas
        indices = [batch_slice.replica.index for batch_slice in slices]
        weights = dict(zip(indices, self.weights(slices), strict=True))
        device_of = {index: replicas.partition.device_of[index] for index in indices}
        early = EarlyBackward(replicas.primaries, expected, weights)
        # Gradients of earlier batches travel with those of this one, which they are added to at the end.
        travelling: AbstractContextManager[Any] = nullcontext()
        if not early.put_aside(zeroed, shown=shown) and last and self._overlapped is not None:
            travelling = self._overlapped.during_backward(sorted(set(device_of.values())), waits_for_last=True)
            early.begin_last = self._overlapped.begin_last
        self._early = early
        with travelling:
            outputs = self._replicas.run("training_step", slices, early.call(call, device_of))
        early.take()
        return outputs

    def merge(
        self, slices: Sequence[BatchSlice], outputs: Sequence[Any], finish: Callable[[Any], Any] | None = None
    ) -> Any:
        """One loss from those that the replicas returned, as :meth:`forward` returns it.

        Args:
            slices: The parts of the batch.
            outputs: What each replica's step returned for its part.
            finish: Computes the loss from the merged outputs, where the loss needs the whole batch.
        """
        if len(slices) > 1:
            self._replicas.state.refuse_shared_writes()
        self._active = [batch_slice.replica for batch_slice in slices]
        self._rows_of_active = [batch_slice.num_rows for batch_slice in slices]
        kept = [
            (batch_slice, output) for batch_slice, output in zip(slices, outputs, strict=True) if output is not None
        ]
        self._rows += sum(weights_of([batch_slice for batch_slice, _ in kept]).of_loss)
        if 0 < len(kept) < len(slices):
            self._say_that_some_have_no_loss(
                [batch_slice for batch_slice, one in zip(slices, outputs, strict=True) if one is None]
            )
        if not kept:
            self._pending = []
            self._collect_buffers()
            return None
        if finish is not None:
            return finish(self._merge_outputs([batch_slice for batch_slice, _ in kept], [output for _, output in kept]))
        for _, output in kept:
            loss = loss_of(output)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                return output  # Lightning has its own words for a step that returns something else
        if len({isinstance(output, torch.Tensor) for _, output in kept}) > 1:
            names = ", ".join(type(output).__name__ for _, output in kept)
            raise GatherError(f"The replicas returned different types for result: {names}; all must return the same.")
        return self._merge([batch_slice for batch_slice, _ in kept], [output for _, output in kept])

    def _say_that_some_have_no_loss(self, slices: Sequence[BatchSlice]) -> None:
        if not self._said_none:
            who = ", ".join(str(batch_slice.replica.index) for batch_slice in slices)
            warnings.warn(
                f"training_step returned None on replica {who} of {len(self._active)}: these rows weigh nothing.",
                stacklevel=2,
            )
        self._said_none = True

    def _merge(self, slices: list[BatchSlice], outputs: list[Any]) -> Any:
        losses = [loss_of(output) for output in outputs]
        device = self._replicas.root.device
        counts = weights_of(slices)
        values = [loss.detach() for loss in losses]
        reduction = self.rules.reduction(values, counts)
        weights = _parts_of_loss(reduction, counts)
        # The mean over no tokens is NaN, which no weight of zero takes out of a sum.
        counted = [index for index, weight in enumerate(weights) if weight]
        merged = weighted_mean([values[index] for index in counted], [weights[index] for index in counted], device)
        if reduction == "sum":
            merged = merged * len(weights)
        leaf = merged.clone() if any(merged is value for value in values) else merged  # never the user's own
        leaf.requires_grad_(any(loss.requires_grad for loss in losses))
        self._pending = [Pending(slices[index], [losses[index]], [leaf], weights[index]) for index in counted]
        if isinstance(outputs[0], torch.Tensor):
            return leaf
        extras = [{key: value for key, value in output.items() if key != "loss"} for output in outputs]
        return {"loss": leaf, **self.rules.merge_outputs(extras, counts, device, self._replicas.output_dim)}

    def _merge_outputs(self, slices: list[BatchSlice], outputs: list[Any]) -> Any:
        """Outputs of the whole batch, on the first device, with leaves that catch the gradients for each replica."""
        device = self._replicas.root.device
        copies = []
        self._pending = []
        for batch_slice, output in zip(slices, outputs, strict=True):
            waiting = Pending(batch_slice, [], [])

            def detach(tensor: torch.Tensor, waiting: Pending = waiting) -> torch.Tensor:
                if not tensor.requires_grad:
                    return tensor
                leaf = tensor.detach().to(device, copy=True).requires_grad_()
                waiting.tensors.append(tensor)
                waiting.leaves.append(leaf)
                return leaf

            copies.append(tree_map_only(torch.Tensor, detach, output))
            self._pending.append(waiting)
        return self.rules.merge_outputs(copies, weights_of(slices), device, self._replicas.output_dim)

    def forward_manual(self, slices: Sequence[BatchSlice], call: Callable[[BatchSlice], Any]) -> Any:
        """Runs ``call`` on every slice, in which the user drives backward and optimizers; merges what it returns."""
        self.begin()
        outputs = self._replicas.run("training_step", slices, call)
        self._active = [batch_slice.replica for batch_slice in slices]
        self._rows_of_active = [batch_slice.num_rows for batch_slice in slices]
        self._collect_buffers()
        return self.rules.merge_outputs(
            outputs, weights_of(slices), self._replicas.root.device, self._replicas.output_dim
        )

    def weights(self, slices: Sequence[BatchSlice]) -> list[float]:
        """Every slice's part in the loss of the whole batch."""
        return _parts_of_loss(self.rules.loss_reduction, weights_of(slices))

    @property
    def owner_parameters(self) -> list[torch.nn.Parameter]:
        """Every parameter's copy on its owner, which is what an optimizer changes."""
        replicas = self._replicas.primaries
        return [replicas[owner].parameters[index] for index, owner in enumerate(self._owners)]

    @property
    def adds_losses(self) -> bool:
        """Whether the loss of the whole batch is the sum of the replicas', not their mean."""
        return self.rules.loss_reduction == "sum"

    @property
    def has_processes(self) -> bool:
        """Whether gradients are those of several processes."""
        return self._processes is not None

    def backward(self, *, last: bool = True) -> None:
        """Each replica's own backward, with the gradient that the merged loss got. Does nothing without a forward.

        Args:
            last: A :meth:`reduce` follows, so gradients may travel already; otherwise they accumulate.
        """
        pending = self._pending
        self._pending = []
        early = self._early
        self._early = None
        if not any(leaf.grad is not None for waiting in pending for leaf in waiting.leaves):
            return
        self._unreduced = True
        slices = [waiting.batch_slice for waiting in pending]
        if early is not None:
            self._hand_in(early, pending)
            return
        active = sorted({self._replicas.partition.device_of[batch_slice.replica.index] for batch_slice in slices})
        overlapped = (
            self._overlapped.during_backward(active) if last and self._overlapped is not None else nullcontext()
        )
        with overlapped:
            weighted: dict[tuple[int, float], torch.Tensor] = {}
            self._replicas.backward(slices, [waiting.roots(weighted) for waiting in pending])
        self._collect_buffers()

    def _hand_in(self, early: EarlyBackward, pending: Sequence[Pending]) -> None:
        """The micro-batches have run their backwards; their gradients are those of the loss now."""
        gradient = pending[0].leaves[0].grad
        assert gradient is not None, "asked before"
        early.hand_in(gradient, {waiting.batch_slice.replica.index: waiting.weight for waiting in pending})
        self._collect_buffers()

    def _collect_buffers(self) -> None:
        """Only after backward: batch norm keeps its running statistics for it, and they must not change before."""
        by_rule = self.rules.buffer_rule if self.rules.decides_buffers else None
        self._replicas.state.collect_buffers(self._active, self._rows_of_active, by_rule)

    def reduce(self) -> None:
        """Sums the gradients of all replicas into the owners' and drops the others, unless that has been done."""
        if not self._unreduced:
            return
        self._unreduced = False
        self._reduce_here()
        if self._processes is not None:
            self._reduce_processes(self._processes)

    def _reduce_here(self) -> None:
        if len(self._replicas.primaries) == 1:  # gradients are where the optimizer finds them, and are their own sum
            return
        done = self._overlapped.done if self._overlapped is not None else frozenset()
        for indices in self._buckets:
            left = [index for index in indices if index not in done] if done else indices
            if left:
                bucket = self._bucket(left)
                self._place_totals(bucket, self._totals(bucket))
        if self._overlapped is not None:
            self._overlapped.forget()

    def total_gradients(
        self, columns: Sequence[Sequence[torch.Tensor | None]], rows: float
    ) -> list[torch.Tensor | None]:
        """The sums of K x N gradients over the replicas, each on the device of its owner; of all processes.

        Args:
            columns: By replica, a gradient of its part of the loss for every parameter, or ``None``.
            rows: How many rows of this process's batch they come from.
        """
        totals: list[torch.Tensor | None] = [None] * len(self._owners)
        for bucket in self._buckets:
            indices = [index for index in bucket if any(column[index] is not None for column in columns)]
            if not indices:
                continue
            sums = self._sums(self._bucket(indices), [[column[index] for index in indices] for column in columns])
            for index, total in zip(indices, sums, strict=True):
                totals[index] = total
        if self._processes is not None:
            weight = -1 if self.rules.loss_reduction == "sum" else rows
            totals = list(self._processes.mean(totals, self.owner_parameters, weight))
        return totals

    def _reduce_processes(self, processes: ProcessReducer) -> None:
        parameters = self.owner_parameters
        rows = -1 if self.rules.loss_reduction == "sum" else self._rows
        means = processes.mean([parameter.grad for parameter in parameters], parameters, rows)
        for parameter, gradient in zip(parameters, means, strict=True):
            parameter.grad = gradient
        self._rows = 0.0

    def _make_buckets(self) -> list[list[int]]:
        """What is reduced at a time: a bucket that travels; on one device a few, whose gradients fit into a cache."""
        if self._overlapped is not None:
            return self._overlapped.buckets
        indices = list(range(len(self._owners)))
        if len(self._reducer.distinct_devices) > 1:
            return [indices]
        return [indices[start : start + _AT_A_TIME] for start in range(0, len(indices), _AT_A_TIME)] or [[]]

    def _bucket(self, indices: list[int]) -> "_Bucket":
        """The parameters at ``indices``; looked up again only where they are not those of the last step."""
        known = self._known_buckets.get(indices[0])
        everything = [replica.parameters for replica in self._replicas.primaries]
        if known is None or known.indices != indices or not all(map(operator.is_, known.everything, everything)):
            owners = [self._owners[index] for index in indices]
            known = self._known_buckets[indices[0]] = _Bucket(
                indices=indices,
                everything=everything,
                columns=[[parameters[index] for index in indices] for parameters in everything],
                owners=owners,
                owned=[everything[owner][index] for index, owner in zip(indices, owners, strict=True)],
                names=[self._names[index] for index in indices],
            )
        return known

    def _reduce_early(self, indices: list[int]) -> None:
        """While backward runs. One that was abandoned meanwhile leaves the gradients alone, they may be of another."""
        bucket = self._bucket(indices)
        totals = self._totals(bucket)
        if self._overlapped is not None and self._overlapped.is_during_backward:
            self._place_totals(bucket, totals)

    def _totals(self, bucket: "_Bucket") -> list[torch.Tensor | None]:
        return self._sums(bucket, [[parameter.grad for parameter in column] for column in bucket.columns])

    def _place_totals(self, bucket: "_Bucket", totals: Sequence[torch.Tensor | None]) -> None:
        for column in bucket.columns:
            for parameter in column:
                parameter.grad = None
        for parameter, total in zip(bucket.owned, totals, strict=True):
            parameter.grad = total

    def _sums(self, bucket: "_Bucket", grads: Sequence[Sequence[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """K x n gradients of the bucket's parameters, summed, each where its owner's copy lives."""
        devices = self._replicas.devices
        if len(grads) == 1:  # what is shifted elsewhere stays there
            return [None if grad is None else grad.data for grad in grads[0]]
        pairs = zip(bucket.columns, devices, strict=True)
        is_shifted = any(not set(map(_DEVICE, column)) <= {device} for column, device in pairs)
        if is_shifted:
            grads = [[_on(one, device) for one in row] for row, device in zip(grads, devices, strict=True)]
        totals = self._reducer.reduce([list(row) for row in grads], owners=bucket.owners, names=bucket.names)
        if self._sums_in_place and not is_shifted:
            return totals  # no views: to make plain data of them, too, would take 4 ms of 400 for 2,000 parameters
        homes = [parameter.device for parameter in bucket.owned]
        # As plain data: a view would hold its whole bucket on the device, wherever the module is moved later.
        return [None if total is None else _on(total, home).data for total, home in zip(totals, homes, strict=True)]

    def reduction_bytes(self, active: Collection[int]) -> dict[torch.device, int]:
        """What a reduction takes on every device beside the gradients, at its peak: tried on zeros, bucket by bucket.

        Args:
            active: The replicas that have gradients.
        """
        columns = [replica.parameters for replica in self._replicas.primaries]
        places = {canonical_device(parameter.device) for column in columns for parameter in column}
        most = dict.fromkeys((*self._reducer.distinct_devices, *places), 0)
        if len(columns) == 1:  # nothing travels
            return most
        for bucket in self._buckets:
            trained = [index for index in bucket if columns[0][index].requires_grad]
            if not trained:
                continue
            zeros = [
                [torch.zeros_like(column[index]) if replica in active else None for index in trained]
                for replica, column in enumerate(columns)
            ]
            traces = {place: MemoryTrace(place) for place in most}
            with ExitStack() as stack, torch.no_grad():
                for trace in traces.values():
                    stack.enter_context(trace)
                self._sums(self._bucket(trained), zeros)
            most = {place: max(size, *traces[place].curve, 0) for place, size in most.items()}
        return most

    @property
    def reduces_in_backward(self) -> bool:
        """Whether gradients travel while backward still runs."""
        return self._overlapped is not None

    def pending_gradients(self) -> list[list[torch.Tensor | None]]:
        """What the first backward left for every replica's own."""
        return [[leaf.grad for leaf in waiting.leaves] for waiting in self._pending]

    def take_gradients(self, gradients: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """The same, for a forward that was repeated."""
        for waiting, given in zip(self._pending, gradients, strict=True):
            for leaf, gradient in zip(waiting.leaves, given, strict=True):
                leaf.grad = gradient

    @property
    def num_pending(self) -> int:
        """How many slices wait for their gradients."""
        return len(self._pending)

    @property
    def holds_gradients(self) -> bool:
        """Whether any replica has gradients, of earlier batches."""
        return any(p.grad is not None for replica in self._replicas.primaries for p in replica.parameters)

    def discard_forward(self) -> None:
        """After an error in forward: forgets it. Gradients of earlier batches stay."""
        self._pending = []
        early = self._early
        self._early = None
        if early is not None:
            early.abandon()
            if self._overlapped is not None:
                self._overlapped.forget()
        self._replicas.state.restore_buffers()

    def keep_earlier_batches(self) -> None:
        """After an error in forward: forgets it, and leaves the gradients of earlier batches as one device does."""
        self.discard_forward()
        self.reduce()

    def discard(self) -> None:
        """After an error: forgets the forward and all gradients; those of some replicas are none of the batch."""
        self._early = None
        self._unreduced = False
        self._rows = 0.0
        if self._overlapped is not None:
            self._overlapped.forget()
        for replica in self._replicas.primaries:
            for parameter in replica.parameters:
                parameter.grad = None
        self.discard_forward()

    def close(self) -> None:
        """Takes its hooks off the parameters; the next backward puts them on again."""
        if self._overlapped is not None:
            self._overlapped.close()


def _hand_gradient(source: torch.nn.Parameter, target: torch.nn.Parameter) -> None:
    if source is not target and source.grad is not None:
        target.grad = source.grad.to(target.device)
        source.grad = None


def _parts_of_loss(reduction: str, weights: Weights) -> list[float]:
    """What each slice's loss counts in the loss of the whole batch."""
    if reduction == "sum":
        return [1.0] * len(weights.rows)
    counts = weights.of_loss if any(weights.of_loss) else weights.rows
    return [count / sum(counts) for count in counts]


@overload
def _on(gradient: torch.Tensor, device: torch.device) -> torch.Tensor: ...
@overload
def _on(gradient: None, device: torch.device) -> None: ...
def _on(gradient: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Parameters of shifted parts live elsewhere than their replica."""
    return gradient if gradient is None or gradient.device == device else gradient.to(device)
