"""Shadows of a module and its replicas: they run the user's step and leave no trace.

A shadow shares the parameters of the real module, with gradients of its own, and holds deep copies of its Python state,
buffers and metrics. While it runs, the strategy and the trainer point at it; loggers are Lightning's dummy, callbacks
are not called, and whatever the step may have changed outside the shadow is put back.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_dpx.lightning.lightning_api import LightningModule, LightningOptimizer, Trainer
from lightning_dpx.lightning.lightning_compat import (
    ResultCollection,
    active_loop,
    optimizers_of,
    set_trainer,
    trainer_of,
    wrap_optimizer,
)
from lightning_dpx.lightning.manual.acts_once import unwrapped_optimizer
from lightning_dpx.lightning.metrics.metrics import KINDS, ReplicaMetrics, put_back, states_of
from lightning_dpx.lightning.optimizer_settings import SettingsSnapshot
from lightning_dpx.lightning.rehearsal.counting_logger import counting_logger
from lightning_dpx.lightning.rehearsal.outside_state import Attributes, Surroundings
from lightning_dpx.lightning.rehearsal.real_module import RealModule
from lightning_dpx.lightning.rehearsal.run_draws import RunDraws
from lightning_dpx.python_objects.preserve import advance, held_generators
from lightning_dpx.python_objects.process_settings import SettingsWatch
from lightning_dpx.python_objects.reachable import reachable
from lightning_dpx.replicas import BatchSlice, GeneratorStates, Replica, ReplicaSet
from lightning_dpx.replicas.batch_norm import batch_norms_by_slice
from lightning_dpx.replicas.copying.own_parameters import like_parameter
from lightning_dpx.replicas.same_draws import SharedParameters
from lightning_dpx.replicas.shared_iterators import guard_iterators, iterators_that_cannot_be_copied
from lightning_dpx.torch_compat import key_of, tree_map_only


class Sandbox:
    """Keeps what several runs of a rehearsal may change, and puts it back.

    Args:
        trainer: Its attributes are put back, and those of its precision plugin and of what the user gave it.
        module: The real module.
        replicas: The real ones, whose parameters shadows share.
        devices: Those with random generators.

    Attributes:
        has_metrics: Whether the module leads to any.
        draws: The random numbers of the last run.
        written: Names of the parameters that the last run has written, or given other memory.
        logger_calls: Methods of loggers that the last run has called itself.
        changed_settings: Whether the last run has changed settings of optimizers.
        switched: Settings of the process that the first run has changed, if only for a while.
        surroundings: What the user's code reaches beside the module.
        real_module: The module, where runs come to it past their shadow.
    """

    def __init__(
        self, trainer: Trainer, module: nn.Module, replicas: Sequence[Replica], devices: Sequence[torch.device]
    ) -> None:
        self._trainer = trainer
        # By the names of the user's module, which the replicas' lists of parameters follow.
        names = [name for name, _ in module.named_parameters()]
        shared: list[tuple[str, nn.Parameter]] = []
        for replica in replicas:
            shared += zip(names, replica.parameters, strict=True)
        # Of all replicas: shadows of each share the parameters of the replica on their device.
        self._shared = SharedParameters(shared, list(module.named_buffers()))
        self._devices = devices
        # To look for either walks all that the module leads to. Shadows are copies, so where it leads to none, they do
        # not either.
        self._generators = held_generators([module])
        metrics = reachable(module, KINDS)
        self.has_metrics = bool(metrics)
        held = {id(metric) for _, metric in reachable(module, KINDS, follow_code=False)} if metrics else set()
        # Globals, which shadows have in common with the module.
        self._metrics_of_code = [metric for _, metric in metrics if id(metric) not in held]
        self._start = GeneratorStates(self._devices, generators=self._generators)
        self.draws: RunDraws = RunDraws(self._start)
        self.surroundings: Surroundings = Surroundings(trainer, module)
        self.real_module: RealModule = RealModule(module, shared, self._shared)
        self._settings = SettingsSnapshot(trainer.optimizers, schedulers_of(trainer))
        self.changed_settings: bool = False
        self.logger_calls: list[str] = []
        self.written: list[str] = []
        self._module = module
        self._has_run = False
        self.switched: set[str] = set()

    @property
    def logged_elsewhere(self) -> list[str]:
        """What steps of this rehearsal have logged past the log that records them."""
        holder = _holder_of_results(self._trainer)
        if holder is None or holder._results is None:
            return []
        return list(dict.fromkeys(result.meta.name for result in holder._results.values()))

    @contextmanager
    def opened(self, *, calls_hooks: bool) -> Iterator[None]:
        """The whole rehearsal happens in here.

        Args:
            calls_hooks: The step runs optimizers, around which the trainer would call callbacks.
        """
        trainer: Any = self._trainer
        precision = getattr(trainer.precision_plugin, "wrapped", None)  # a user's own may count what it does
        # Before anything is exchanged below, so that their restoring puts it all back.
        attributes = [Attributes(owner) for owner in (trainer, precision) if owner is not None]
        holder = _holder_of_results(trainer)
        flags = _Flags()
        results = None if holder is None else holder._results
        self.real_module.put_gradients_aside()
        try:
            # A step may reach for self.logger.experiment, which would write to the user's files.
            trainer.loggers = [counting_logger(logger, self.logger_calls) for logger in trainer.loggers]
            # Lightning calls on_before_backward and on_before_optimizer_step of all
            # callbacks in such a step.
            if calls_hooks:
                trainer.callbacks = []
            if holder is not None:  # submodules that log by themselves
                holder._results = ResultCollection(training=trainer.training)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the step itself gives the same ones
                yield
        finally:
            if holder is not None:
                holder._results = results
            for before in attributes:
                before.restore()
            self.real_module.give_gradients_back()
            flags.restore()
            self._shared.restore()
            self._start.restore()

    @contextmanager
    def run(self, shadow: nn.Module, *, other_draws: bool = False) -> Iterator[None]:
        """One run of ``shadow``, from the same random numbers as every other, unless others are wanted."""
        self.logger_calls.clear()
        self._start.restore()
        if other_draws:
            # After the common start, so that other numbers are the same
            # others in each process and run.
            advance([shadow])
        self.draws = RunDraws(self._states_now(shadow))
        # The dispatch mode sees writes by operators only.
        places = _places_of(shadow)
        states = states_of(self._metrics_of_code)
        try:
            yield
        finally:
            put_back(states)
            # An assignment to .data gives a parameter other memory, which no operator writes.
            moved = [name for name, place in _places_of(shadow).items() if places.get(name, place) != place]
            self.written = list(dict.fromkeys([*self._shared.written, *moved]))
            self.surroundings.restore()
            # After what module and surroundings share, which is no part of the module.
            self.real_module.restore()
            self._shared.restore()
            self.changed_settings = not self._settings.is_current
            self._settings.restore()
            self.draws.end()
            self._start.restore()
            self._has_run = True

    def draw_as_other_runs(self, shadow: nn.Module) -> None:
        """The steps of this run that are left draw the numbers of other runs, although it has begun with others."""
        self._start.restore()
        self.draws.start = self._states_now(shadow)

    def _states_now(self, shadow: nn.Module) -> GeneratorStates:
        return GeneratorStates(self._devices, [shadow] if self._generators else ())

    @contextmanager
    def in_step(self, stage: str) -> Iterator[None]:
        """A replica's own step, or its backward; all replicas draw the same numbers."""
        # Once, as it looks at many places at every operator.
        watches = stage != "backward" and not self._has_run
        watch = SettingsWatch(self._module) if watches else None
        with self.draws.in_step(self._shared, stage), watch or nullcontext():
            yield
        if watch is not None:
            watch.look()
            self.switched |= watch.switched


def schedulers_of(trainer: Any) -> list[Any]:
    """All that change settings of the trainer's optimizers."""
    return [config.scheduler for config in trainer.strategy.lr_scheduler_configs]


class ShadowReplicas(ReplicaSet):
    """Replicas of a shadow, whose steps run in the sandbox.

    Attributes:
        sandbox: Set right after they are made.
        metrics: The metrics of the shadow, which its replicas share.
        saves_on_host: Whether what backward needs waits on the host.
    """

    sandbox: Sandbox
    metrics: ReplicaMetrics
    saves_on_host = False

    def run(self, stage: str, slices: Sequence[BatchSlice], call: Callable[[BatchSlice], Any]) -> list[Any]:
        """Runs a stage as all replicas do, in the sandbox."""

        def watched(batch_slice: BatchSlice) -> Any:
            with self.sandbox.in_step(stage), save_on_cpu() if self.saves_on_host else nullcontext():
                return call(batch_slice)

        return super().run(stage, slices, watched)


def _places_of(module: nn.Module) -> dict[str, int]:
    """Where the parameters lie in memory, by name; without those that have no memory yet."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if not is_lazy(parameter)]
    plain = [(name, parameter) for name, parameter in named if parameter.layout == torch.strided]
    return {name: key_of(parameter.untyped_storage()) for name, parameter in plain}


class _Flags:
    """Settings of the process that a step may change."""

    def __init__(self) -> None:
        self._dtype = torch.get_default_dtype()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self._grad = torch.is_grad_enabled()
        self._benchmark = torch.backends.cudnn.benchmark
        self._threads = torch.get_num_threads()

    def restore(self) -> None:
        torch.set_default_dtype(self._dtype)
        torch.use_deterministic_algorithms(self._deterministic, warn_only=self._warn_only)
        if torch.is_grad_enabled() != self._grad:
            torch.set_grad_enabled(self._grad)
        torch.backends.cudnn.benchmark = self._benchmark
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)


def _holder_of_results(trainer: Any) -> Any:
    """The loop that keeps what the current stage logs; ``None`` where nothing can be logged."""
    loop = trainer.fit_loop.epoch_loop if trainer.training else active_loop(trainer)
    if loop is not None and "_results" in vars(loop):
        return loop
    return None


def make_shadow(
    replicas: ReplicaSet, requested: list[str], *, own_parameters: bool
) -> tuple[LightningModule, list[str]]:
    """A shadow of the real module, and the names of its batch norms that normalize by their slice.

    Those run in eval mode on both sides of a comparison; else everything behind them would differ by design.

    Args:
        replicas: The real ones.
        requested: Gets the paths of iterators that cannot be copied, if the shadow takes an item of one.
        own_parameters: The step will write them, as manual optimization does.

    Raises:
        ReplicationError: something cannot be copied; names the attribute.
    """
    iterators = iterators_that_cannot_be_copied(replicas.root.module)
    shadow: Any = replicas.make_shadow_module(keep=iterators)
    guard_iterators(shadow, iterators, requested)
    set_trainer(shadow, trainer_of(replicas.root.module))  # LightningModule drops it from its copies
    if own_parameters:
        # Memory of its own: its optimizers really write it.
        for parameter in shadow.parameters():
            parameter.data = parameter.data.clone()
    norms = batch_norms_by_slice(shadow)
    for name in norms:
        norm = shadow.get_submodule(name)
        # Without running statistics batch norm normalizes by its slice in either mode.
        norm.training = norm.running_mean is None
    return shadow, norms


def shared_parameters(replicas: ReplicaSet, shadow: nn.Module) -> list[dict[str, nn.Parameter]]:
    """For every device's replica of a shadow, parameters that share the storage of the real one's."""
    named = list(shadow.named_parameters())
    shared = []
    for replica in replicas.primaries:
        parameters: dict[str, nn.Parameter] = {}
        for (name, own), real in zip(named, replica.parameters, strict=True):
            # By like_parameter, which keeps hooks of the user and flags, and
            # gives a gradient of its own.
            parameters[name] = like_parameter(own, real.detach())
        shared.append(parameters)
    return shared


def pointing_at_shadow(strategy: Any, shadow: nn.Module) -> dict[str, Any]:
    """The attributes by which a strategy, and through it the trainer, has ``shadow`` for its module, on one device."""
    attributes: dict[str, Any] = {"_lightning_module": shadow, "_model": shadow}
    # ActivationPlanner profiles steps by hand under other strategies, which know no sessions.
    if "ranks" in vars(strategy):  # a strategy of ours
        attributes |= {"session": strategy.one_device, "ranks": strategy.ranks.of_shadow(1)}
    # Only what the strategy has set itself: other strategies may not have both.
    return {name: value for name, value in attributes.items() if name in vars(strategy)}


def with_copied_optimizers(
    strategy: Any,
    module: nn.Module,
    shadows: Sequence[nn.Module],
    owners: Sequence[torch.Tensor],
    mine: Sequence[Any] = (),
) -> dict[str, Any]:
    """The attributes by which a strategy has copies of its optimizers, schedulers and precision, for a shadow.

    Optimizers and schedulers that the shadow holds as attributes are exchanged for copies as well.

    Args:
        strategy: Any of Lightning's.
        module: The real module.
        shadows: What stands in for it, and the replicas of that.
        owners: What the real optimizers hold, for each parameter of the module.
        mine: What the copies shall hold; the parameters of the shadow unless given.
    """
    shadow: Any = shadows[0]
    mine = mine or list(shadow.parameters())
    # The Trainer stands for itself, or a scheduler that leads to it would copy the run.
    pairs = [*zip(owners, mine, strict=True), (module, shadow), (shadow.trainer, shadow.trainer)]
    configured = list(optimizers_of(strategy))
    configs = list(strategy.lr_scheduler_configs)
    children = list(chain.from_iterable(each.modules() for each in shadows))
    held: list[Any] = []
    for child in children:
        for _, value in attributes_stepped_in(child):
            held += _stepped_among(value)
    # One optimizer is often held twice, and as Lightning's wrapper and as itself: it must stay one.
    distinct: dict[int, Any] = {}
    for one in (*configured, *held):
        unwrapped = unwrapped_optimizer(one)
        distinct.setdefault(id(unwrapped), unwrapped)
    real = list(distinct.values())
    optimizers = [one for one in real if isinstance(one, Optimizer)]
    schedulers = [one for one in real if isinstance(one, LRScheduler)]
    # All in one call: they share a memo, so that a scheduler finds the copy of its own optimizer.
    copies, others = copy_optimizers(optimizers, [*configs, *schedulers], pairs)
    counterparts = dict(zip(map(id, [*optimizers, *schedulers]), [*copies, *others[len(configs) :]], strict=True))
    chosen = [counterparts[id(unwrapped_optimizer(one))] for one in configured]
    wrapped = [wrap_optimizer(one, strategy) for one in chosen]
    for one in held:
        if isinstance(one, LightningOptimizer):
            counterparts[id(one)] = wrap_optimizer(counterparts[id(unwrapped_optimizer(one))], strategy)
    for child in children:
        _exchange(vars(child), counterparts)
    # A scaler in the wrapped plugin changes its scale in every step.
    precision = copy.copy(strategy.precision_plugin)
    if "wrapped" in vars(precision):
        precision.wrapped = copy.deepcopy(precision.wrapped)
    return {
        "_optimizers": chosen,
        "_lightning_optimizers": wrapped,
        "lr_scheduler_configs": others[: len(configs)],
        "_precision_plugin": precision,
    }


def attributes_stepped_in(child: nn.Module) -> list[tuple[str, Any]]:
    """The attributes that are an optimizer or a scheduler, or a list, tuple or dict with one in it."""
    return [(key, value) for key, value in vars(child).items() if _stepped_among(value)]


def _stepped_among(value: Any) -> list[Any]:
    items: Iterable[Any] = (value,)
    if type(value) in (list, tuple):
        items = value
    elif type(value) is dict:
        items = value.values()
    return [item for item in items if isinstance(item, Optimizer | LRScheduler)]


def _exchange(attributes: dict[str, Any], counterparts: Mapping[int, Any]) -> None:
    """Puts the counterparts of objects in their place, also in the lists, tuples and dicts among ``attributes``."""
    for key, value in list(attributes.items()):
        if id(value) in counterparts:
            attributes[key] = counterparts[id(value)]
        # In place, as other attributes may name the same list; a tuple cannot be written.
        elif type(value) is list and any(id(one) in counterparts for one in value):
            value[:] = [counterparts.get(id(one), one) for one in value]
        elif type(value) is tuple and any(id(one) in counterparts for one in value):
            attributes[key] = tuple(counterparts.get(id(one), one) for one in value)
        elif type(value) is dict and any(id(one) in counterparts for one in value.values()):
            value.update({name: counterparts.get(id(one), one) for name, one in value.items()})


def copy_optimizers(
    optimizers: Sequence[Any], schedulers: Sequence[Any], counterparts: Sequence[tuple[Any, Any]]
) -> tuple[list[Any], list[Any]]:
    """Optimizers and the configurations of their schedulers, over other parameters.

    Args:
        optimizers: The real ones.
        schedulers: Configurations, as the strategy holds them.
        counterparts: Pairs of a real object (a parameter, the module) and what takes its place.
    """
    memo: dict[int, Any] = {id(real): other for real, other in counterparts}
    copied = []
    for optimizer in optimizers:
        # Not by copy.deepcopy: an optimizer hands out only its state and its groups, without the attributes of a
        # subclass; and a scheduler has put a ``step`` on the instance that is bound to the original.
        kind: type[Any] = type(optimizer)
        duplicate: Any = object.__new__(kind)
        memo[id(optimizer)] = duplicate
        copied.append(duplicate)
    for optimizer, duplicate in zip(optimizers, copied, strict=True):
        for key, value in vars(optimizer).items():
            if key != "step":
                # Hooks may be bound to anything, and to copy that would copy it along.
                vars(duplicate)[key] = copy.copy(value) if key.endswith("_hooks") else copy.deepcopy(value, memo)
        _follow_parameters(duplicate, optimizer)
    return copied, copy.deepcopy(list(schedulers), memo)


def _follow_parameters(copied: Any, original: Any) -> None:
    """The state of each parameter lives where it does: the copy of one may be on another device than its owner."""
    for owner, parameter in zip(original.state, copied.state, strict=True):
        if isinstance(owner, torch.Tensor) and owner.device != parameter.device:
            move = partial(_moved, source=owner.device, target=parameter.device)
            copied.state[parameter] = tree_map_only(torch.Tensor, move, copied.state[parameter])


def _moved(tensor: torch.Tensor, source: torch.device, target: torch.device) -> torch.Tensor:
    if tensor.device == source:
        return tensor.to(target)
    return tensor
