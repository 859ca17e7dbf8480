"""Shadows of a module and its replicas: they run the user's step and leave no trace.

A shadow shares the parameters of the real module, with gradients of its own, and holds deep copies of its Python state,
buffers and metrics. While it runs, the strategy and the trainer point at it; loggers are Lightning's dummy, callbacks
are not called, and whatever the step may have changed outside the shadow is put back.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_dpx.python_objects.preserve import advance
from lightning_dpx.replicas import GeneratorStates, ReplicaSet, Share
from lightning_dpx.replicas.batch_norm import SyncedBatchNorm
from lightning_dpx.replicas.replicate import _like
from lightning_dpx.replicas.same_draws import SameDraws, SharedParameters
from lightning_dpx.trainer.metrics import ReplicaMetrics
from lightning_dpx.trainer.surroundings import Attributes, Surroundings


class Guest:
    """Keeps what several runs of a rehearsal may change, and puts it back.

    Args:
        trainer: Its attributes are put back, and those of its precision plugin and of what the user gave it.
        module: The real module.
        replicas: The real replicas.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, replicas: ReplicaSet) -> None:
        self._trainer = trainer
        names = [name for name, _ in module.named_parameters()]
        self._shared = SharedParameters(
            (name, parameter)
            for replica in replicas.replicas
            for name, parameter in zip(names, replica.parameters, strict=True)
        )
        self._devices = replicas.devices
        self._start = GeneratorStates(self._devices, [module])
        self._run_start = self._start
        self._modes: list[SameDraws] = []
        self.surroundings = Surroundings(trainer, module)

    @contextmanager
    def visit(self, *, calls_hooks: bool) -> Iterator[None]:
        """The whole rehearsal happens in here.

        Args:
            calls_hooks: The step runs optimizers, around which the trainer would call callbacks.
        """
        trainer: Any = self._trainer
        precision = getattr(trainer.precision_plugin, "wrapped", None)  # a user's own may count what it does
        attributes = [Attributes(owner) for owner in (trainer, precision) if owner is not None]
        holder, flags = _holder_of_results(trainer), _Flags()
        results = None if holder is None else holder._results
        try:
            trainer.loggers = [DummyLogger() for _ in trainer.loggers]
            if calls_hooks:
                trainer.callbacks = []
            if holder is not None:  # submodules that log by themselves
                holder._results = _ResultCollection(training=trainer.training)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the step itself gives the same ones
                yield
        finally:
            if holder is not None:
                holder._results = results
            for before in attributes:
                before.restore()
            flags.restore()
            self._shared.restore()
            self._start.restore()

    @contextmanager
    def run(self, shadow: nn.Module, *, other_draws: bool = False) -> Iterator[None]:
        """One run of ``shadow``, from the same random numbers as every other, unless others are wanted."""
        self._modes = []
        self._start.restore()
        if other_draws:
            advance([shadow])
        self._run_start = GeneratorStates(self._devices, [shadow])
        try:
            yield
        finally:
            self.written = list(dict.fromkeys(self._shared.written))
            self._shared.restore()
            self.surroundings.restore()
            now = GeneratorStates(self._devices, [shadow])
            left_alone = [name for mode in self._modes for name in mode.left_alone]
            if now.differs_outside_torch(self._run_start):
                left_alone.append("a generator of Python or NumPy")
            self.left_alone = list(dict.fromkeys(left_alone))
            self.drew = any(mode.drew for mode in self._modes)
            self.low_precision = {dtype for mode in self._modes for dtype in mode.low_precision}
            self._start.restore()

    @contextmanager
    def in_step(self, stage: str) -> Iterator[None]:
        """A replica's own step, or its backward; all replicas draw the same numbers."""
        if stage != "backward":
            self._run_start.restore()
        mode = SameDraws(self._shared)
        self._modes.append(mode)
        with mode:
            yield


class ShadowReplicas(ReplicaSet):
    """Replicas of a shadow, whose steps run under the guest's eyes.

    Attributes:
        guest: Set right after they are made.
        metrics: The metrics of the shadow, which its replicas share.
    """

    guest: Guest
    metrics: ReplicaMetrics

    def run(self, stage: str, shares: Sequence[Share], call: Callable[[Share], Any]) -> list[Any]:
        """As of all replicas."""

        def watched(share: Share) -> Any:
            with self.guest.in_step(stage):
                return call(share)

        return super().run(stage, shares, watched)


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
    loop = trainer.fit_loop.epoch_loop if trainer.training else trainer._active_loop
    return loop if loop is not None and "_results" in vars(loop) else None


@contextmanager
def pointing_at(owner: Any, **attributes: Any) -> Iterator[None]:
    """``owner`` has other attributes for a while."""
    before = {name: vars(owner)[name] for name in attributes}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        vars(owner).update(before)


def make_shadow(replicas: ReplicaSet, *, own_parameters: bool) -> tuple[LightningModule, list[str]]:
    """A shadow of the real module, and the names of its batch norms that normalize by their slice.

    Those run in eval mode on both sides of a comparison; else everything behind them would differ by design.

    Args:
        replicas: The real ones.
        own_parameters: The step will write them, as manual optimization does.

    Raises:
        ReplicationError: something cannot be copied; names the attribute.
    """
    shadow: Any = replicas.stand_in()
    shadow._trainer = replicas.root.module._trainer  # LightningModule drops it from its copies
    if own_parameters:
        for parameter in shadow.parameters():
            parameter.data = parameter.data.clone()
    norms = []
    for name, child in shadow.named_modules():
        if isinstance(child, _BatchNorm) and child.training and not isinstance(child, SyncedBatchNorm):
            child.training = child.running_mean is None
            norms.append(name)
    return shadow, norms


def shared_parameters(replicas: ReplicaSet, shadow: nn.Module) -> list[dict[str, nn.Parameter]]:
    """For every replica of a shadow, parameters that share the storage of the real replica's."""
    named = list(shadow.named_parameters())
    return [
        {name: _like(own, real.detach()) for (name, own), real in zip(named, replica.parameters, strict=True)}
        for replica in replicas.replicas
    ]


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
        twin: Any = object.__new__(kind)
        memo[id(optimizer)] = twin
        copied.append(twin)
    for optimizer, twin in zip(optimizers, copied, strict=True):
        for key, value in vars(optimizer).items():
            if key != "step":
                vars(twin)[key] = copy.copy(value) if key.endswith("_hooks") else copy.deepcopy(value, memo)
    return copied, copy.deepcopy(list(schedulers), memo)
