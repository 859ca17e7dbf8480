"""What a training step takes beside its forward and backward, on the host and on the devices.

It is timed on an empty step: a short fit under this package's strategy, with as many replicas, with parameters and
optimizers like those of the run and as many logged values, whose ``training_step`` hands every parameter a gradient and
computes nothing. What is left is Lightning's loop, the slices of the batch and their way to the devices, the sums of
the gradients and the step of the optimizer. Hooks and callbacks of the user's are not in it. Loading a batch is timed
by itself, as it grows with the rows and the rest does not.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_dpx.devices import clock_of, is_host, synchronize
from lightning_dpx.errors import describe_error
from lightning_dpx.lightning.lightning_api import Callback, LightningModule, Trainer, rank_zero_warn
from lightning_dpx.lightning.memory.dry_run.place import strategy_to_look, trainer_on
from lightning_dpx.lightning.memory.dry_run.step_profiles import LoggedValue
from lightning_dpx.lightning.rehearsal.optimizer_copies import copy_optimizers
from lightning_dpx.lightning.silence_lightning import quiet_lightning
from lightning_dpx.memory.profile import timing_effort
from lightning_dpx.torch_compat import tree_leaves, tree_map_only

_WARM_UP = 4  # steps: the first one looks at the module and makes states of the optimizer
_STEPS = 16
_ENOUGH = 0.5  # seconds of steps, after which fewer will do
_FEWEST = 2
_BATCHES = 4  # that are loaded to see how long that takes
_LONGEST = 2.0  # seconds that pass, after which no further batch is loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyRun:
    """The run that an empty step belongs to.

    Attributes:
        devices: One for each replica: all the host, or each an accelerator of the same type.
        batch: Of the run; what a replica does with its slice is nothing.
        options: Of the strategy: how a batch is cut, and how gradients are summed.
        logged: Names and options of what a step logs.
    """

    devices: Sequence[torch.device]
    batch: Any
    options: dict[str, Any] = field(default_factory=dict)
    logged: Sequence[LoggedValue] = ()


class EmptySeconds(NamedTuple):
    """Seconds of a step without forward and backward; processor time where it runs on the host.

    Attributes:
        whole: Until the devices have done all of it.
        queued: Until the host has handed all of it to them; as many as ``whole`` where it runs on the host.
    """

    whole: float = 0.0
    queued: float = 0.0


def seconds_of_empty_step(trainer: Trainer, module: LightningModule, run: EmptyRun) -> EmptySeconds:
    """The least times of a step without forward and backward; none, which is announced, where an empty one fails.

    Args:
        trainer: Has the optimizers, and says how gradients are clipped and accumulated.
        module: What is trained; it is only read.
        run: What of the run decides.
    """
    clock = _StepClock(trainer.accumulate_grad_batches, run.devices)
    try:
        empty = _empty_like(trainer, module, run.logged)
        with quiet_lightning():
            _trainer_for(trainer, run, clock).fit(empty, _Again(_as_loaded(run)))
    except Exception as error:  # noqa: BLE001  whatever the optimizer or the batch is
        rank_zero_warn(
            "dpx: the time of a step is that of its forward and backward alone: an empty step, by which the rest is "
            f"timed, failed ({describe_error(error)})."
        )
        return EmptySeconds()
    return clock.least


def seconds_of_loading(trainer: Trainer) -> float:
    """Processor time of this thread to load a batch of the size that the loaders have.

    Workers load beside the step, and a data set that can only be gone through would be missing what is taken here:
    both count as nothing. So does, announced, a loader that fails.
    """
    try:
        return _of_all_loaders(trainer)
    except Exception as error:  # noqa: BLE001  whatever the data set is
        rank_zero_warn(
            f"dpx: what loading a batch takes is not counted: to load some failed ({describe_error(error)})."
        )
        return 0.0


def _of_all_loaders(trainer: Trainer) -> float:
    seconds = 0.0
    for loader in tree_leaves(trainer.train_dataloader):
        if (
            isinstance(loader, DataLoader)
            and not loader.num_workers
            and not isinstance(loader.dataset, IterableDataset)
        ):
            seconds += _least_of_loading(loader)
    return seconds


def _least_of_loading(loader: DataLoader[Any]) -> float:
    times = []
    until = time.monotonic() + _LONGEST
    is_broken_off = False
    # As steps are timed: in processor time, in which others that are at work have no part.
    began = time.thread_time()
    for _ in loader:
        now = time.thread_time()
        times.append(now - began)
        is_broken_off = len(times) == _BATCHES or time.monotonic() > until
        if is_broken_off:
            break
        began = now
    # The last batch of an epoch may have fewer rows, and the first one has what is done once.
    whole = times if is_broken_off else times[:-1]
    return min(whole or times, default=0.0)


def _empty_like(trainer: Trainer, module: LightningModule, logged: Sequence[LoggedValue]) -> "_EmptyStep":
    # Optimizers really step, so they get parameters of their own.
    parameters = list(module.parameters())
    twins = []
    for parameter in parameters:
        twins.append(nn.Parameter(torch.zeros_like(parameter), parameter.requires_grad))
    by_hand = not module.automatic_optimization
    # A step by hand runs its optimizers itself, so they are in its time already.
    optimizers: list[Any] = []
    if not by_hand:
        optimizers, _ = copy_optimizers(trainer.optimizers, [], list(zip(parameters, twins, strict=True)))
    return _EmptyStep(twins, _Shared(optimizers), logged, by_hand)


def _as_loaded(run: EmptyRun) -> Any:
    """The batch as a loader gives it, so that its way to the devices is a part of the step."""
    if is_host(run.devices[0]):
        return run.batch
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, run.batch)


def _trainer_for(trainer: Trainer, run: EmptyRun, clock: Callback) -> Trainer:
    # What callbacks and loggers take depends on them, and is no part of every step.
    accumulate = trainer.accumulate_grad_batches
    return Trainer(
        **trainer_on(run.devices),
        # What is looked at in some batches only belongs to no usual step.
        strategy=strategy_to_look(**run.options),
        precision=trainer.precision,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        accumulate_grad_batches=accumulate,
        max_epochs=1,
        limit_train_batches=accumulate * (_WARM_UP + _STEPS) + 1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


class _Shared(list[Any]):
    """Optimizers that copies of a module share: replicas have none of their own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Shared":
        return self


class _EmptyStep(LightningModule):
    """Has parameters and optimizers, and computes nothing.

    Args:
        parameters: Those.
        optimizers: Over them.
        logged: Names and options of what its step logs.
        by_hand: Whether the step optimizes by hand, and so returns no loss.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizers: _Shared, logged: Sequence[LoggedValue], by_hand: bool
    ) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.held = nn.ParameterList(parameters)
        self._made = optimizers
        self._logged = logged

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        """Logs, and gives a loss whose backward hands out zeros."""
        # A logged value takes as long as a small layer: Lightning keeps a result of it, and hands it on.
        for name, options in self._logged:
            self.log(name, torch.zeros((), device=self.device), **options)
        if not self.automatic_optimization:
            return None
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        loss: torch.Tensor = _Nothing.apply(*trained)  # type: ignore[no-untyped-call]
        return loss

    def configure_optimizers(self) -> Any:
        """The optimizers that were given."""
        return list(self._made)


class _Nothing(torch.autograd.Function):
    """Zero, with a gradient of zeros for all that it is given."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        # Nothing is copied: what is kept for backward is the parameters themselves.
        ctx.save_for_backward(*parameters)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class _Again:
    """The same batch without end."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._batch


class _StepClock(Callback):
    """Times from the beginning of a batch to that of the next one, and ends the fit when it has seen enough.

    Args:
        batches: That accumulate: one step of the optimizer.
        devices: Of the run.
    """

    def __init__(self, batches: int, devices: Sequence[torch.device]) -> None:
        self._batches = batches
        self._devices = devices
        self._clock = clock_of(devices[0])
        self._times: list[EmptySeconds] = []
        self._began = 0.0

    @property
    def least(self) -> EmptySeconds:
        """Seconds of a batch: what others do on the same processor only ever adds to it."""
        whole = min(one.whole for one in self._times)
        queued = min(one.queued for one in self._times)
        return EmptySeconds(whole / self._batches, queued / self._batches)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Ends the time of one step, and begins that of the next."""
        step, within = divmod(batch_idx, self._batches)
        # Only with the last of the batches that accumulate the optimizer steps.
        if within:
            return
        queued = self._clock()
        # Accelerators may be at work for longer than it took to tell them of it.
        for device in self._devices:
            synchronize(device)
        now = self._clock()
        if step > _WARM_UP:
            self._times.append(EmptySeconds(now - self._began, queued - self._began))
        most = timing_effort.rounds(_STEPS)
        is_enough = len(self._times) >= min(_FEWEST, most) and sum(one.whole for one in self._times) > _ENOUGH
        if len(self._times) >= most or is_enough:
            trainer.should_stop = True
        # Once more, as what has been done here is no part of the step.
        self._began = self._clock()
