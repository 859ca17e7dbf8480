"""Work on the first training batch of a run, where everything that Lightning sets up is there; nothing is trained."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning.lightning_api import Callback, LightningModule, Trainer
from lightning_dpx.lightning.lightning_compat import forget_batch
from lightning_dpx.python_objects.preserve import preserve_rng_state

Found = TypeVar("Found")


def work_on_first_batch(
    trainer: Trainer, module: LightningModule, data: Any, work: Callable[[Trainer, LightningModule, Any], Found]
) -> Found:
    """What ``work(trainer, module, batch)`` finds of the first training batch, on which nothing is trained.

    Raises:
        ConfigurationError: there is no training batch.
    """
    first = _FirstBatch(work)
    with _with_callback(trainer, first):
        arguments = {}
        # A loader may have no length to be asked for.
        if data is not None:
            kind = "datamodule" if hasattr(data, "prepare_data") else "train_dataloaders"
            arguments = {kind: data}
        # Shuffling and augmentation draw numbers, and what the caller runs next must not notice.
        with preserve_rng_state([trainer.strategy.root_device], [module]), suppress(_Seen):
            trainer.fit(module, **arguments)
    # The fit has ended by itself, without a step.
    if first.found is None:
        raise ConfigurationError("There is no training batch to look at: the loader is empty, or no step is allowed.")
    return first.found


class _FirstBatch(Callback, Generic[Found]):
    """Works on the first training batch, where everything that Lightning sets up is there, and ends the fit."""

    def __init__(self, work: Callable[[Trainer, LightningModule, Any], Found]) -> None:
        self._work = work
        self.found: Found | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Looks at the batch instead of training on it."""
        try:
            self.found = self._work(trainer, pl_module, batch)
        finally:
            # No batch ends, and the module keeps its Trainer, which would keep the batch on its device.
            forget_batch(trainer)
        # The loops unwind, and the Trainer tears the run down as after any other error.
        raise _Seen


# Lightning runs the step whatever a callback's on_train_batch_start returns, so only an
# exception keeps it from happening.
class _Seen(Exception):  # noqa: N818  it ends a fit and is no error
    """The first batch is there, the step must not happen."""


@contextmanager
def _with_callback(trainer: Trainer, callback: Callback) -> Iterator[None]:
    trainer.callbacks.append(callback)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        trainer.callbacks.remove(callback)  # type: ignore[attr-defined]
