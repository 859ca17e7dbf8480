"""Lightning's own command line, as ``dpx`` uses it: everything of this package by name, and simulated devices."""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lightning_dpx.commands.progress import done
from lightning_dpx.commands.usage import ERROR, UnreadableArguments, reading_arguments
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning.lightning_api import (
    PACKAGE,
    Checkpoint,
    DummyLogger,
    LightningModule,
    ModelSummary,
    ProgressBar,
    Trainer,
)
from lightning_dpx.lightning.lightning_compat import look_up
from lightning_dpx.simulate import simulate

# Here, not where Lightning's other names are: it needs jsonargparse, which only the command line does.
if TYPE_CHECKING or PACKAGE == "lightning":
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
else:
    from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback


@dataclass(frozen=True)
class SimulatedDevices:
    """Devices to rehearse on, with trainer.accelerator=sim; see lightning_dpx.simulate.

    Args:
        num_devices: How many, 1 to 16.
        memory: Capacity of each, in bytes or as "8GiB", or one per device; no limit unless given.
        speed: Speed of each, 1 for 1e11 bytes a second, or one per device.
        link: Bytes per second of a copy between two of them; copies take no time unless given.
        latency: Seconds that every such copy takes beside.
    """

    # jsonargparse makes an option of each field, with its help from the docstring.
    num_devices: int = 8
    memory: int | str | list[int | str] | None = None
    speed: float | list[float] = 1.0
    link: int | str | None = None
    latency: float = 0.0


class SaveConfig(SaveConfigCallback):
    """Beside the logs; without a logger it would go to the current folder, and a second run would be refused."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Only where there is a logger."""
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


class ConfigCLI(LightningCLI):
    """A LightningCLI that takes ``--simulate`` and tells wrong values in this package's words."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """One more than Lightning's."""
        parser.add_argument("--simulate", type=SimulatedDevices | None, default=None, help="devices to rehearse on")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Without Lightning's warning of arguments that are not the process's own."""
        try:
            with reading_arguments():
                self.config = parser.parse_args(args)
        except argparse.ArgumentError as error:
            done()
            told = [f"dpx: {error}", *_ways_out(str(error), args[0]), f"dpx {args[0]} --help shows all options."]
            print("\n".join(told), file=sys.stderr)
            raise UnreadableArguments(ERROR) from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"A config is no text in UTF-8, as YAML has to be: {error}.") from error

    def before_instantiate_classes(self) -> None:
        """Makes the simulated devices, before anything runs a backward."""
        chosen = look_up(self, self.config, "simulate")
        if chosen is not None:
            # jsonargparse gives an instance where it has made one, and a namespace elsewhere.
            simulate(**(asdict(chosen) if isinstance(chosen, SimulatedDevices) else vars(chosen)))

    def instantiate_classes(self) -> None:
        """Makes the trainer, the model and the data.

        Raises:
            ConfigurationError: a value that is not allowed.
        """
        try:
            super().instantiate_classes()
        except (TypeError, ValueError) as error:
            # jsonargparse goes on with the value as Python shows it, which is no help on
            # a command line.
            said, *_ = str(error).partition("\nGiven value type")
            raise ConfigurationError(said) from error


class InstantiateOnlyCLI(ConfigCLI):
    """Makes everything and runs nothing.

    Args:
        trainer: Arguments of the Trainer that are not up to the user.
        options: Of the LightningCLI.
    """

    def __init__(self, trainer: dict[str, Any], **options: Any) -> None:
        # Before the base class, whose constructor makes the Trainer.
        self._for_trainer = trainer
        super().__init__(**options)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """With the given arguments, and so that nothing is shown or written."""
        quiet: dict[str, Any] = {
            "enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": False,
            "callbacks": self._callbacks_of_the_step(), "logger": self._silent_loggers(), "profiler": None,
        }  # fmt: skip
        # Lightning lets arguments that are given here win over those of the config.
        return super().instantiate_trainer(**{**kwargs, **quiet, **self._for_trainer})

    def make_trainer_again(self, trainer: dict[str, Any]) -> None:
        """Another Trainer for the same config.

        Args:
            trainer: Arguments of it that are not up to the user, in place of the first one's.
        """
        self._for_trainer = trainer
        self.trainer = self.instantiate_trainer()

    def _callbacks_of_the_step(self) -> list[Any]:
        """Those of the config without what writes files of checkpoints, or prints: some a quiet Trainer refuses."""
        kept = []
        for callback in _as_list(look_up(self, self.config_init, "trainer.callbacks")):
            if not isinstance(callback, Checkpoint | ModelSummary | ProgressBar):
                kept.append(callback)
        return kept

    def _silent_loggers(self) -> list[DummyLogger] | bool:
        """As many as a run has, as callbacks and steps may ask for one; they take everything and write nothing."""
        given = look_up(self, self.config_init, "trainer.logger")
        # A Trainer that is barebones has no logger unless it is asked for one, which it refuses.
        if given is False or (given is None and look_up(self, self.config_init, "trainer.barebones")):
            return False
        silent = []
        for _ in _as_list(given) or [None]:
            silent.append(DummyLogger())
        return silent

    # Without subcommands, as with `run=False`, a LightningCLI would not read the config of a `fit`.
    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing runs."""


def _ways_out(said: str, command: str) -> Iterator[str]:
    """What to write instead, where a config is one of a LightningCLI in a program of the user's own.

    Args:
        said: By the parser.
        command: Such as ``fit``.
    """
    # Such a program names its classes in its code. Without a class_path they are taken for Lightning's base classes.
    base = re.search(r"class_path '[\w.]*\.Lightning(Data)?Module'", said)
    if base is not None:
        key = "data" if base[1] else "model"
        yield f"Name your class beside its arguments: '{key}: {{class_path: FILE.CLASS, init_args: ...}}'."
    # The parser names the section of the command line, which is no option.
    if re.search(rf"required: .*\b{command}\.model\b", said):
        yield f"Say what runs: dpx {command} --config FILE.yaml, with 'model: {{class_path: FILE.CLASS}}' in it."
    if f"does not accept option '{command}." in said:
        yield f"dpx {command} takes what a config has below '{command}:', without that line."


def _as_list(given: Any) -> list[Any]:
    """What a Trainer takes as one or as a list of them, as a list."""
    if given is None:
        return []
    if isinstance(given, list | tuple):
        return list(given)
    return [given]
