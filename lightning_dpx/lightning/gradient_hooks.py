"""What the user's hooks find in gradients, and what becomes of what they write, in automatic optimization.

Where no hook may look, gradients wait on the replicas while they accumulate, or live only where their parameters have
their owners. Where one may, they are summed after every backward, and the user's module has copies of them. Hooks of
Lightning's own callbacks are known not to look.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_dpx.lightning.lightning_api import Callback, LightningModule, is_overridden
from lightning_dpx.lightning.root_gradients import RootGradients
from lightning_dpx.python_objects.origin import runs_steps
from lightning_dpx.replicas import ReplicaSet
from lightning_dpx.step import TrainingStep

# Between the first backward of an accumulation window and the step that ends it.
WITHIN_WINDOW = frozenset(
    {"backward", "on_before_backward", "on_after_backward", "on_train_batch_end", "on_train_batch_start"}
)
# Between a backward and the next one.
ROUND_STEP = WITHIN_WINDOW | {
    "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step", "on_before_zero_grad",
    "optimizer_zero_grad",
}  # fmt: skip

# Between a step's forward and its backward.
BEFORE_BACKWARD = frozenset({"backward", "on_before_backward", "on_before_zero_grad", "optimizer_zero_grad"})


def has_hooks(module: LightningModule, callbacks: Sequence[Callback], names: Collection[str]) -> bool:
    """Whether the module, or a callback of the user's, overrides one of these hooks."""
    if any(is_overridden(name, module, parent=LightningModule) for name in names if hasattr(LightningModule, name)):
        return True
    own = [callback for callback in callbacks if not runs_steps(type(callback))]
    of_callbacks = [name for name in names if hasattr(Callback, name)]
    return any(is_overridden(name, callback, parent=Callback) for callback in own for name in of_callbacks)


class GradientHooks:
    """The hooks of one fit; there are none before :meth:`begin` and after :meth:`end`.

    Attributes:
        within_window: Whether one may look at gradients before a window of accumulation has ended.
        before_backward_of_step: Whether one may look at what a step's forward has made, before its backward.
        between_steps: Whether one may write parameters after a step, or before the next, that replicas on other
            devices would not get.
    """

    def __init__(self) -> None:
        self.before_backward_of_step: bool = False
        self.within_window: bool = False
        self.between_steps: bool = False
        self._root_gradients: RootGradients | None = None

    def begin(self, module: LightningModule, replicas: ReplicaSet, step: TrainingStep) -> None:
        """Once the replicas are made: asks which hooks there are."""
        callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
        self.before_backward_of_step = has_hooks(module, callbacks, BEFORE_BACKWARD)
        # Several processes meet once a window, as under DDP: each micro-batch would cost a message over the network.
        self.within_window = has_hooks(module, callbacks, WITHIN_WINDOW) and not step.has_processes
        # Where others own parameters, their bits are compared instead: see RootGradients.
        self.between_steps = has_hooks(module, callbacks, WITHIN_WINDOW) and not step.has_other_owners
        if step.has_other_owners and has_hooks(module, callbacks, ROUND_STEP):
            self._root_gradients = RootGradients(replicas, step)

    def follow_replicas(self) -> None:
        """The replicas were made anew, perhaps in the middle of a step, whose hooks are still to come."""
        if self._root_gradients is not None:
            self._root_gradients.follow_replicas()

    def end(self) -> None:
        """Forgets the replicas."""
        self.before_backward_of_step = False
        self.within_window = False
        self.between_steps = False
        self._root_gradients = None

    @property
    def look_at_owners(self) -> bool:
        """Whether there are such hooks, and owners beside the first device."""
        return self._root_gradients is not None

    def before_backward(self) -> None:
        """Takes copies that hooks have seen off the user's module: backward would add to them."""
        if self._root_gradients is not None:
            self._root_gradients.hide()

    def after_backward(self) -> None:
        """Puts copies of all gradients on the user's module, where hooks look."""
        if self._root_gradients is not None:
            self._root_gradients.show()

    def round_step(self, wrapped: Any) -> AbstractContextManager[None]:
        """The context in which ``wrapped``, the precision plugin, steps an optimizer."""
        # Nothing stands between Lightning and its optimizer where no hook could look.
        if self._root_gradients is None:
            return nullcontext()
        return self._root_gradients.hooks_shown(wrapped)

    def closure(
        self, optimizer: Any, closure: Callable[[], Any], replicas: ReplicaSet, step: TrainingStep
    ) -> Callable[[], Any]:
        """The closure of an optimizer: parameters that it moved reach the replicas, their gradients reach it."""
        # Torch's own optimizers call their closure before they move anything; what others do leaves no trace.
        is_first = type(optimizer).step.__module__.startswith("torch.optim.")

        def run() -> Any:
            nonlocal is_first
            if not is_first:
                replicas.state.parameters.optimizer_stepped()
            is_first = False
            result = closure()
            step.reduce()  # those of earlier batches, if the last one of a window had no loss
            replicas.state.parameters.follow_root()
            return result

        return run
