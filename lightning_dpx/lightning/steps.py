"""The data flow of a step through a strategy: its batch to shares, the shares to the replicas, their results to one.

    training_step   slices, each moved by the user's hooks -> every replica's own step -> logs once, one loss
    backward        called by the precision plugin after its own: every replica's, then the reduction
    evaluation      likewise, without a backward

What the first batch decides (shifts, memory plans, threads) is decided here, before its step; memory plans at setup,
where an example of a batch is known.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn import Module

from lightning_dpx.errors import CollectiveError, WholeBatchError
from lightning_dpx.lightning.batch_writes import BatchWrites, unlike_one_batch
from lightning_dpx.lightning.gradient_hooks import GradientHooks
from lightning_dpx.lightning.logging import StepLog, replay
from lightning_dpx.lightning.loose_tensors import LooseTensors, reason_and_advice
from lightning_dpx.lightning.manual.acts_once import any_view, current_view, held_optimizers
from lightning_dpx.lightning.manual.manual import ManualOptimization
from lightning_dpx.lightning.memory.auto_shift import shift_what_does_not_fit
from lightning_dpx.lightning.memory.example_input import profile_example
from lightning_dpx.lightning.memory.out_of_memory import OutOfMemory
from lightning_dpx.lightning.memory.planning import MemoryPlanning
from lightning_dpx.lightning.memory.profiling import keeps_gradients
from lightning_dpx.lightning.memory.static import StaticMemory, bytes_of_states
from lightning_dpx.lightning.metrics.metrics import ReplicaMetrics
from lightning_dpx.lightning.precision import DPXPrecision
from lightning_dpx.lightning.processes.stop import CoordinatedStop
from lightning_dpx.lightning.ranks import RanksOfReplicas
from lightning_dpx.lightning.rehearsal.guest_step import ManualGuest
from lightning_dpx.lightning.rehearsal.rehearsal import Rehearsals
from lightning_dpx.lightning.whole_batches import (
    RewindableBatches,
    WholeBatches,
    fetches_by_itself,
    paths_of_loaders,
    rows_to_weigh_by,
)
from lightning_dpx.memory import planned
from lightning_dpx.python_objects.preserve import preserve_rng_state
from lightning_dpx.replicas import (
    MergeRules,
    Replica,
    ReplicaSet,
    Share,
    Trial,
    UncuttableBatch,
    check_paths,
    first_loss,
    weights_of,
)
from lightning_dpx.replicas.shared_iterators import PeekedIterator, iterators_peeked, put_iterators_back
from lightning_dpx.shifting import BetweenSteps, applied_shift
from lightning_dpx.step import TrainingStep

_DEFAULT_TRANSFERS = (pl.LightningModule.transfer_batch_to_device, pl.LightningModule.on_after_batch_transfer)


class StepsOfReplicas(RanksOfReplicas):
    """Runs Lightning's steps on replicas, where :meth:`_setup_model` of the strategy made some.

    Args:
        planning: Chooses and follows memory plans.
        out_of_memory: What happens when memory runs out.
        args: Of Lightning's own strategy.
    """

    _batch_dim: int | dict[str, int]
    _shifts: dict[torch.device, torch.device]
    _auto_shifts: bool
    _shifts_open: bool  # the first batch decides
    _shifted_parts: list[str]
    _example_batch: Any
    _rehearsals: Rehearsals

    def __init__(self, planning: MemoryPlanning, out_of_memory: OutOfMemory, *args: Any) -> None:
        self._planning, self._out_of_memory = planning, out_of_memory
        self._replicas: ReplicaSet | None = None
        self._step: TrainingStep | None = None
        self._metrics: ReplicaMetrics | None = None
        self._stopping: CoordinatedStop | None = None  # where there are several processes
        self._hooks_mode: BetweenSteps | None = None  # what hooks run in, where parts are shifted
        self._accumulating, self._undecided = False, False
        self._announced: set[str] = set()
        self._whole_batches = WholeBatches()
        self._loose_tensors = LooseTensors()
        self._manual: ManualOptimization | None = None
        self._gradient_hooks = GradientHooks()
        self._batch_writes = BatchWrites()
        self._repeatable: Callable[[], Any] | None = None  # the forward of the step that is under way
        self._tightening: Callable[[], str] = planning.advice
        super().__init__(*args)

    def _follow_structure(self) -> None:
        """Makes the replicas anew where the user's module consists of other parts now."""
        raise NotImplementedError

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """With several replicas the batch stays as the loader gave it; each replica moves its own slice."""
        if self._replicas is not None and device is None:
            module: Any = self._replicas.root.module
            return self._batch_writes.show(batch) if self._batch_writes.is_for(module) else batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The merged result of the replicas' training steps.

        Where the module has a method ``training_step_end(outputs)``, the replicas' outputs are merged in sample order
        and it computes the loss from those of the whole batch; gradients flow back through every replica.
        """
        outputs = self._train(args, kwargs)
        assert self.lightning_module is not None, "connect() sets the module first"
        put_iterators_back(self.lightning_module)
        self._end_batch("training_step", args)
        return outputs

    def _end_batch(self, name: str, args: tuple[Any, ...]) -> None:
        """Hooks find in the batch what the step wrote there."""
        if self._replicas is None or not self._batch_writes.is_watched:
            return
        rules = self._rehearsals.rules(name, args[2] if name != "training_step" and len(args) > 2 else 0)
        problem = self._batch_writes.finish(rules, self.root_device, self._replicas.output_dim)
        if problem is not None:
            self._whole_batches.give_whole(name, *unlike_one_batch(problem))

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._step is not None:
            self._follow_structure()
            if self._step is None:  # given up, when the batch was still where the loader left it
                args = (super().batch_to_device(args[0]), *args[1:])
        if self._step is None:
            with self._arranged():
                return self._finished("training_step", super().training_step(*args, **kwargs))
        if self._plans_memory and fetches_by_itself(args[0]):
            args = (RewindableBatches(args[0]), *args[1:])  # rehearsals and repetitions fetch what the step fetches
        shares, replicas = self._shares("training_step", args), self._replicas
        assert replicas is not None, "the step came with them"
        if self._rehearsals.before_step("training_step", shares, args, kwargs):
            shares = self._shares("training_step", args)  # it may have to run whole
        if self._shifts_open:
            self._shift_what_does_not_fit(shares, args, kwargs)
        if self._needs_plan(args[0]):
            self._plan_memory(shares, args, kwargs)
        self._planning.confirm(replicas, shares, self._static_memory)
        self._planning.begin_step()
        # By hand, or with owners elsewhere, a step of one active replica still concerns the gradients of the others.
        by_hand = not replicas.root.module.automatic_optimization and not replicas.always_merged
        alone_here = len(shares) == 1 and self.num_processes == 1 and not self._out_of_memory.repeats_steps
        if alone_here and not by_hand and not self._step.has_other_owners:
            replicas.release_cores()
            alone = super().training_step
            if self._undecided:
                with self._arranged():
                    return self._choosing_step(
                        lambda: alone(self._given(shares[0], 0), *args[1:], **kwargs), args, kwargs
                    )
            with self._arranged():
                return self._finished("training_step", alone(self._given(shares[0], 0), *args[1:], **kwargs))
        replicas.claim_cores()
        self._out_of_memory.begin_step(replicas)
        automatic = replicas.root.module.automatic_optimization
        self._repeatable = partial(self._repeated_forward, shares, args, kwargs) if automatic else None
        forward = partial(self._forward_of_replicas, shares, args, kwargs)
        tighten = partial(self._tighten, shares, args, kwargs)
        self._tightening = tighten
        try:
            return self._out_of_memory.guarded(forward, tighten, forward if automatic else None)
        except WholeBatchError as error:
            self._step.discard()
            if self._manual is None or not self._manual.undo_first_step():
                raise
            self._whole_batches.give_whole("training_step", error.reason, error.advice)
        except (CollectiveError, torch.OutOfMemoryError):  # some replicas have added theirs, or there is no room
            self._step.discard()
            raise
        except Exception:
            self._step.keep_earlier_batches()
            raise
        except BaseException:
            self._step.discard()
            raise
        return self._train(args, kwargs)

    def _forward_of_replicas(self, shares: list[Share], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._replicas is not None, "only called with replicas"
        assert self._step is not None, "only called with replicas"
        try:
            # Entered once and carried into the workers: some of these contexts change the whole process.
            logs = self._logs("training_step", shares, self._step.rules)
            with self.precision_plugin.train_step_context(), logs as call:
                run_step, finisher = call("training_step", args[1:], kwargs), self._finisher("training_step")
                if self._replicas.root.module.automatic_optimization:
                    return self._step.forward(shares, run_step if finisher else _checked(run_step), finisher)
                return self._finished("training_step", self._manual_step(shares, run_step))
        except BaseException:
            self._step.discard_forward()
            raise

    def _repeated_forward(self, shares: list[Share], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """For another backward of the same step: nothing is logged or counted twice."""
        assert self._step is not None, "only called with replicas"
        assert self._metrics is not None, "only called with replicas"

        def run(share: Share) -> Any:
            return self._call(StepLog(share), "training_step", args[1:], kwargs)

        with self.precision_plugin.train_step_context(), self._metrics.kept(shares):
            self._step.forward(shares, run, self._finisher("training_step"))

    def _finisher(self, name: str) -> Callable[[Any], Any] | None:
        """The user's hook that sees the merged outputs of ``name``, if there is one."""
        module = self.lightning_module
        if getattr(type(module), f"{name}_end", None) is None:  # asked of the class: a miss costs a module much more
            return None
        hook: Callable[[Any], Any] = getattr(module, f"{name}_end")
        return hook

    def _finished(self, name: str, outputs: Any) -> Any:
        finish = self._finisher(name)
        if finish is None or outputs is None:
            return outputs
        context = self.precision_plugin.train_step_context if name == "training_step" else None
        with (context or self.precision_plugin.val_step_context)():
            return finish(outputs)

    def _manual_step(self, shares: list[Share], run_step: Callable[[Share], Any]) -> Any:
        """The user drives backward and optimizers, and the replicas meet in them."""
        assert self._replicas is not None, "only called with replicas"
        assert self._step is not None, "only called with replicas"
        assert isinstance(self.precision_plugin, DPXPrecision), "the setter wraps every plugin"
        if self._manual is None:
            self._manual = ManualOptimization(self, self._replicas, self._step, self.precision_plugin)
        manual = self._manual

        def with_meetings(share: Share) -> Any:
            with manual.on(share):
                return run_step(share)

        with manual.running(shares):
            return self._step.forward_manual(shares, with_meetings)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning's; in a manual step of several replicas, of every replica's part of the loss."""
        if (view := current_view()) is not None:
            loss: Tensor = view.backward(closure_loss, optimizer, *args, **kwargs)
            return loss
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @property
    def lightning_module(self) -> "pl.LightningModule | None":
        """The user's module; inside a manual step of several replicas, that of the replica."""
        if any_view() is None:
            return self._lightning_module
        view = current_view()
        return self._lightning_module if view is None else view.module

    def _choosing_step(self, alone: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One device's step, watched, to choose between one merged slice and a thread per replica from then on."""
        assert self._replicas is not None, "only called with replicas"
        assert self._step is not None, "only called with replicas"
        replicas, step, self._undecided = self._replicas, self._step, False

        def rehearse(share: Share) -> Any:
            module: Any = share.replica.module
            with StepLog(share).recording(module):
                return module.training_step(self._transfer(share, 0), *args[1:], **kwargs)

        def loss_of_slices() -> Any:
            replicas.choose(threads=True)
            copies = [replicas.replicas[max(1, index)] for index in range(len(replicas.replicas))]
            shares = [replace(share, replica=copies[share.replica.index]) for share in replicas.shares(args[0])]
            replicas.python_state.share()
            try:
                preserved = preserve_rng_state(replicas.devices, [replicas.root.module])
                with preserved, torch.no_grad(), self.precision_plugin.train_step_context():
                    return first_loss(step.forward(shares, rehearse))
            finally:
                step.discard()

        trial = Trial(replicas.root.module, len(replicas.replicas))
        with replicas.python_state.iterators_shared() as iterators:
            output = trial.watch(alone)
            iterators.rewind(may_fetch=False)
            verdict = trial.verdict(first_loss(output), loss_of_slices)
        replicas.choose(threads=verdict.threads)
        self._announce(f"{'run in threads' if verdict.threads else 'take their slices as one'}: {verdict.reason}")
        return output

    def _announce(self, choice: str) -> None:
        text = f"dpx: {len(self.parallel_devices or [])} replicas on {self.root_device} {choice}."
        if text not in self._announced:
            rank_zero_info(text)
        self._announced.add(text)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The merged result of the replicas' validation steps, in sample order."""
        return self._evaluate("validation_step", super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The merged result of the replicas' test steps, in sample order."""
        return self._evaluate("test_step", super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The merged predictions, in sample order."""
        return self._evaluate("predict_step", super().predict_step, args, kwargs)

    def _evaluate(self, name: str, alone: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = self._evaluated(name, alone, args, kwargs)
        self._end_batch(name, args)
        return outputs

    def _evaluated(self, name: str, alone: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stopping is not None:
            self._stopping.before_batch()
        if self._replicas is not None:
            self._follow_structure()
            if self._replicas is None:  # given up, when the batch was still where the loader left it
                args = (super().batch_to_device(args[0], dataloader_idx=(args[2:] or (0,))[0]), *args[1:])
        if self._replicas is None:
            with self._arranged():
                return self._finished(name, alone(*args, **kwargs))
        shares = self._shares(name, args)
        if self._rehearsals.before_step(name, shares, args, kwargs):
            shares = self._shares(name, args)  # it may have to run whole
        dataloader_idx = args[2] if len(args) > 2 else 0
        if len(shares) == 1 and self.num_processes == 1:
            with self._arranged():
                return self._finished(name, alone(self._given(shares[0], dataloader_idx), *args[1:], **kwargs))
        return self._evaluate_replicas(name, shares, args, kwargs)

    def _evaluate_replicas(self, name: str, shares: list[Share], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._replicas is not None, "only called with replicas"
        dataloader_idx = args[2] if len(args) > 2 else 0
        rules = self._rehearsals.rules(name, dataloader_idx)
        with self.precision_plugin.val_step_context(), self._logs(name, shares, rules) as call:
            self._replicas.state.synchronize()
            if rules.decides_buffers:
                self._replicas.state.remember_buffers()
            outputs = self._replicas.run(name, shares, call(name, args[1:], kwargs, dataloader_idx))
            if rules.decides_buffers:
                active, rows = [share.replica for share in shares], [share.num_rows for share in shares]
                self._replicas.state.collect_buffers(active, rows, rules.buffer_rule)
            merged = rules.merge_outputs(outputs, weights_of(shares), self.root_device, self._replicas.output_dim)
        return self._finished(name, merged)

    def _shares(self, name: str, args: tuple[Any, ...]) -> list[Share]:
        """The slices of a batch, or the whole of it for the first replica where it is not, or cannot be, cut."""
        assert self._replicas is not None, "only called with replicas"
        batch = args[0]
        shares = self._slices(name, batch) if self._replicas.cuts_batches else None
        if shares is None:
            num_rows = rows_to_weigh_by(batch) if self._reads_rows else 1
            shares = [self._replicas.whole_share(batch, num_rows)]
        assert self.lightning_module is not None, "connect() sets the module first"
        shares = self._weighted(shares, self.lightning_module)
        self._rows_of_step = sum(weights_of(shares).of_loss)
        return shares

    def _weighted(self, shares: list[Share], module: "pl.LightningModule") -> list[Share]:
        """The shares with the weights that the user's ``loss_weight(batch)`` gives them, if there is one."""
        weigh = getattr(module, "loss_weight", None) if hasattr(type(module), "loss_weight") else None
        if not callable(weigh) or (len(shares) == 1 and self.num_processes == 1):
            return shares
        return [replace(share, weight=float(weigh(share.batch))) for share in shares]

    def _slices(self, name: str, batch: Any) -> list[Share] | None:
        """``None``, and announced once, where the batch must go whole."""
        assert self._replicas is not None, "only called with replicas"
        if name == "training_step":
            self._keep_loose_tensors_whole(self._replicas)
        if self._whole_batches.reason_for(name) is not None:
            return None
        if fetches_by_itself(batch):
            self._whole_batches.announce_batch(
                name,
                f"{name}(self, dataloader_iter) fetches its batches itself.",
                "For all devices to take part, let it take a batch.",
                "dataloader_iter",
            )
            return None
        if self._replicas.slicer.slicer is None:  # a user's slicer need not look at it
            check_paths(batch, self._batch_dim)
            module: Any = self._replicas.root.module
            self._replicas.slicer.loaders = paths_of_loaders(module.trainer, name)
        try:
            return self._replicas.shares(batch)
        except UncuttableBatch as error:
            self._whole_batches.announce_batch(name, error.reason, error.advice, error.kind)
            return None

    def _keep_loose_tensors_whole(self, replicas: ReplicaSet) -> None:
        """A gradient of a tensor that is no parameter of the module is that of the first replica's slice only."""
        known = chain.from_iterable(replica.parameters for replica in replicas.replicas)
        module = replicas.root.module
        names = self._loose_tensors.find([*self.optimizers, *held_optimizers(module)], module, known)
        if names:
            self._whole_batches.give_whole("training_step", *reason_and_advice(names))

    @property
    def _reads_rows(self) -> bool:
        """Whether anything weighs by the rows of a batch that is not cut; Lightning counts for its logs itself."""
        assert self._replicas is not None, "only called with replicas"
        assert self._step is not None, "only called with replicas"
        weighs = self.num_processes > 1 or self._step.has_other_owners or self._replicas.times is not None
        by_hand = not self._replicas.root.module.automatic_optimization
        return weighs or by_hand or self._plans_memory or self._shifts_open

    def _given(self, share: Share, dataloader_idx: int) -> Any:
        """What the step of a replica gets."""
        batch = self._transfer(share, dataloader_idx)
        if self._batch_writes.is_watched:
            self._batch_writes.note(share, batch, is_as_loaded=not _has_own_transfers(share.replica.module))
        return batch

    def _transfer(self, share: Share, dataloader_idx: int) -> Any:
        """Moves a slice to its replica through the user's batch hooks."""
        module: Any = share.replica.module
        batch = share.batch
        if isinstance(batch, RewindableBatches):
            batch.rewind()
        if fetches_by_itself(batch):
            return batch
        source = module.trainer._data_connector._datahook_selector
        is_there = _lives_on(batch, share.replica.device)
        for hook, extra in (("transfer_batch_to_device", (share.replica.device,)), ("on_after_batch_transfer", ())):
            owner = source.get_instance(hook)
            target = module if isinstance(owner, pl.LightningModule) else owner
            call = getattr(target, hook)
            if not (is_there and getattr(call, "__func__", None) in _DEFAULT_TRANSFERS):
                batch = call(batch, *extra, dataloader_idx)
                is_there = False
        return batch

    @contextmanager
    def _logs(
        self, stage: str, shares: Sequence[Share], rules: MergeRules
    ) -> Iterator[Callable[..., Callable[[Share], Any]]]:
        """Yields a maker of per-replica calls; what they log is logged once, merged, when the block ends well."""
        logs = {share.replica.index: StepLog(share) for share in shares}

        def make(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], idx: int = 0) -> Callable[[Share], Any]:
            def call(share: Share) -> Any:
                return self._call(logs[share.replica.index], name, args, kwargs, idx)

            return call

        assert self._replicas is not None, "only called with replicas"
        assert self._metrics is not None, "only called with replicas"
        self._replicas.python_state.share()
        self._metrics.refresh(self._replicas.root.modules)
        state = self._replicas.python_state
        shared = state.iterators_shared() if state.has_iterators else nullcontext()
        with self._metrics.step(shares, restore=self._out_of_memory.repeats_steps), shared:
            yield make
        self._replicas.python_state.collect([share.replica for share in shares])
        assert self.lightning_module is not None, "connect() sets the module first"
        replay(list(logs.values()), self.lightning_module, self.root_device, self._metrics, rules)
        self._metrics.end_step()
        for reason in self._metrics.separate:
            self._whole_batches.give_whole(stage, reason, "Give the metric one row per sample, padded to one size.")

    def _call(self, log: StepLog, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], idx: int = 0) -> Any:
        """A replica's own step, as every replica runs it; what it logs goes to ``log``."""
        module: Any = log.share.replica.module
        with log.recording(module), self._arranged(module):
            return getattr(module, name)(self._given(log.share, idx), *args, **kwargs)

    def _backward_of_replicas(self) -> None:
        if self._step is None:
            return
        step, repeatable = self._step, self._repeatable
        gradients = step.pending_gradients() if self._out_of_memory.repeats_steps else []

        def again() -> None:
            assert repeatable is not None, "checked below"
            repeatable()
            step.take_gradients(gradients)
            self._backward_once()

        # A backward that failed half-way leaves gradients that cannot be told from those of earlier batches.
        can_repeat = self._out_of_memory.repeats_steps and repeatable is not None and not step.holds_gradients
        self._out_of_memory.guarded(self._backward_once, self._tightening, again if can_repeat else None)

    def _backward_once(self) -> None:
        assert self._step is not None, "only called with replicas"
        # Hooks that look at gradients in the middle of an accumulation window must find those of one device.
        sums_now = not self._accumulating or self._gradient_hooks.within_window
        try:
            self._gradient_hooks.before_backward()
            self._step.backward(last=sums_now)
            self._planning.end_backward()
            if sums_now:
                self._step.reduce()
                self._gradient_hooks.after_backward()
        except BaseException:
            self._step.discard()
            raise

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients stay on the replicas while they accumulate."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @property
    def shifts_activations(self) -> bool:
        """Whether parts of the replicas run, or may run, on other devices."""
        return bool(self._shifts or self._auto_shifts)

    @property
    def _plans_memory(self) -> bool:
        return self._planning.wanted or self._out_of_memory.repeats_steps

    def _shift_what_does_not_fit(self, shares: list[Share], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first batch tells what a step keeps; before its first allocation, ``shifts="auto"`` is decided."""
        assert self._replicas is not None, "only called with replicas"
        assert self._step is not None, "only called with replicas"
        self._shifts_open = False
        self._step.close()  # its hooks hold on to where the parameters were
        with iterators_peeked(self._replicas.root.module) as peeked:
            shift_what_does_not_fit(self._replicas, shares, self._rehearsal(args, kwargs, peeked), self.optimizers)
        self._note_shifts(self._replicas)

    def _note_shifts(self, replicas: ReplicaSet) -> None:
        """From now on, hooks may use parameters of both sides of these cuts at once."""
        if self._hooks_mode is not None:
            found = [applied_shift(replica.module) for replica in replicas.replicas]
            self._hooks_mode.pairs = [(shift.source, shift.target) for shift in found if shift is not None]

    def _needs_plan(self, batch: Any) -> bool:
        """Of several processes all plan if one must: a step may meet the others', and so may its rehearsal."""
        assert self._replicas is not None, "only called with replicas"
        mine = self._planning.is_open(self._replicas, batch)
        return self.reduce_boolean_decision(mine, all=False) if self._planning.asked else mine

    def _plan_memory(
        self, shares: list[Share], args: tuple[Any, ...], kwargs: dict[str, Any], source: str = ""
    ) -> None:
        """A batch that is larger than any before is profiled on a stand-in, before its step allocates anything."""
        assert self._replicas is not None, "only called with replicas"
        with iterators_peeked(self._replicas.root.module) as peeked:
            run = self._rehearsal(args, kwargs, peeked)
            self._planning.decide(self._replicas, args[0], shares, run, self._static_memory, source=source)

    def _plan_ahead(self) -> None:
        """At setup, before any data is loaded: a budget that cannot be met is refused, an example batch is planned.

        Raises:
            PlanError: the budget cannot be met.
        """
        if self._step is None or not self._planning.asked or self._shifts_open:
            return
        assert self._replicas is not None, "the step came with them"
        replicas, module = self._replicas, self.lightning_module
        assert module is not None, "connect() sets the module first"
        known = self._example_batch is not None
        self._planning.check_feasible(
            replicas,
            self._static_memory,
            lambda replica: [] if known else profile_example(replicas, replica, self.precision_plugin),
        )
        if not known:
            return
        batch = module._on_before_batch_transfer(self.precision_plugin.convert_input(self._example_batch))
        index = (0,) if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else ()
        try:
            self._plan_memory(self._shares("training_step", (batch,)), (batch, *index), {}, "example_batch")
        except BaseException as error:
            error.add_note(
                "It happened at setup, where memory is planned from example_batch, before on_fit_start and "
                "on_train_start; without it the first batch is planned."
            )
            raise
        finally:
            replicas.forget_usual_rows()

    def _tighten(self, shares: list[Share], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """After a step that ran out of memory; says what the plans are now."""
        assert self._replicas is not None, "only called with replicas"
        with iterators_peeked(self._replicas.root.module) as peeked:
            run = self._rehearsal(args, kwargs, peeked)
            return self._planning.tighten(self._replicas, args[0], shares, run, self._static_memory)

    def _static_memory(self, shares: Sequence[Share]) -> StaticMemory:
        """What a step of ``shares`` needs on every device beside its activations."""
        assert self._step is not None, "only called with replicas"
        assert self.lightning_module is not None, "connect() sets the module first"
        return StaticMemory(
            shares,
            states=bytes_of_states(self._step.owner_parameters, self.optimizers),
            moving=self._step.reduction_bytes([share.replica.index for share in shares]),
            moves_in_backward=self._step.reduces_in_backward,
            accumulates=keeps_gradients(self.lightning_module.trainer),
        )

    def _rehearsal(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], peeked: Sequence[PeekedIterator]
    ) -> Callable[[Any, Any, int], Any]:
        """The training step of a stand-in, whose logs nobody reads."""
        assert self._step is not None, "only called with replicas"
        assert self._replicas is not None, "only called with replicas"
        assert self.lightning_module is not None, "connect() sets the module first"
        guest = ManualGuest(self, self.lightning_module, self._step.owner_parameters, self._replicas.devices)

        def run(module: Any, rows: Any, num_rows: int) -> Any:
            for iterator in peeked:
                iterator.rewind(is_tried=True)
            share = Share(Replica(0, module.device, module), num_rows, rows)
            if not module.automatic_optimization:
                with guest.visit(module):
                    return run_step(module, share)
            return run_step(module, share)

        def run_step(module: Any, share: Share) -> Any:
            with StepLog(share).recording(module), self.precision_plugin.train_step_context(), self._arranged(module):
                return module.training_step(self._transfer(share, 0), *args[1:], **kwargs)

        return run

    def _arranged(self, module: Module | None = None) -> AbstractContextManager[None]:
        """Whatever runs a replica's own step runs in here: shifted, and with the memory plan."""
        shifted = self.shifts_activations
        if not shifted and not self._planning.plans:
            return nullcontext()
        module = module or self.lightning_module
        assert module is not None, "connect() sets the module first"
        shift = applied_shift(module) if shifted else None
        return planned(module) if shift is None else _both(shift.active(), planned(module))


def _checked(run_step: Callable[[Share], Any]) -> Callable[[Share], Any]:
    """Lightning's own complaint about what a step returns, where the replica that returned it is known."""

    def run(share: Share) -> Any:
        output = run_step(share)
        if output is None or isinstance(output, Tensor):
            return output
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            ClosureResult.from_training_step_output(output)
        return output

    return run


def _has_own_transfers(module: Any) -> bool:
    """Whether hooks of the user's make something else of a batch on its way to a device."""
    source = module.trainer._data_connector._datahook_selector
    calls = [getattr(source.get_instance(hook.__name__), hook.__name__) for hook in _DEFAULT_TRANSFERS]
    return not all(getattr(call, "__func__", None) in _DEFAULT_TRANSFERS for call in calls)


def _lives_on(batch: Any, device: torch.device) -> bool:
    """Whether ``batch`` is for certain on ``device``; asked of tensors and flat lists of them only."""
    tensors = batch if type(batch) in (list, tuple) else [batch]
    return all(type(tensor) is Tensor and tensor.device == device for tensor in tensors)


@contextmanager
def _both(first: AbstractContextManager[None], second: AbstractContextManager[None]) -> Iterator[None]:
    with first, second:
        yield
