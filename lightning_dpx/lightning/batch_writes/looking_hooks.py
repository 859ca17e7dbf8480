"""Which hooks look at a batch after its step."""

from typing import Any

from torch.optim import LBFGS

from lightning_dpx.lightning.gradient_hooks import has_hooks
from lightning_dpx.lightning.lightning_api import LightningModule
from lightning_dpx.lightning.transfers import TRANSFER_HOOKS, Transfer

_HOOKS = {
    "train": "on_train_batch_end",
    "sanity_check": "on_validation_batch_end",
    "validate": "on_validation_batch_end",
    "test": "on_test_batch_end",
    "predict": "on_predict_batch_end",
}


def is_looked_at(module: LightningModule) -> bool:
    """Whether a hook of the user's gets the batch after the step, or the step may run on it again."""
    trainer: Any = module.trainer
    # The second call of a closure must find in the batch what the first one wrote there.
    runs_again = trainer.training and any(map(_calls_again, trainer.optimizers))
    return runs_again or has_hooks(module, trainer.callbacks, [_end_hook(trainer)])


def is_looked_at_before(module: LightningModule) -> bool:
    """Whether a hook of the module gets the batch before the step, and nothing of the user's would yet change it.

    Callbacks have such hooks to note times and numbers of batches: for them no batch is moved whole.
    """
    trainer: Any = module.trainer
    start = _end_hook(trainer).replace("_end", "_start")
    return has_hooks(module, (), [start]) and Transfer(trainer, module, 0).is_plain


def tell_of_start_hooks(module: LightningModule) -> None:
    """Says that hooks at the start of a batch find it as it was loaded, where one device shows what it has become."""
    trainer: Any = module.trainer
    end = _end_hook(trainer)
    start = end.replace("_end", "_start")
    if has_hooks(module, trainer.callbacks, [start]) and not Transfer(trainer, module, 0).is_plain:
        trainer.strategy.announce(
            f"dpx: {start} gets every batch as it was loaded: {' and '.join(TRANSFER_HOOKS)} run on each slice, within "
            f"the step. {end} gets what they have made of it."
        )


def _end_hook(trainer: Any) -> str:
    """The hook at the end of a batch of the stage that is running."""
    return _HOOKS.get(str(getattr(trainer.state.stage, "value", "")), "on_train_batch_end")


def _calls_again(optimizer: Any) -> bool:
    """Whether an optimizer may call its closure several times for a batch."""
    plain = getattr(optimizer, "optimizer", optimizer)
    # Of torch's own optimizers LBFGS alone calls its closure again; of others nothing is known.
    return isinstance(plain, LBFGS) or not type(plain).step.__module__.startswith("torch.optim.")
