"""A step on a shadow of the user's module: how the strategy runs it there, and what is seen of it."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from itertools import chain
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_dpx.devices import free_garbage
from lightning_dpx.errors import ReplicationError
from lightning_dpx.lightning.batch_writes.batch_writes import BatchWrites, unlike_one_batch
from lightning_dpx.lightning.gradient_hooks import GradientHooks, has_hooks
from lightning_dpx.lightning.lightning_api import pl
from lightning_dpx.lightning.lightning_compat import set_trainer, trainer_of
from lightning_dpx.lightning.logging import StepLog
from lightning_dpx.lightning.metrics.metrics import ReplicaMetrics
from lightning_dpx.lightning.new_replicas import new_replicas
from lightning_dpx.lightning.optimizer_settings import plain_settings
from lightning_dpx.lightning.rehearsal.comparison.judging_rules import JudgingRules
from lightning_dpx.lightning.rehearsal.comparison.observation import (
    LEFT,
    Logged,
    Observation,
    SeenDraws,
    attributes_of,
    host_copy,
    python_state,
    state_of_hooks,
    state_outside,
)
from lightning_dpx.lightning.rehearsal.comparison.relations import Relations
from lightning_dpx.lightning.rehearsal.hook_reads import HookNames
from lightning_dpx.lightning.rehearsal.optimizer_copies import with_copied_optimizers
from lightning_dpx.lightning.rehearsal.outcome import Call, NotRehearsed, SlicesFail
from lightning_dpx.lightning.rehearsal.sandbox import Sandbox
from lightning_dpx.lightning.rehearsal.shadow import ShadowReplicas, make_shadow, pointing_at_shadow
from lightning_dpx.lightning.run import step_context
from lightning_dpx.python_objects.overrides import overridden
from lightning_dpx.python_objects.process_settings import gpus_compute_in_tf32
from lightning_dpx.replicas import MergeRules, ReplicaSet, first_loss
from lightning_dpx.replicas.merging.tolerance import Tolerance
from lightning_dpx.step import TrainingStep
from lightning_dpx.torch_compat import post_accumulate_hooks_of, tree_leaves

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session
    from lightning_dpx.lightning.strategy import DPXStrategy

P = ParamSpec("P")
T = TypeVar("T")
_Run = TypeVar("_Run", bound="_OnShadow")

# A step may compute in these, whatever its parameters are of: by autocast, or as losses of 32 bits behind float64.
_ROUNDING = (torch.float16, torch.bfloat16, torch.float32)


class _OnShadow(Protocol):
    """Runs a step on a shadow."""

    step: "ShadowStep"


class ShadowStep:
    """A step of the trainer that runs on shadows; what its runs, as one device and in slices, have in common.

    Args:
        strategy: Whose step it is.
        call: What the trainer called.
        requested: Gets the iterators that were asked for an item, though it could not be given back.

    Attributes:
        module: The user's own.
        trains: Whether it is a training step.
        by_hand: Whether its optimizers step inside of it.
        sandbox: Puts back what the runs change.
        norms: Batch norms that normalize by their slice.
        tolerance: How far two runs may be apart.
        changes_settings: Whether a run as one device has changed settings of optimizers, or of the process.
        saves_on_host: Whether what backward needs waits on the host from here on.
        trains_norms: Whether these run as in the step; else in eval mode, so that the rest can be compared.
        ahead: By how much counts of shadows begin further on than the module's, by path.
        hook_names: What hooks read after the step.
        moves_on: By how much the index of the batch is further on, for each step of a run; no further unless given.
    """

    def __init__(self, strategy: "DPXStrategy", call: Call, requested: list[str]) -> None:
        self.strategy = strategy
        self.call = call
        self.session: Session = strategy.replicated_session
        self.replicas: ReplicaSet = self.session.replicas
        module: pl.LightningModule = self.session.module
        self.module: pl.LightningModule = module
        self._requested = requested
        self.trains: bool = call.name == "training_step"
        self.by_hand: bool = self.trains and not module.automatic_optimization
        self.sandbox: Sandbox = Sandbox(module.trainer, module, self.replicas.replicas, self.replicas.devices)
        self.norms: list[str] = []
        self.trains_norms = False
        self.ahead: dict[str, float] = {}
        self.moves_on: tuple[int, ...] = ()
        self.hook_names: HookNames = HookNames(module, call.name)
        self.changes_settings = False
        self.saves_on_host = False
        self.tolerance: Tolerance = _tolerance_of(strategy, module, call)

    def args_of(self, number: int) -> tuple[Any, ...]:
        """What the trainer calls a step with, of a run that has done ``number`` steps before it."""
        batch, *rest = self.call.args
        # The index of a batch is the first of them; of an iterator over batches there is none.
        if rest and isinstance(rest[0], int) and number < len(self.moves_on):
            rest[0] += self.moves_on[number]
        return batch, *rest

    def adopt_precision(self) -> None:
        """Takes the tolerance from the dtypes that a run has shown the step to compute in."""
        # Autocast inside of the step, or a loss in other digits, shows only when operators run.
        seen = self.sandbox.last.draws.dtypes.intersection(_ROUNDING)
        self.tolerance = _tolerance_of(self.strategy, self.module, self.call, seen)

    def make_shadow(self, *, own_parameters: bool = False) -> Any:
        """A shadow module of the user's.

        Args:
            own_parameters: Whether something else than a step by hand will write them.

        Raises:
            NotRehearsed: none can be made.
        """
        try:
            shadow, self.norms = make_shadow(
                self.replicas, self._requested, own_parameters=own_parameters or self.by_hand
            )
        except ReplicationError as error:
            # The advice in the error is about replicas; without a rehearsal the
            # step trains all the same.
            raise NotRehearsed(str(error).partition(". Remove the attribute")[0] + ".") from None
        self.sandbox.real_module.forget_copying()
        if self.trains_norms:
            for name in self.norms:
                shadow.get_submodule(name).training = True
        for path, number in self.ahead.items():
            owner, _, name = path.rpartition(".")
            holder = shadow.get_submodule(owner)
            setattr(holder, name, getattr(holder, name, 0) + number)  # a first step may make it
        return shadow

    def replicas_of(self, shadow: Any, devices: list[torch.device], **changes: Any) -> ShadowReplicas:
        """Replicas of a shadow, which run in the sandbox."""
        # A rehearsal is of this process alone, and ends long before replicas could drift apart.
        options = {"beyond": None, "check_every": 0, **changes}
        metrics = ReplicaMetrics(shadow, number=self.strategy.options.number_rule, searches=self.sandbox.has_metrics)
        replicas = new_replicas(self.strategy, shadow, devices, metrics, ShadowReplicas, **options)
        assert isinstance(replicas, ShadowReplicas), "that kind was requested for"
        replicas.metrics = metrics
        metrics.dim = replicas.output_dim
        metrics.modules = replicas.root.modules
        replicas.sandbox = self.sandbox
        replicas.saves_on_host = self.saves_on_host
        # The first replica is the shadow itself, which has its Trainer.
        for replica in replicas.replicas[1:]:
            copied: Any = replica.module
            set_trainer(copied, trainer_of(shadow))  # LightningModule drops it from its copies
        return replicas

    @contextmanager
    def pointing_at(
        self,
        shadow: Any,
        session: "Session | None",
        judge: JudgingRules | None,
        optimizers: Mapping[str, Any],
    ) -> Iterator[None]:
        """The strategy, and through it the trainer, has the shadow for its module for a while.

        Args:
            shadow: Stands in for the user's module.
            session: Of its replicas; ``None`` as on one device.
            judge: Finds out how results are merged.
            optimizers: Those of the shadow, as ``optimizers_for`` gives them.
        """
        strategy = self.strategy
        attributes = pointing_at_shadow(strategy, shadow)
        if session is not None:
            # A step that asks for its rank or gathers meets the replicas of the
            # shadow, not the real ones.
            attributes |= {"session": session, "ranks": strategy.ranks.of_shadow(len(session.replicas.replicas))}
        attributes |= optimizers
        if self.by_hand and session is not None:
            session.gradient_hooks = GradientHooks()
            session.gradient_hooks.begin(shadow, session.replicas, session.step)
        with overridden(strategy, **attributes), strategy.verification.judged_by(self.call, judge):
            yield

    def optimizers_for(self, shadow: Any, session: "Session | None", seen: Observation) -> dict[str, Any]:
        """Copies of the optimizers and schedulers, which act on the shadow in all steps of a run; none but by hand.

        Args:
            shadow: Stands in for the user's module.
            session: Of its replicas; ``None`` as on one device.
            seen: Gets the gradients that optimizers are given.

        Returns:
            What the strategy has of them, by the names of its attributes.
        """
        if not self.by_hand:
            return {}
        strategy = self.strategy
        mine = list(shadow.parameters()) if session is None else session.step.owner_parameters
        modules = [shadow] if session is None else [replica.module for replica in session.replicas.replicas]
        owners = self.session.step.owner_parameters
        copies = with_copied_optimizers(strategy, self.module, modules, owners, mine)
        # Optimizers hold owners, which may be on other devices than the shadow's own parameters.
        names = {id(own): name for (name, _), own in zip(shadow.named_parameters(), mine, strict=True)}

        def note(optimizer: Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = names.get(id(parameter))
                    if name is not None and parameter.grad is not None:
                        # A step by hand may step several times, and each of them
                        # is compared with its like.
                        number = sum(key.partition("@")[0] == name for key in seen.gradients)
                        seen.gradients[f"{name}@{number}"] = host_copy(parameter.grad)

        for optimizer in copies["_optimizers"]:
            # Before a step, as a step by hand often zeroes its gradients right after it.
            _call_before_steps(optimizer, note)
        return copies

    def context(self) -> Any:
        """The context of the precision plugin around a step."""
        return step_context(self.strategy.precision_plugin, self.call.name)

    def finish(
        self, seen: Observation, final: Any, shadow: Any, owners: list[Any], step: TrainingStep | None = None
    ) -> None:
        """Backward, and then all that can be seen of the run."""
        names = [name for name, _ in shadow.named_parameters()]
        if self.by_hand:
            seen.weights = {name: host_copy(one) for name, one in zip(names, owners, strict=True)}
            _note_left(seen.gradients, zip(names, owners, strict=True))
        elif self.trains:
            loss = first_loss(final)
            if isinstance(loss, torch.Tensor):
                forget_gradients(owners)  # Lightning zeroes them between a step and its backward
                if loss.requires_grad:
                    # One of the user's own may look at buffers, as in the run.
                    if step is not None and has_hooks(self.module, (), ["backward"]):
                        step.show_buffers()
                    # A backward may draw as well: a recomputed dropout, or a hook of the user's.
                    # One of the user's own is called once for the whole batch, and logs as on one device.
                    with self.sandbox.in_step("backward"), overridden(shadow, log=_unheard):
                        shadow.backward(loss)
                    if step is not None:
                        step.backward(last=True)
                        # Summed as in the run, so that what is compared has passed through the
                        # strategy's own reduction.
                        step.reduce()
                elif step is not None:
                    step.end_without_backward()
                seen.loss = loss.detach().cpu()
            seen.keeps_graph = any(one.grad is not None and one.grad.requires_grad for one in owners)
            seen.gradients = {
                name: host_copy(one.grad) for name, one in zip(names, owners, strict=True) if one.grad is not None
            }
        seen.state = self.state(shadow)
        seen.logger_calls = list(self.sandbox.last.logger_calls)

    def state(self, shadow: Any) -> dict[str, Any]:
        """Python state and buffers of a shadow, and what its code reaches outside of it."""
        # A shadow has copies of what its hooks keep, where nothing else leads.
        outside = chain(self.sandbox.surroundings.values(), self._settings(), state_of_hooks(shadow))
        return {**python_state(attributes_of(shadow)), **state_outside(outside)}

    def kept_apart(self, modules: Sequence[Any]) -> set[str]:
        """Paths of what hooks of some replicas keep otherwise than those of the first one, each for itself."""
        first, *others = (state_outside(state_of_hooks(module)) for module in modules)
        relations = Relations(self.tolerance)
        found: set[str] = set()
        for other in others:
            found.update(path for path in first.keys() & other.keys() if not relations.same(first[path], other[path]))
        return found

    def _settings(self) -> Iterable[tuple[str, Any]]:
        """The settings of optimizers that steps share; steps by hand have copies of theirs."""
        if self.by_hand:
            return ()
        strategy = self.strategy
        return plain_settings(strategy.optimizers, [config.scheduler for config in strategy.lr_scheduler_configs])

    def leave_gradients(self, owners: Iterable[torch.Tensor]) -> None:
        """Gives owners gradients, as a step before would have left them; any numbers will do."""
        for parameter in owners if self.trains else ():
            # A step by hand begins without them, and so do more steps of it, but for hooks of parameters that see what
            # has been added up: what these do to it is another thing than what they do to the sum of slices.
            if not self.by_hand or post_accumulate_hooks_of(parameter):
                parameter.grad = self._earlier_gradient(parameter) if parameter.requires_grad else None

    def _earlier_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        # Not zeros: to read zeros may make no difference where real gradients would.
        if torch.is_grad_enabled():
            return parameter.detach() + 0.01
        # No backward adds to it. One number for all elements takes no memory, of which a budget leaves none: the real
        # gradients are there as well. A step that writes it in place fails, and is not looked at without a graph.
        return parameter.new_full((), 0.01).expand_as(parameter)

    def watch_batch(self, rows: Any) -> BatchWrites:
        """Sees what the next run writes into its batch, if hooks of the real run look at that."""
        writes = BatchWrites()
        # To look for writes takes time that is lost where no hook would read them.
        if self.session.batches.writes.is_watched:
            writes.show(rows)
        return writes

    def note_writes(self, writes: BatchWrites, replicas: ReplicaSet, rules: MergeRules, seen: Observation) -> None:
        """Notes what a step wrote into its batch, to be compared as a logged value is.

        Raises:
            SlicesFail: it cannot be put together.
        """
        problem = writes.finish(rules, self.strategy.root_device, replicas.output_dim)
        if problem is not None:
            # Hooks that see the whole batch would find what slices wrote, and
            # it does not make one batch.
            raise SlicesFail(*unlike_one_batch(problem))
        for name, value in writes.values.items():
            seen.logged[name] = Logged(value=value, reduce_fx="mean", batch_size=None)

    def note_draws(self, seen: Observation) -> None:
        """Notes the random numbers that the last run drew."""
        draws = self.sandbox.last.draws
        seen.draws = SeenDraws(
            drew=draws.drew,
            per_row=draws.by_step,
            shapes=draws.shapes_by_step,
            places=draws.places_by_step,
            of_steps=draws.of_steps,
            left_alone=draws.left_alone,
        )


def frees_shadows(run: Callable[Concatenate[_Run, P], T]) -> Callable[Concatenate[_Run, P], T]:
    """``run``, after which nothing is left of its shadows where memory is planned.

    They and their replicas are in reference cycles, and hold copies of buffers; of a step by hand also of parameters
    and of what optimizers keep. Of ten runs of a rehearsal there would be ten, until somebody searches for them.
    """

    @wraps(run)
    def freed(runner: _Run, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return run(runner, *args, **kwargs)
        finally:
            if runner.step.strategy.plans_memory:
                free_garbage()

    return freed


def forget_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Drops gradients now: a shadow is in reference cycles, and may live on for a while."""
    for parameter in parameters:
        parameter.grad = None


def recording(log: StepLog, shadow: Any) -> AbstractContextManager[None]:
    """Records what is logged for the whole batch; replicas record their own in their steps."""

    def record(*args: Any, **options: Any) -> None:
        log.record(*args, **options)

    return overridden(shadow, log=record)


def _unheard(*args: Any, **options: Any) -> None:
    """Takes the place of a log that is no part of what is compared."""


def logged_value(value: Any, options: Mapping[str, Any]) -> Logged:
    """A value as it was logged; those of metrics are compared by their states."""
    reduce_fx = options.get("reduce_fx", "mean")
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    whole = None if isinstance(value, Metric) else value
    return Logged(value=whole, reduce_fx=name, batch_size=options.get("batch_size"))


def _tolerance_of(
    strategy: "DPXStrategy", module: pl.LightningModule, call: Call, seen: Iterable[torch.dtype] = ()
) -> Tolerance:
    """By the coarsest dtype that the step computes in, or that gradients travel in."""
    dtypes = [parameter.dtype for parameter in module.parameters() if parameter.dtype.is_floating_point]
    dtypes.append(torch.float32 if not dtypes else dtypes[0])
    dtypes.extend(seen)
    # Gradients in fewer digits on the way differ from those of one device by that rounding.
    if strategy.options.wire_dtype is not None:
        dtypes.append(strategy.options.wire_dtype)
    context = copy.copy(strategy.dpx_precision.wrapped).train_step_context()  # a user's own may count its calls
    kind = strategy.root_device.type
    with context:
        # Asked inside of the context, as a precision plugin may be any class that enters autocast.
        if torch.is_autocast_enabled(kind):
            dtypes.append(torch.get_autocast_dtype(kind))
    eps = {dtype: torch.finfo(dtype).eps for dtype in dtypes}
    coarsest = max(eps, key=lambda dtype: eps[dtype])
    if kind == "cuda" and coarsest == torch.float32 and gpus_compute_in_tf32():
        coarsest = torch.float16  # ten bits of mantissa, as TF32
    # Rounding grows with how many numbers are added up, of which the largest tensor is a bound.
    numbers = [leaf.numel() for leaf in tree_leaves(call.args[0]) if isinstance(leaf, torch.Tensor)]
    largest = max((parameter.numel() for parameter in module.parameters()), default=1)
    return Tolerance.of(coarsest, max([largest, *numbers]))


def _note_left(gradients: dict[str, torch.Tensor], owners: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Notes the gradients that a step by hand leaves to later ones, but for those that an optimizer was given.

    Of a window of many batches only the last one has a step, and no rehearsal may ever see that one.
    """
    noted: dict[str, list[torch.Tensor]] = {}
    for key, gradient in gradients.items():
        noted.setdefault(key.rpartition("@")[0], []).append(gradient)
    for name, parameter in owners:
        if parameter.grad is None:
            continue
        left = host_copy(parameter.grad)
        if not any(torch.equal(left, known) for known in noted.get(name, ())):
            gradients[f"{name}{LEFT}"] = left


def _call_before_steps(optimizer: Any, note: Callable[..., None]) -> None:
    """``note`` is called before each step of ``optimizer``, or of what that wraps."""
    try:
        optimizer.register_step_pre_hook(note)
    except AttributeError:  # a wrapper that has not called the constructor of Optimizer calls no hooks
        for held in vars(optimizer).values():
            if isinstance(held, Optimizer):
                _call_before_steps(held, note)
