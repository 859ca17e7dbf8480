"""One strategy object in several Trainers, one after the other.

Lightning gives a strategy object the accelerator, devices and plugins of its Trainer. A second Trainer would find them
there and take them for what the user gave to the strategy: it refuses some, and quietly follows others. So what was
given at first comes back as soon as another Trainer asks.
"""

import sys
import weakref
from typing import TYPE_CHECKING, Any

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning.lightning_api import TrainerStatus, pl
from lightning_dpx.lightning.lightning_compat import (
    CODE_THAT_ASKS,
    accelerator_connector,
    initialize_strategy_again,
    trainer_of,
)

if TYPE_CHECKING:
    from lightning_dpx.lightning.strategy import DPXStrategy


class Adoption:
    """Which Trainer a strategy object belongs to, and what the strategy had before it belonged to any.

    Args:
        strategy: That is given to Trainers.
        names: Attributes of the strategy that a Trainer sets.
    """

    def __init__(self, strategy: "DPXStrategy", *names: str) -> None:
        self._strategy = strategy
        self._names = names
        self._given: dict[str, Any] | None = None  # until the first Trainer asks, the user may set them
        # Weak: a strategy that is kept must not keep a Trainer with its module and data.
        self._connector: weakref.ref[Any] | None = None
        self._trainer: weakref.ref[pl.Trainer] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a strategy, or one from a file, is no longer that of the Trainer.
        return {**vars(self), "_connector": None, "_trainer": None}

    def begin_run(self, trainer: pl.Trainer) -> None:
        """A run of ``trainer`` begins."""
        self._trainer = weakref.ref(trainer)

    @property
    def is_running(self) -> bool:
        """Whether the last Trainer that ran is in the middle of a run."""
        trainer = None if self._trainer is None else self._trainer()
        return trainer is not None and trainer.state.status == TrainerStatus.RUNNING

    def follow_caller(self) -> None:
        """The strategy belongs to a new Trainer, if that is what reads an attribute of it just now.

        Raises:
            ConfigurationError: another Trainer is running with this strategy.
        """
        frame = sys._getframe(2)  # what reads the attribute, whose property calls this
        # Anyone may read the attribute; in this one function a new Trainer reads it.
        if frame.f_code is CODE_THAT_ASKS:
            self._belong_to(frame.f_locals.get("self"))

    def return_to_trainer_of(self, module: pl.LightningModule) -> None:
        """A Trainer that runs again after another one took its strategy object takes it back."""
        trainer = trainer_of(module)
        connector = None if trainer is None else accelerator_connector(trainer)
        if connector is None or self._connector is None or self._connector() is connector:
            return
        self._belong_to(connector)
        # A Trainer gives these only once, when it is made, and the other one has overwritten them.
        initialize_strategy_again(connector)

    def _belong_to(self, connector: Any) -> None:
        """The strategy is as it was given, and belongs to the Trainer of ``connector`` from now on."""
        if self.is_running:
            raise ConfigurationError(
                "This strategy object belongs to a Trainer that is running; give every Trainer a strategy of its own, "
                "or make the second one when the first has ended."
            )
        if self._given is None:
            self._given = {name: getattr(self._strategy, name) for name in self._names}
        for name, value in self._given.items():
            setattr(self._strategy, name, value)
        self._connector = weakref.ref(connector)
