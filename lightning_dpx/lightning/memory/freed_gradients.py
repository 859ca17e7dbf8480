"""The gradients of the step before, which a planned step frees before its forward.

Lightning sets them to None between a forward and its backward, so that all of them are there beside all activations,
where a plain loop with ``zero_grad`` at its start has none. Freed earlier, they leave their room to activations: at the
end of the forward, where most of these are there, no gradient is, and as gradients come, activations go.
"""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_dpx.devices import is_out_of_memory
from lightning_dpx.lightning.expected_gradient import LossGradient
from lightning_dpx.lightning.lightning_api import LightningModule, Trainer
from lightning_dpx.lightning.memory.idle_parameters import IdleParameters
from lightning_dpx.lightning.memory.kept_gradients import keeps_earlier_gradients
from lightning_dpx.lightning.memory.shadow_slice import Step
from lightning_dpx.lightning.memory.slice_timing import run_once
from lightning_dpx.memory.execute.module_calls import compiled_parts
from lightning_dpx.replicas import BatchSlice

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

_GRADIENT = torch.Tensor.grad.__get__  # type: ignore[union-attr]


def may_free_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Whether nothing sees the gradients of a step between its update and where Lightning sets them to ``None``.

    Of all parameters that are trained: what no optimizer has, keeps its gradients. Optimizers that are not torch's may
    take a step several times and hold on to what each has given, and so does L-BFGS. What compiled code takes is
    measured beside gradients that are there.
    """
    if not module.automatic_optimization or keeps_earlier_gradients(trainer, module) or compiled_parts(module):
        return False
    if not all(map(_steps_once, trainer.strategy.optimizers)):
        return False
    optimized: set[int] = set()
    for optimizer in trainer.strategy.optimizers:
        for group in optimizer.param_groups:
            optimized.update(map(id, group["params"]))
    # One that is left out would be counted where it comes in the first step, and is there all through the next.
    return all(id(parameter) in optimized for parameter in module.parameters() if parameter.requires_grad)


def _leaves_idle_alone(trainer: Trainer, module: LightningModule) -> bool:
    """Whether nothing is kept for parameters without a gradient, over how many batches gradients are added up."""
    if not module.automatic_optimization or compiled_parts(module):
        return False
    return all(map(_steps_once, trainer.strategy.optimizers))


def _steps_once(optimizer: Any) -> bool:
    """Whether every update of an optimizer takes one training step."""
    home: str = inspect.unwrap(type(optimizer).step).__module__
    return home.startswith("torch.optim.") and home != "torch.optim.lbfgs"


class _Reads(TorchFunctionMode):
    """Notes whether code asks a parameter for its gradient, by whatever name."""

    def __init__(self) -> None:
        self.any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Each access makes a new object for the function, and all of them are equal.
        if func == _GRADIENT and args[0].is_leaf and args[0].requires_grad:
            self.any = True
        return func(*args, **(kwargs or {}))


class FreedGradients:
    """Frees them in the steps of a session that is one device.

    Args:
        session: Whose steps.

    Attributes:
        idle: The parameters that get none.
    """

    def __init__(self, session: "Session") -> None:
        self.idle: IdleParameters = IdleParameters()
        self._session = session
        self._gradient: LossGradient | None = None
        self._are_read: bool | None = None  # not known before a step was looked at
        self._has_failed = False  # as it was
        self._accumulates = 0

    def look(self, batch_slice: BatchSlice, run: Step) -> None:
        """Before the first plan: runs the step once, by a shadow, to see whether it asks for gradients.

        Names in the code of a module do not tell it all: other objects may ask, such as what balances losses.
        """
        if self._has_failed:
            self._are_read = None
        if self._are_read is not None or not self.may_tell_idle:
            return
        reads = _Reads()

        def watched(module: Any, rows: Any, num_rows: int) -> Any:
            with reads:
                return run(module, rows, num_rows)

        # Until it has come to its end, nothing is freed.
        self._are_read = True
        try:
            self._run_watched(batch_slice, watched)
            self._has_failed = False
        except Exception:  # noqa: BLE001  a step without a loss, say: the profile that follows has more to say of it
            self._has_failed = True
        else:
            session = self._session
            # Gradients that stay from batch to batch are not freed, whether any code reads them or not.
            self._are_read = reads.any or not may_free_gradients(session.trainer, session.module)

    def _run_watched(self, batch_slice: BatchSlice, watched: Step) -> None:
        """Runs the step, and finds in its graph which parameters it leads no gradient to."""
        replicas = self._session.replicas
        if self._session.module.automatic_optimization:
            try:
                run_once(replicas, batch_slice, watched, self._look_at_graph)
            except Exception as error:
                # A graph that saves nothing takes next to nothing: without it there would be no room either.
                if is_out_of_memory(error):
                    raise
                # Other steps may need what was not saved, as one that asks for gradients itself.
            else:
                return
        run_once(replicas, batch_slice, watched)

    def _look_at_graph(self, shadow: Any, loss: torch.Tensor) -> None:
        self.idle.look(loss, list(shadow.parameters()), self._session.replicas.root.parameters)

    def accumulation_changes(self) -> bool:
        """Whether gradients are added up over another number of batches than in the step before."""
        before = self._accumulates
        self._accumulates = self._session.trainer.accumulate_grad_batches
        return before not in (0, self._accumulates)

    @property
    def are_freed(self) -> bool:
        """Whether every step of now on that begins a window of accumulation finds none."""
        session = self._session
        if self._are_read or not self._is_alone():
            return False
        return may_free_gradients(session.trainer, session.module)

    def free(self) -> None:
        """Before a step: frees what Lightning would set to ``None`` in it, and nothing sees until then."""
        if self._are_read is not False or not self._is_alone() or not self._session.module.automatic_optimization:
            return
        if self._gradient is None:  # it looks through all classes of the module
            self._gradient = LossGradient(self._session)
        # None in the middle of a window of accumulation, and where hooks look at them.
        zeroed = self._gradient.zeroed()
        for parameter in self._session.replicas.root.parameters if zeroed else ():
            if id(parameter) in zeroed:
                parameter.grad = None

    @property
    def may_tell_idle(self) -> bool:
        """Whether one look tells which parameters get no gradient, and nothing is kept for these by optimizers."""
        session = self._session
        replicas = session.replicas
        # Micro-batches of one device add their gradients to each other.
        is_one_device = self._is_alone() or (replicas.cuts_slices and len(replicas.devices) == 1)
        return is_one_device and not self._has_others() and _leaves_idle_alone(session.trainer, session.module)

    def _is_alone(self) -> bool:
        """Whether the first replica has every batch; elsewhere gradients are summed, in memory that stays."""
        replicas = self._session.replicas
        is_first = len(replicas.replicas) == 1 or replicas.partition.is_one_slice
        return is_first and not self._has_others() and not replicas.cuts_slices

    def _has_others(self) -> bool:
        return self._session.spans_processes or self._session.step.has_other_owners
