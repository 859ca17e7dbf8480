"""The step as one device does it, on a few rows: what slices are compared with."""

import copy
import traceback
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_dpx.devices import raises_out_of_memory
from lightning_dpx.lightning.batch_writes.batch_writes import BatchWrites
from lightning_dpx.lightning.logging import StepLog, path_of
from lightning_dpx.lightning.metrics.made_metrics import MadeMetrics, why_whole
from lightning_dpx.lightning.metrics.metrics import recorded_calls
from lightning_dpx.lightning.own_backwards import (
    BACKWARDS_ASK,
    BackwardWatch,
    may_drop_gradients,
    step_of,
)
from lightning_dpx.lightning.rehearsal.comparison.observation import (
    Observation,
    attributes_of,
    host_copy,
    own_attributes_of,
)
from lightning_dpx.lightning.rehearsal.few_rows import FewRows
from lightning_dpx.lightning.rehearsal.outcome import PartsAppear
from lightning_dpx.lightning.rehearsal.shadow import ShadowReplicas
from lightning_dpx.lightning.rehearsal.shadow_step import (
    ShadowStep,
    forget_gradients,
    frees_shadows,
    logged_value,
    recording,
)
from lightning_dpx.lightning.step_beginning import contents_of
from lightning_dpx.lightning.transfers import Transfer
from lightning_dpx.replicas import (
    BatchSlice,
    ListPlace,
    ListWatch,
    MergeRules,
    changed_numbers,
    find_lists,
    held_by_classes,
    numbers_of,
    without_graphs,
)
from lightning_dpx.replicas.hidden_arrays import found_in
from lightning_dpx.replicas.parameter_attributes import attributes_of_parameters, newly_set

# Places at which weights are nudged, each in a run of its own. Which side of a kink a value falls on is chance, and so
# is whether the mean of equal numbers is that number. Of 950 results that roundings had decided, in 80 steps of a GAN
# with norms, one nudge explained all but 11, two all but 1, and all of these each with five times to spare.
NUDGES = (slice(1, None, 2), slice(0, None, 2), slice(0, None, 3), slice(1, None, 3), slice(2, None, 3))


class _Start:
    """Weights of a shadow and states of its optimizers, to begin with once more."""

    def __init__(self, shadow: Any, optimizers: Iterable[Optimizer]) -> None:
        self._weights = [(parameter, host_copy(parameter)) for parameter in shadow.parameters()]
        # Without a method of the optimizer's, which may be the user's own and refuse.
        self._states: list[tuple[Any, dict[Any, Any], list[dict[str, Any]]]] = []
        for optimizer in optimizers:
            states = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}
            settings = []
            for group in optimizer.param_groups:
                # The parameters themselves stay in their groups; only what they hold is put back.
                settings.append({name: value for name, value in group.items() if name != "params"})
            self._states.append((optimizer, states, settings))

    def put_back(self) -> None:
        with torch.no_grad():
            for parameter, value in self._weights:
                parameter.copy_(value)
        for optimizer, states, settings in self._states:
            optimizer.state.clear()
            optimizer.state.update(states)
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                group.update(values)


class WholeRun:
    """Runs the step on the first device.

    Args:
        step: On a shadow.
        rows: Of the batch.

    Attributes:
        step: Likewise.
    """

    def __init__(self, step: ShadowStep, rows: FewRows) -> None:
        self.step: ShadowStep = step
        self._rows = rows

    @frees_shadows
    @raises_out_of_memory
    def observe(
        self,
        num_rows: int,
        *,
        other_draws: bool = False,
        num_steps: int = 1,
        other_first: bool = False,
        after_a_step: bool = True,
        nudged: slice | None = None,
        same_weights: bool = False,
        watched: AbstractContextManager[Any] | None = None,
    ) -> Observation:
        """What the last of ``num_steps`` steps on the same rows does.

        Args:
            num_rows: Of the batch.
            other_draws: Whether it draws other random numbers than every other run.
            num_steps: One after the other.
            other_first: Whether the first of them draws other random numbers than those after it.
            after_a_step: Whether gradients of an earlier step are there.
            nudged: The places at which each parameter has the next larger numbers; none unless given.
            same_weights: Whether each step begins with the weights of the first one, and with its optimizers' states;
                for steps by hand, which step inside.
            watched: Entered for the user's step alone.

        Raises:
            NotRehearsed: there is no shadow of the module, or no copy of the batch.
            PartsAppear: the step makes parameters, or metrics.
        """
        step = self.step
        shadow = step.make_shadow(own_parameters=nudged is not None)
        if nudged is not None:
            _nudge(shadow, nudged)
        # Replicas of one: the step runs by the code that runs slices, so that only the cut differs.
        replicas = step.replicas_of(shadow, [step.strategy.root_device], workload="even", micro_batches=1)
        steps = _StepsOnShadow(step, self._rows, num_rows, shadow, replicas)
        with ExitStack() as stack:
            optimizers = step.optimizers_for(shadow, None, steps.seen)
            stack.enter_context(step.pointing_at(shadow, None, None, optimizers))
            stack.enter_context(step.sandbox.run(shadow, other_draws=other_draws or other_first))
            stack.callback(replicas.close)
            stack.callback(forget_gradients, list(shadow.parameters()))  # also where the step raises
            start = _Start(shadow, optimizers.get("_optimizers", ())) if same_weights else None
            for number in range(num_steps):
                if other_first and number == 1:
                    step.sandbox.draw_as_other_runs(shadow)
                if start is not None and number:
                    start.put_back()
                # Each begins without the gradients of the one before, or with some where a real step
                # would.
                forget_gradients(shadow.parameters())
                if after_a_step:
                    step.leave_gradients(shadow.parameters())
                steps.observe_next(watched or nullcontext())
            steps.find_made_parts()
        steps.check_parts()
        self._adopt(steps.seen)
        return steps.seen

    def observe_nudged(self, num_rows: int, *, num_steps: int = 1, places: slice = NUDGES[0]) -> Observation | None:
        """What :meth:`observe` tells of a step that begins at the next larger numbers; ``None`` if it does not run.

        Only at some ``places``, one of ``NUDGES``: a norm takes out again what all numbers have in common.

        Weights of its own take room, a parameter of a class of the user's may refuse to be written, and a step may look
        whether weights are what it knows. Then nothing is known of roundings, and what differs is told.
        """
        try:
            return self.observe(num_rows, num_steps=num_steps, nudged=places)
        except Exception as error:  # noqa: BLE001  whatever becomes of it, the step itself has run
            traceback.clear_frames(error.__traceback__)
            return None

    def _adopt(self, seen: Observation) -> None:
        """Takes over what a run has shown of the step, for the runs after it."""
        step = self.step
        step.adopt_precision()
        step.changes_settings |= step.sandbox.last.changed_settings and not step.by_hand
        step.changes_settings |= bool(step.sandbox.switched)
        step.note_draws(seen)


class _StepsOnShadow:
    """Steps of a shadow on one device, one after the other on the same rows.

    Args:
        step: On the shadow.
        rows: Of the batch.
        num_rows: How many of them.
        shadow: The module.
        replicas: The shadow alone.

    Attributes:
        seen: What the last of them has done.
    """

    def __init__(self, step: ShadowStep, rows: FewRows, num_rows: int, shadow: Any, replicas: ShadowReplicas) -> None:
        self._step = step
        self._rows = rows
        self._num_rows = num_rows
        self._shadow = shadow
        self._replicas = replicas
        self.seen: Observation = Observation(state_before=step.state(shadow))
        # A step that makes a layer when it first knows its width adds names.
        self._known = {name for name, _ in shadow.named_parameters()}
        self._num_done = 0
        self._made_metrics = MadeMetrics()
        self._metrics_left: Sequence[str] = ()

    def observe_next(self, watched: AbstractContextManager[Any]) -> None:
        """Runs one more step.

        Args:
            watched: Entered for the user's step alone.
        """
        with self._made_metrics.watching():
            self._observe(watched)
        self._num_done += 1

    def find_made_parts(self) -> None:
        """Looks which metrics that steps have made are held by the shadow, while its replicas are there."""
        self._metrics_left = self._made_metrics.held_by([self._shadow], list(self._replicas.metrics.named))

    def check_parts(self) -> None:
        """Refuses steps that make parameters, or metrics.

        Raises:
            PartsAppear: they do.
        """
        made = [name for name, _ in self._shadow.named_parameters() if name not in self._known]
        if made:
            raise PartsAppear(
                f"The step makes parameters in it: {', '.join(made)}.", "Make them before fit, or in configure_model."
            )
        if self._metrics_left:
            raise PartsAppear(*why_whole(self._metrics_left))

    def _observe(self, watched: AbstractContextManager[Any]) -> None:
        step = self._step
        shadow = self._shadow
        replicas = self._replicas
        seen = self.seen
        # Copied for each step, which may write it in place.
        batch_slice = BatchSlice(replicas.root, self._num_rows, self._rows.whole(self._num_rows))
        writes = step.watch_batch(batch_slice.batch)
        contents = contents_of(batch_slice.batch)
        if step.trains:
            self._watch_leaves()
        log = StepLog(batch_slice)
        # Looked for anew before each step, as one may make lists
        # that the next one appends to.
        lists = ListWatch([shadow], _lists_of(shadow))
        attributes = list(own_attributes_of(shadow))
        numbers = numbers_of(attributes, step.hook_names.among(attributes).joined)
        on_parameters = attributes_of_parameters(shadow.named_parameters())
        replicas.root.refresh()
        replicas.metrics.refresh(replicas.root.modules)  # the step before may have made some
        calls = recorded_calls(replicas.metrics.named)
        with step.context(), calls as seen.metric_calls, watched:
            call = partial(self._call, log, writes)
            seen.output = replicas.run(step.call.name, [batch_slice], call)[0]
        seen.writes_batch |= contents_of(batch_slice.batch) != contents
        # By hand its backward lies inside of it.
        if not step.by_hand:
            step.sandbox.real_module.note_step()
        with recording(log, shadow):
            # training_step_end and its like see the outputs of all rows, and may log.
            final = step.session.finished(step.call.name, seen.output)
        grown = lists.grown(_lists_of(shadow))
        # Graphs would keep all activations of this run until it is compared.
        seen.appended = {place: without_graphs(items) for place, items in grown.items()}
        attributes = list(own_attributes_of(shadow))
        seen.hook_reads = step.hook_names.among(attributes)
        seen.numbers = numbers_of(attributes, seen.hook_reads.joined)
        seen.changed_numbers = changed_numbers(numbers, seen.numbers)
        seen.read_back |= log.read_back
        seen.logged = {path_of(key): logged_value(*entry) for key, entry in log.entries.items()}
        # One device needs no rules, as there is one slice.
        step.note_writes(writes, replicas, MergeRules(), seen)
        step.finish(seen, final, shadow, list(shadow.parameters()))
        seen.set_on_parameters = newly_set(shadow.named_parameters(), on_parameters)

    def _watch_leaves(self) -> None:
        """Sees which tensors beside parameters get gradients, of those that are there before the step."""
        copies = dict(attributes_of(self._shadow))
        for name, value in attributes_of(self._step.module):
            pairs = zip(found_in([value], torch.Tensor), found_in([copies.get(name)], torch.Tensor), strict=False)
            for own, leaf in pairs:
                is_trained = own.requires_grad and own.is_leaf and not isinstance(own, torch.nn.Parameter)
                if is_trained and leaf.is_leaf:
                    # Copies of tensors have neither a graph nor a wish for gradients.
                    leaf.requires_grad_()
                    # By a hook: a step by hand may use the gradient and drop it.
                    leaf.register_post_accumulate_grad_hook(partial(self._note_leaf, name))

    def _note_leaf(self, name: str, leaf: torch.Tensor) -> None:
        del leaf
        self.seen.trained_tensors.add(name)

    def _call(self, log: StepLog, writes: BatchWrites, batch_slice: BatchSlice) -> Any:
        """The user's step."""
        step = self._step
        call = step.call
        shadow: Any = batch_slice.replica.module
        with log.recording_alone(shadow), step.session.context(shadow):
            transfer = Transfer(shadow.trainer, shadow, call.dataloader_idx)
            batch = transfer.to_replica(batch_slice)
            writes.note(batch_slice, batch, is_as_loaded=transfer.is_plain)
            backwards = BackwardWatch(refuses=False)
            with BACKWARDS_ASK, step_of(backwards, shadow):
                output = getattr(shadow, call.name)(batch, *step.args_of(self._num_done)[1:], **call.kwargs)
        # By hand that is what a step is for.
        if backwards.seen and step.trains and not step.by_hand:
            drops = may_drop_gradients(shadow.trainer) and not backwards.leaves_gradients
            self.seen.drops_gradients |= drops
            self.seen.runs_backward |= not drops
        writes.let_go(batch_slice, others_follow=False)
        return output


def _lists_of(module: torch.nn.Module) -> dict[ListPlace, Any]:
    """Those that a step may append to: the module's own, and those that all objects of a class share."""
    found = find_lists(attributes_of(module))
    known = set(map(id, found.values()))
    # A search of its own, as each has a bound: tables in the body of a class must not hide lists of the module.
    for place, items in find_lists(held_by_classes(module)).items():
        if id(items) not in known:
            found[place] = items
    return found


@torch.no_grad()
def _nudge(module: torch.nn.Module, places: slice) -> None:
    """Changes the last bit of some numbers of each parameter, in place: there may be no room for another one."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            chosen = parameter.detach()
            for dim in reversed(range(parameter.dim())):
                if parameter.shape[dim] > 1:
                    chosen = chosen.transpose(0, dim)[places]
                    break
            # By arithmetic, as there is no nextafter for half precision.
            chosen.mul_(1 + torch.finfo(parameter.dtype).eps)
