"""What every run has, whatever its steps are like; and a run on one device, where there are no replicas."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from torch.nn import Module

from lightning_dpx.lightning.lightning_api import Precision
from lightning_dpx.lightning.owners import load_states
from lightning_dpx.memory import planned
from lightning_dpx.shifting import applied_shift

if TYPE_CHECKING:
    from lightning_dpx.lightning.strategy import DPXStrategy

# Lightning's own Strategy.training_step and its like enter these, but the strategy overrides them.
_PRECISION_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


def step_context(precision: Precision, name: str) -> AbstractContextManager[Any]:
    """What Lightning runs a step in, as a precision plugin may have another context for each.

    Args:
        precision: The plugin.
        name: Of the step, such as ``"predict_step"``.
    """
    context: AbstractContextManager[Any] = getattr(precision, _PRECISION_CONTEXTS[name])()
    return context


class TrainingRunner(Protocol):
    """What takes the training steps of a run.

    Attributes:
        accumulates: Whether gradients stay on the replicas, to be summed after a later batch.
    """

    accumulates: bool

    def begin_epoch(self) -> None:
        """Callbacks have begun an epoch."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What one device's training step would return for the whole batch."""

    def after_backward(self) -> None:
        """The backward of the loss that was returned has run."""


class EvaluationRunner(Protocol):
    """What takes the validation, test and prediction steps of a run."""

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What one device's step of this name would return for the whole batch."""


class Run:
    """What all runs have: the user's module, and what its steps run in.

    Args:
        strategy: Lightning's face of the run.

    Attributes:
        shifts: Whether parts of the replicas run, or may run, on other devices.
        training: Takes the training steps.
        evaluation: Takes all others.
    """

    training: TrainingRunner
    evaluation: EvaluationRunner

    def __init__(self, strategy: "DPXStrategy") -> None:
        self.strategy = strategy
        self.shifts: bool = strategy.options.shifts_activations

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Gradients stay on the replicas in here."""
        training = self.training
        training.accumulates = True
        try:
            yield
        finally:
            training.accumulates = False

    @property
    def has_contexts(self) -> bool:
        """Whether anything is shifted or planned, so that :meth:`context` is more than nothing."""
        return self.shifts or bool(self.strategy.planning.devices.plans)

    def context(self, module: Module) -> AbstractContextManager[None]:
        """Whatever runs a replica's own step runs in here: shifted, and with the memory plan."""
        # Asked in every step, and nearly always the answer.
        if not self.has_contexts:
            return nullcontext()
        shift = applied_shift(module) if self.shifts else None
        if shift is None:
            return planned(module)
        return _both(shift.active(), planned(module))

    def alone(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A step of the user's module as on one device, and its end hook.

        Args:
            name: Of the step.
            args: The batch, on its device, and the indices.
            kwargs: What it gets beside.
        """
        strategy = self.strategy
        module = strategy.lightning_module
        if self.has_contexts:
            # The end hook is a part of the step, so the plan and the shift cover what it computes.
            with self.context(module):  # type: ignore[arg-type]  # connect() sets the module first
                return self.finished(name, self.step_without_end_hook(name, args, kwargs))
        # Not by way of step_without_end_hook(): a traceback shows every frame above the user's step, and
        # a test counts them.
        with step_context(strategy.precision_plugin, name):
            outputs = getattr(module, name)(*args, **kwargs)
        return self.finished(name, outputs)

    def step_without_end_hook(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The step in the precision's context, without its end hook."""
        with step_context(self.strategy.precision_plugin, name):
            return getattr(self.strategy.lightning_module, name)(*args, **kwargs)

    def end_hook(self, name: str) -> Callable[[Any], Any] | None:
        """The user's hook that sees the merged outputs of a step, such as ``training_step_end``, if there is one."""
        module = self.strategy.lightning_module
        if getattr(type(module), f"{name}_end", None) is None:  # asked of the class: a miss costs a module much more
            return None
        hook: Callable[[Any], Any] = getattr(module, f"{name}_end")
        return hook

    def finished(self, name: str, outputs: Any) -> Any:
        """What the end hook makes of the outputs of a step."""
        finish = self.end_hook(name)
        # None stands for a batch without a result, from which a hook can compute nothing.
        if finish is None or outputs is None:
            return outputs
        with step_context(self.strategy.precision_plugin, name):
            return finish(outputs)


class OneDevice(Run):
    """A run on one device, or none at all: steps are Lightning's own. It stands wherever there are no replicas.

    Args:
        strategy: Lightning's face of the run.
    """

    def __init__(self, strategy: "DPXStrategy") -> None:
        super().__init__(strategy)
        self.training = _TrainingAlone(self)
        self.evaluation = _EvaluationAlone(self)

    @property
    def modules(self) -> list[Module]:
        """There are no replicas."""
        return []

    @property
    def loss_is_sum(self) -> bool:
        """Losses of slices are never merged here."""
        return False

    def plan_ahead(self) -> None:
        """Nothing is planned."""

    def begin_optimizers(self) -> None:
        """The user's optimizers are as they were made."""

    def optimize_owners(self) -> None:
        """The optimizers change the only parameters that there are."""

    def load_optimizer_states(self, default: Callable[[Any], None], checkpoint: Mapping[str, Any]) -> None:
        """As Lightning does by default, on one device; where parts are shifted each state goes to its parameter."""
        # Lightning moves all states to the root device after loading, away from shifted parameters.
        if self.shifts:
            load_states(self.strategy.optimizers, checkpoint)
        else:
            default(checkpoint)

    def step_optimizer(
        self, default: Callable[..., Any], optimizer: Any, closure: Any, model: Any, kwargs: dict[str, Any]
    ) -> Any:
        """As Lightning does."""
        return default(optimizer, closure, model, **kwargs)

    def batch_to_device(self, default: Callable[..., Any], batch: Any, device: Any, dataloader_idx: int) -> Any:
        """As Lightning does."""
        return default(batch, device, dataloader_idx)

    def check_replicas(self) -> None:
        """There is nothing to compare."""

    def watch(self) -> None:
        """There is nothing to compare the times of."""

    def watch_processes(self) -> None:
        """There are no other processes to wait for."""

    def stop_watching(self) -> None:
        """Nothing was timed."""

    def mark_changed(self) -> None:
        """There are no copies of the parameters."""

    def release_cores(self) -> None:
        """There are no workers."""

    def end_workers(self) -> None:
        """There are none."""

    def tell_rest(self) -> None:
        """Nothing was put together."""

    def close(self) -> None:
        """There is nothing to take off the module."""


class _TrainingAlone:
    """Stands for a :class:`TrainingFlow`."""

    def __init__(self, run: OneDevice) -> None:
        self._run = run
        self.accumulates = False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run.alone("training_step", args, kwargs)

    def begin_epoch(self) -> None:
        """Nothing was checked."""

    def after_backward(self) -> None:
        """Nothing is summed."""


class _EvaluationAlone:
    """Stands for an :class:`EvaluationFlow`."""

    def __init__(self, run: OneDevice) -> None:
        self._run = run

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._run.strategy.before_evaluation_batch()
        return self._run.alone(name, args, kwargs)


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Any:
    with first, second:
        yield
