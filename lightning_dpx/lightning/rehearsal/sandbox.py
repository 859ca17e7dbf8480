"""What the runs of a rehearsal may change outside of their shadows, and that it is put back.

opened   the whole rehearsal: loggers, callbacks, results, attributes of the trainer, gradients, flags of the process
  run      one run: random numbers, parameters, metrics of globals, settings of optimizers, the user's surroundings
    in_step  a replica's own step, or its backward: draws of all replicas are the same
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_dpx.lightning.lightning_api import Trainer
from lightning_dpx.lightning.lightning_compat import ResultCollection, active_loop
from lightning_dpx.lightning.metrics.metrics import KINDS, put_back, states_of
from lightning_dpx.lightning.optimizer_settings import SettingsSnapshot
from lightning_dpx.lightning.rehearsal.counting_logger import counting_logger
from lightning_dpx.lightning.rehearsal.outside_state import Attributes, Surroundings
from lightning_dpx.lightning.rehearsal.real_module import RealModule
from lightning_dpx.lightning.rehearsal.run_draws import RunDraws
from lightning_dpx.python_objects.preserve import advance, held_generators
from lightning_dpx.python_objects.process_settings import SettingsWatch
from lightning_dpx.python_objects.reachable import reachable
from lightning_dpx.replicas import GeneratorStates, Replica
from lightning_dpx.replicas.drawn_rows import DrawnRows
from lightning_dpx.replicas.same_draws import SharedParameters
from lightning_dpx.torch_compat import key_of


@dataclass(slots=True, kw_only=True)
class RunTrace:
    """What one run has done outside of its shadow.

    Attributes:
        draws: Its random numbers.
        written: Names of the parameters that it has written, or given other memory.
        logger_calls: Methods of loggers that it has called itself.
        changed_settings: Whether it has changed settings of optimizers.
    """

    draws: RunDraws
    written: list[str] = field(default_factory=list)
    logger_calls: list[str] = field(default_factory=list)
    changed_settings: bool = False


class Sandbox:
    """Keeps what several runs of a rehearsal may change, and puts it back.

    Args:
        trainer: Its attributes are put back, and those of its precision plugin and of what the user gave it.
        module: The real module.
        replicas: The real ones, whose parameters shadows share.
        devices: Those with random generators.

    Attributes:
        has_metrics: Whether the module leads to any.
        last: What the last run has done.
        switched: Settings of the process that the first run has changed, if only for a while.
        surroundings: What the user's code reaches beside the module.
        real_module: The module, where runs come to it past their shadow.
        sizes_of_draws: Rows of each slice, where rows of a slice draw each its own numbers; empty where all draw alike.
        rows_of_draws: Where rows lie in what is drawn, as far as it is known.
        parts_of_draws: Into how many parts the places of a row are divided there, if they can be.
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
        self.last: RunTrace = RunTrace(draws=RunDraws(self._start))
        self.surroundings: Surroundings = Surroundings(trainer, module)
        self.real_module: RealModule = RealModule(module, shared, self._shared)
        self._settings = SettingsSnapshot(trainer.optimizers, schedulers_of(trainer))
        self._module = module
        self._has_run = False
        self.switched: set[str] = set()
        self.sizes_of_draws: tuple[int, ...] = ()
        self.rows_of_draws: tuple[DrawnRows, ...] = ()
        self.parts_of_draws: int = 1

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
        # Shadows run in this process, whose flags the run has, too.
        flags = _Flags()
        results = None if holder is None else holder._results
        self.real_module.put_gradients_aside()
        try:
            # A step may reach for self.logger.experiment, which would write to the user's files.
            trainer.loggers = [counting_logger(logger, self._note_logger_call) for logger in trainer.loggers]
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
            # Last, as they have seen all that was put back.
            self.surroundings.restore_modes()

    @contextmanager
    def run(self, shadow: nn.Module, *, other_draws: bool = False) -> Iterator[None]:
        """One run of ``shadow``, from the same random numbers as every other, unless others are wanted."""
        self._start.restore()
        if other_draws:
            # After the common start, so that other numbers are the same
            # others in each process and run.
            advance([shadow])
        # Of this run alone: what the last one has done is compared by then.
        draws = RunDraws(self._states_now(shadow), self.sizes_of_draws, self.rows_of_draws, self.parts_of_draws)
        trace = RunTrace(draws=draws)
        self.last = trace
        # The dispatch mode sees writes by operators only, and none to metrics of globals, which are put back by state.
        places = _places_of(shadow)
        states = states_of(self._metrics_of_code)
        try:
            yield
        finally:
            put_back(states)
            # An assignment to .data gives a parameter other memory, which no operator writes.
            moved = [name for name, place in _places_of(shadow).items() if places.get(name, place) != place]
            trace.written = list(dict.fromkeys([*self._shared.written, *moved]))
            self.surroundings.restore()
            # After what module and surroundings share, which is no part of the module.
            self.real_module.restore()
            self._shared.restore()
            trace.changed_settings = not self._settings.is_current
            self._settings.restore()
            trace.draws.end()
            self._start.restore()
            self._has_run = True

    def draw_as_other_runs(self, shadow: nn.Module) -> None:
        """The steps of this run that are left draw the numbers of other runs, although it has begun with others."""
        self._start.restore()
        self.last.draws.start = self._states_now(shadow)

    def _note_logger_call(self, method: str) -> None:
        self.last.logger_calls.append(method)

    def _states_now(self, shadow: nn.Module) -> GeneratorStates:
        return GeneratorStates(self._devices, [shadow] if self._generators else ())

    @contextmanager
    def in_step(self, stage: str) -> Iterator[None]:
        """A replica's own step, or its backward; all replicas draw the same numbers."""
        # Once, as it looks at many places at every operator.
        watches = stage != "backward" and not self._has_run
        watch = SettingsWatch(self._module) if watches else None
        with self.last.draws.in_step(self._shared, stage), watch or nullcontext():
            yield
        if watch is not None:
            watch.look()
            self.switched |= watch.switched


def schedulers_of(trainer: Any) -> list[Any]:
    """All that change settings of the trainer's optimizers."""
    return [config.scheduler for config in trainer.strategy.lr_scheduler_configs]


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
