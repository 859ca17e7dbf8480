"""Whether a step by hand that its slices could not share begins anew, with the whole batch.

first shared step    a StepSnapshot of all that it may change         it is undone, whatever it has done
each of the others   a StepStart: gradients, attributes, generators   it begins anew until an optimizer has acted
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_dpx.lightning.lightning_api import LightningModule
from lightning_dpx.lightning.manual.step_snapshot import StepSnapshot, StepStart
from lightning_dpx.replicas import GeneratorStates, ReplicaSet
from lightning_dpx.step import TrainingStep
from lightning_dpx.units import MIB

if TYPE_CHECKING:
    from lightning_dpx.lightning.strategy import DPXStrategy

_MOST_BYTES_NOTED = 64 * MIB  # of gradients that may be copied, so that a step can be begun anew


class Restarts:
    """What the steps by hand of a fit are put back from.

    Args:
        strategy: Knows whether memory is planned.
        replicas: The replicas.
        step: Knows the owners of parameters.
    """

    def __init__(self, strategy: "DPXStrategy", replicas: ReplicaSet, step: TrainingStep) -> None:
        self._strategy = strategy
        self._replicas = replicas
        self._step = step
        # Of the first step that replicas share: what it needs to be taken again; False once it is over.
        self._snapshot: StepSnapshot | Literal[False] | None = None
        self._start: StepStart | None = None
        self._has_acted = False  # an optimizer, a scheduler or a hook, in the step that is under way

    @property
    def _root(self) -> LightningModule:
        module: LightningModule = self._replicas.root.module  # type: ignore[assignment]
        return module

    @property
    def before_adding(self) -> Callable[[torch.Tensor], None] | None:
        """Is told of a parameter before a backward adds to its gradient; ``None`` where that is not noted."""
        return None if self._start is None else self._start.before_adding

    def begin(self, shared: Sequence[Any]) -> None:
        """A step that replicas share begins.

        Args:
            shared: The optimizers, schedulers and scalers that it may use.
        """
        # Only of the first shared step, as it copies the parameters and all state.
        if self._snapshot is None:
            progress = self._root.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
            self._snapshot = StepSnapshot(self._root, [*shared, progress], self._generator_states())
        self._has_acted = False
        # Of every step: whether its slices agree on what to do, as on a branch, each of them shows anew.
        self._start = self._noted_start()

    def note_act(self) -> None:
        """An optimizer, a scheduler or a hook has acted: from here on the step cannot begin anew."""
        self._has_acted = True

    def end(self) -> None:
        """The step has ended well."""
        # The first one has shown that replicas can share it, so it need not be undone.
        self._snapshot = False
        self._start = None

    def undo_first_step(self) -> bool:
        """Puts everything back as it was before the first step, if that is the one which has just failed."""
        snapshot = self._snapshot
        # Once: the step that is taken again has the whole batch, and its errors are the user's.
        self._snapshot = False
        if not snapshot:
            return False
        snapshot.restore()
        return True

    def begin_anew(self) -> bool:
        """Puts back what slices have changed that do not agree on what to do, if nothing has been done yet."""
        start = self._start
        self._start = None
        return start is not None and not self._has_acted and not self._step.has_processes and start.restore()

    def _noted_start(self) -> StepStart | None:
        """What a step can be begun anew from; nothing where gradients are large, or a budget would not count them."""
        owners = self._step.owner_parameters
        # A gradient is no larger than its parameter, and a sparse one does not tell its bytes.
        num_bytes = sum(owner.nbytes for owner in owners if owner.grad is not None)
        if num_bytes > _MOST_BYTES_NOTED or self._strategy.plans_memory:
            return None
        return StepStart(self._root, owners, self._generator_states())

    def _generator_states(self) -> GeneratorStates:
        """Of those of the process and of devices, and of those that the module holds."""
        return GeneratorStates(self._replicas.devices, generators=self._replicas.traits.draws.generators)
