"""The data flow of one training step, on one page; this file has its losses and gradients.

    batch --slices--> slices --run--> losses --merge--> one leaf loss --(Lightning: scale, backward)--> its gradient
          --backward--> each replica's own backward --reduce--> gradients on the owner --(optimizer)--> new parameters
          --synchronize--> replicas

    slices, run            ReplicaSet, in replicas/replica_set.py
    merge, backward, reduce    TrainingStep, here
    synchronize            ParameterSync, in replicas/parameter_sync.py

The merged loss is a leaf without history: autograd keeps one thread per device, and a backward of the replicas nested
in the backward of the loss would wait for the very thread that it occupies. Two plain phases cannot deadlock. A loss
over the whole batch works in the same way: it is computed from leaves that hold the replicas' outputs.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from lightning_dpx.errors import GatherError
from lightning_dpx.gradient_sums import GradientSums
from lightning_dpx.reducers import GradientReducer, ProcessReducer
from lightning_dpx.replicas import (
    BatchSlice,
    EarlyBackward,
    ExpectedGradient,
    MergeRules,
    Replica,
    ReplicaSet,
    Weights,
    loss_of,
    weighted_mean,
    weights_of,
)
from lightning_dpx.replicas.buffer_sync import ChooseBufferRule
from lightning_dpx.step_backward import AfterAllForwards, AfterSecondPass, Pending, StepBackward, WithEachForward
from lightning_dpx.torch_compat import tree_map_only

LossReduction = Literal["auto", "mean", "sum"]


class TrainingStep:
    """Forward, backward and reduction over the replicas, for one batch at a time.

    Args:
        replicas: The replicas and their workers.
        reducer: A registered name, ``"auto"`` or a reducer.
        rules: How losses and outputs are merged; those of a mean over rows unless given.
        communication_dtype: What gradients travel in between devices; their own dtype unless given.
        gradient_buckets: Between devices the gradients travel in this many buckets, each as soon as backward has filled
            it on all replicas; 0 sends all after backward.
        processes: Averages the owners' gradients over several processes, where there are several.

    Attributes:
        rules: As given; a rehearsal finds them out.
        sums: How the replicas' gradients become one.

    Raises:
        ConfigurationError: an argument has a value that is not allowed.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        reducer: str | GradientReducer = "auto",
        rules: MergeRules | None = None,
        communication_dtype: torch.dtype | None = None,
        gradient_buckets: int = 8,
        processes: ProcessReducer | None = None,
    ) -> None:
        self._replicas = replicas
        self.rules: MergeRules = MergeRules() if rules is None else rules
        self.sums: GradientSums = GradientSums(replicas, reducer, communication_dtype, gradient_buckets, processes)
        self._rows = 0.0  # of this process, since gradients were last averaged over processes
        self._pending: list[Pending] = []
        self._active: list[Replica] = []
        self._rows_of_active: list[int] = []
        self._after_all = AfterAllForwards(replicas, self.sums)
        self._backward: StepBackward = self._after_all  # of the forward that waits for it
        self._unreduced = False  # gradients have come since the last reduction
        self._said_none = False

    # ---- the forward ----

    def begin(self) -> None:
        """Before every replica's own step: all of them have the parameters and buffers of the first."""
        self._replicas.state.synchronize()
        # Batch norm writes its statistics in the forward: where a later replica fails, or memory
        # runs out, the step may be repeated from what was there.
        self._replicas.state.buffers.remember()

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
        """Runs ``call`` on every slice, each with its backward before the next one on its device begins.

        Args:
            slices: The micro-batches.
            call: A replica's step.
            expected: What the merged loss's gradient will be.
            zeroed: See :meth:`EarlyBackward.stash_gradients`.
            shown: See :meth:`EarlyBackward.stash_gradients`.
            last: See :meth:`backward`.
        """
        replicas = self._replicas
        indices = [batch_slice.replica.index for batch_slice in slices]
        weights = dict(zip(indices, self.weights(slices), strict=True))
        # Micro-batches of one device share its parameters.
        device_of = {index: replicas.partition.device_of[index] for index in indices}
        early = EarlyBackward(replicas.primaries, expected, weights)
        # Gradients of earlier batches travel with those of this one, which they are added to at the end.
        travels = not early.stash_gradients(zeroed, shown=shown) and last
        self._backward = WithEachForward(early, self.sums)
        overlapped = self.sums.overlapped
        begin_last = overlapped.begin_last if travels and overlapped is not None else None
        with self.sums.traveling(slices if travels else (), waits_for_last=True):
            outputs = self._replicas.run("training_step", slices, early.call(call, device_of, begin_last))
        # Before Lightning calls zero_grad, which comes between training_step and backward.
        early.take()
        return outputs

    def wait_for_second_pass(self, second: Callable[[Sequence[Pending]], None]) -> None:
        """The forward that has run kept no graphs: its backward is ``second``, called with what has gradients then."""
        self._backward = AfterSecondPass(second)

    def merge(
        self, slices: Sequence[BatchSlice], outputs: Sequence[Any], finish: Callable[[Any], Any] | None = None
    ) -> Any:
        """The merged loss of the replicas, as a leaf without history: see the head of this module.

        Args:
            slices: The parts of the batch.
            outputs: What each replica's step returned for its part.
            finish: Computes the loss from the merged outputs, where the loss needs the whole batch.

        Returns:
            What one device would return: a scalar leaf loss, a mapping with ``"loss"`` and merged extras, or ``None``
            if every replica returned ``None`` (those that do drop out, the rest are weighted anew).
        """
        # A single slice writes a parameter once, as one device does.
        if len(slices) > 1:
            self._replicas.state.parameters.refuse_shared_writes()
        self._active = [batch_slice.replica for batch_slice in slices]
        self._rows_of_active = [batch_slice.num_rows for batch_slice in slices]
        kept: list[BatchSlice] = []
        results: list[Any] = []
        without_loss: list[BatchSlice] = []
        for batch_slice, output in zip(slices, outputs, strict=True):
            if output is None:
                without_loss.append(batch_slice)
            else:
                kept.append(batch_slice)
                results.append(output)
        counts = weights_of(kept)
        # Rows without a loss weigh nothing among processes, either.
        self._rows += sum(counts.of_loss)
        # Lightning skips the backward, after which buffers would be collected.
        if not kept:
            self._pending = []
            self._collect_buffers()
            return None
        if without_loss:
            self._say_that_some_have_no_loss(without_loss)
        if finish is not None:
            return finish(self._merge_outputs(kept, results))
        # No loss to merge: the first such output goes on as it is.
        for output in results:
            loss = loss_of(output)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                return output  # Lightning has its own words for a step that returns something else
        # A tensor is its own loss, a mapping has extras beside it: they have no common result.
        if len({isinstance(output, torch.Tensor) for output in results}) > 1:
            returned = zip(kept, results, strict=True)
            who = [f"{type(output).__name__} on replica {one.replica.index}" for one, output in returned]
            raise GatherError(f"training_step returned {' and '.join(who)}; return the same type on all replicas.")
        return self._merge(kept, results, counts)

    def _say_that_some_have_no_loss(self, slices: Sequence[BatchSlice]) -> None:
        if not self._said_none:
            who = ", ".join(str(batch_slice.replica.index) for batch_slice in slices)
            warnings.warn(
                f"training_step returned None on replica {who} of {len(self._active)}: these rows weigh nothing.",
                stacklevel=2,
            )
        self._said_none = True

    def _merge(self, slices: list[BatchSlice], outputs: list[Any], counts: Weights) -> Any:
        """One leaf from losses that each have a graph of their own, which waits for the leaf's gradient."""
        losses = [loss_of(output) for output in outputs]
        device = self._replicas.root.device
        # Their graphs must not hang on the leaf; each replica walks its own, in the second phase.
        values = [loss.detach() for loss in losses]
        reduction = self.rules.reduction(values, counts)
        weights = _parts_of_loss(reduction, counts)
        # The mean over no tokens is NaN, which no weight of zero takes out of a sum.
        counted = [index for index, weight in enumerate(weights) if weight]
        merged = weighted_mean([values[index] for index in counted], [weights[index] for index in counted], device)
        # Each part of a sum counts 1, so this is their mean so far.
        if reduction == "sum":
            merged = merged * len(weights)
        # Of a single slice the mean is its loss as it was given: a leaf must not share the user's own memory.
        leaf = merged.clone() if any(merged is value for value in values) else merged
        leaf.requires_grad_(any(loss.requires_grad for loss in losses))
        self._pending = [Pending(slices[index], [losses[index]], [leaf], weights[index]) for index in counted]
        if isinstance(outputs[0], torch.Tensor):
            return leaf
        extras = [_without_loss(output) for output in outputs]
        return {"loss": leaf, **self.rules.merge_outputs(extras, counts, device, self._replicas.output_dim)}

    def _merge_outputs(self, slices: list[BatchSlice], outputs: list[Any]) -> Any:
        """Outputs of the whole batch, on the first device, with leaves that catch the gradients for each replica."""
        device = self._replicas.root.device
        self._pending = []
        copies = []
        for batch_slice, output in zip(slices, outputs, strict=True):
            waiting = Pending(batch_slice, [], [])
            copies.append(tree_map_only(torch.Tensor, partial(waiting.catch, device), output))
            self._pending.append(waiting)
        return self.rules.merge_outputs(copies, weights_of(slices), device, self._replicas.output_dim)

    def weights(self, slices: Sequence[BatchSlice]) -> list[float]:
        """Every slice's part in the loss of the whole batch."""
        return _parts_of_loss(self.rules.loss_reduction, weights_of(slices))

    @property
    def adds_losses(self) -> bool:
        """Whether the loss of the whole batch is the sum of the replicas', not their mean."""
        return self.rules.loss_reduction == "sum"

    # ---- the backward, once the merged loss has its gradient ----

    def backward(self, *, last: bool = True) -> None:
        """Runs each replica's backward from the gradient that the merged loss received. A no-op without a forward.

        Args:
            last: A :meth:`reduce` follows, so gradients may travel already; otherwise they accumulate.
        """
        # Both are of one forward: a second backward, or one after an error, finds nothing.
        pending = self._pending
        self._pending = []
        backward = self._backward
        self._backward = self._after_all
        # The loss was no part of the graph that the caller walked, or there was none.
        if not any(leaf.grad is not None for waiting in pending for leaf in waiting.leaves):
            return
        self._unreduced = True
        self._replicas.state.buffers.hide()
        if backward.has_forwards:
            self._collect_buffers()  # of the first pass; the second one leaves them so
            backward.run(pending, last=last)
            return
        backward.run(pending, last=last)
        self._collect_buffers()

    def end_without_backward(self) -> None:
        """After a forward without graphs, which no backward follows: the buffers are those of the whole batch."""
        self._pending = []
        self._collect_buffers()

    def show_buffers(self) -> None:
        """Hooks between this forward and its backward find the buffers that the whole batch has made."""
        if len(self._active) > 1 and self._pending:
            self._replicas.state.buffers.show(self._active, self._rows_of_active, self._choice_of_buffers)

    def _collect_buffers(self) -> None:
        """Collects the buffers, which must not change before backward has ended."""
        # Batch norm keeps its running statistics for the backward.
        self._replicas.state.buffers.collect(self._active, self._rows_of_active, self._choice_of_buffers)

    @property
    def _choice_of_buffers(self) -> ChooseBufferRule | None:
        if self.rules.decides_buffers:
            return self.rules.buffer_rule
        return None

    # ---- the reduction ----

    def reduce(self) -> None:
        """Sums the gradients of all replicas into the owners' and drops the others, unless that has been done."""
        if not self._unreduced:
            return
        self._unreduced = False
        self.sums.reduce()
        if self.has_processes:
            self.sums.average_over_processes(self._weight_of_process(self._rows))
            self._rows = 0.0

    def total_gradients(
        self, columns: Sequence[Sequence[torch.Tensor | None]], rows: float
    ) -> list[torch.Tensor | None]:
        """The sums of K x N gradients over the replicas, each on the device of its owner; of all processes.

        Args:
            columns: By replica, a gradient of its part of the loss for every parameter, or ``None``.
            rows: How many rows of this process's batch they come from.
        """
        return self.sums.totals(columns, self._weight_of_process(rows))

    def _weight_of_process(self, rows: float) -> float:
        """What this process's gradients count among those of others; -1 where they are added."""
        if self.adds_losses:
            return -1
        return rows

    @property
    def owner_parameters(self) -> list[torch.nn.Parameter]:
        """Every parameter's copy on its owner, which is what an optimizer changes."""
        return self.sums.owner_parameters

    @property
    def has_other_owners(self) -> bool:
        """Whether replicas beside the first own parameters."""
        return self.sums.has_other_owners

    @property
    def has_processes(self) -> bool:
        """Whether gradients are those of several processes."""
        return self.sums.processes is not None

    # ---- a step by hand ----

    def forward_manual(
        self, slices: Sequence[BatchSlice], call: Callable[[BatchSlice], Any], come_apart: Callable[[GatherError], None]
    ) -> Any:
        """Runs ``call`` on every slice, in which the user drives backward and optimizers; merges what it returns.

        Args:
            slices: The parts of the batch.
            call: The step.
            come_apart: Is told of results that cannot be merged; if it returns, the first slice's result is the step's.
        """
        self.begin()
        outputs = self._replicas.run("training_step", slices, call)
        self._active = [batch_slice.replica for batch_slice in slices]
        self._rows_of_active = [batch_slice.num_rows for batch_slice in slices]
        self._collect_buffers()
        try:
            return self.rules.merge_outputs(
                outputs, weights_of(slices), self._replicas.root.device, self._replicas.output_dim
            )
        except GatherError as error:
            come_apart(error)
            return outputs[0]

    # ---- steps that failed, or run again ----

    def pending_gradients(self) -> list[list[torch.Tensor | None]]:
        """What the first backward left for every replica's own."""
        return [[leaf.grad for leaf in waiting.leaves] for waiting in self._pending]

    def take_gradients(self, gradients: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """Gives the leaves of a repeated forward the gradients that :meth:`pending_gradients` returned."""
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
        for replica in self._replicas.primaries:
            if any(parameter.grad is not None for parameter in replica.parameters):
                return True
        return False

    def discard_forward(self) -> None:
        """After an error in forward: forgets it. Gradients of earlier batches stay."""
        self._pending = []
        backward = self._backward
        self._backward = self._after_all
        backward.abandon()
        self._replicas.state.buffers.restore()

    def keep_earlier_batches(self) -> None:
        """After an error in forward: forgets it, and leaves the gradients of earlier batches as one device does.

        Those of this process: others, which have no error, would wait for it in the middle of their steps.
        """
        self.discard_forward()
        if self._unreduced:
            self._unreduced = False
            self.sums.reduce()

    def discard(self) -> None:
        """After an error: drops the forward and all gradients, since some replicas have added theirs and others not."""
        # Nor is anything put back of what it had put aside.
        self._backward = self._after_all
        self._unreduced = False
        self._rows = 0.0
        self.sums.forget()
        # Micro-batches beside the first of a device have the same parameters.
        for replica in self._replicas.primaries:
            for parameter in replica.parameters:
                parameter.grad = None
        self.discard_forward()

    # ---- between steps ----

    def remake_replicas(self) -> None:
        """Makes the replicas anew from the user's module; gradients that have accumulated stay.

        Raises:
            ReplicationError: the module cannot be copied faithfully.
        """
        # Gradients of earlier batches are in the old replicas, which nobody will ask again.
        if self._unreduced:
            self.sums.reduce()
        # By way of the user's own parameters: replicas, and perhaps owners, are others afterwards.
        for parameter, owned in zip(self._replicas.root.parameters, self.owner_parameters, strict=True):
            _hand_gradient(owned, parameter)
        # Its hooks hold the old replicas' parameters.
        self.close()
        self._replicas.remake()
        self.sums.follow_replicas()
        for parameter, owned in zip(self._replicas.root.parameters, self.owner_parameters, strict=True):
            _hand_gradient(parameter, owned)  # where the optimizer zeroes it

    def close(self) -> None:
        """Takes its hooks off the parameters; the next backward puts them on again."""
        self.sums.close()


def _hand_gradient(source: torch.nn.Parameter, target: torch.nn.Parameter) -> None:
    # Moved, not copied: two gradients of one parameter would both be reduced.
    if source is not target and source.grad is not None:
        target.grad = source.grad.to(target.device)
        source.grad = None


def _without_loss(output: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in output.items() if key != "loss"}


def _parts_of_loss(reduction: str, weights: Weights) -> list[float]:
    """What each slice's loss counts in the loss of the whole batch."""
    if reduction == "sum":
        return [1.0] * len(weights.rows)
    # If no slice has anything to weigh, such as tokens, the loss is NaN however they are weighted;
    # rows keep the division possible.
    counts = weights.of_loss if any(weights.of_loss) else weights.rows
    if not any(counts):
        return [1 / len(counts)] * len(counts)  # an empty batch, whose loss is whatever the step makes of no rows
    return [count / sum(counts) for count in counts]
