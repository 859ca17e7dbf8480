"""``dpx fit``, ``validate``, ``test``, ``predict``: a LightningCLI in which everything of this package has its name."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_dpx.errors import ConfigurationError, UnsupportedError
from lightning_dpx.simulate import simulate

SUBCOMMANDS = ("fit", "validate", "test", "predict")


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

    num_devices: int = 8
    memory: int | str | list[int | str] | None = None
    speed: float | list[float] = 1.0
    link: int | str | None = None
    latency: float = 0.0


def add_to(commands: Any) -> None:
    """Adds the commands to ``dpx``."""
    for name in SUBCOMMANDS:
        command = commands.add_parser(
            name, help=f"{name} with a config: dpx {name} --config run.yaml (--help: every option)", add_help=False
        )
        command.set_defaults(run=lambda _, others, name=name: run(name, others), takes_more=True)


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs a subcommand of the LightningCLI.

    Raises:
        UnsupportedError: jsonargparse is missing.
    """
    make_cli([name, *arguments], execute=True)
    return 0


def make_cli(arguments: list[str], *, execute: bool, **trainer: Any) -> Any:
    """A LightningCLI for ``arguments``, the first of which is a subcommand.

    Args:
        arguments: Of the command line.
        execute: Whether the subcommand runs, or everything is only made.
        trainer: Arguments of the Trainer that are not up to the user.

    Raises:
        UnsupportedError: jsonargparse is missing.
    """
    try:
        import jsonargparse  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("Configs need jsonargparse; pip install 'lightning-dpx[cli]'.") from error
    if str(Path.cwd()) not in sys.path:  # what `python` itself does, and an installed command does not
        sys.path.insert(0, str(Path.cwd()))
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

    class SaveConfig(SaveConfigCallback):
        """Beside the logs; without a logger it would go to the current folder, and a second run would be refused."""

        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            if trainer.loggers:
                super().setup(trainer, pl_module, stage)

    class CLI(LightningCLI):
        """Configured by files: the strategy is dpx unless another one is named."""

        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.add_argument("--simulate", type=SimulatedDevices | None, default=None, help="devices to rehearse on")

        def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
            self.config = parser.parse_args(args)  # Lightning warns of arguments that are not the process's own

        def before_instantiate_classes(self) -> None:
            chosen = self._get(self.config, "simulate")
            if chosen is not None:
                simulate(**(asdict(chosen) if isinstance(chosen, SimulatedDevices) else vars(chosen)))

        def instantiate_classes(self) -> None:
            try:
                super().instantiate_classes()
            except (TypeError, ValueError) as error:
                said, *_ = str(error).partition("\nGiven value type")
                raise ConfigurationError(said) from error

        def instantiate_trainer(self, **kwargs: Any) -> Trainer:
            return super().instantiate_trainer(**kwargs, **trainer)

        def _run_subcommand(self, subcommand: str) -> None:
            if execute:
                super()._run_subcommand(subcommand)

    return CLI(
        seed_everything_default=0,
        trainer_defaults={"strategy": {"class_path": "lightning_dpx.DPXStrategy"}},
        save_config_callback=SaveConfig if execute else None,
        parser_kwargs={"prog": "dpx"},
        args=arguments,
    )
