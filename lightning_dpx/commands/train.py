"""``dpx fit``, ``validate``, ``test``, ``predict``: a LightningCLI in which everything of this package has its name."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_dpx.commands.config import ConfigCLI, InstantiateOnlyCLI, SaveConfig
from lightning_dpx.errors import UnsupportedError

SUBCOMMANDS = ("fit", "validate", "test", "predict")


def add_to(commands: Any) -> None:
    """Adds the commands to ``dpx``."""
    for name in SUBCOMMANDS:
        # Without a --help of argparse's, so that it reaches the LightningCLI with all its options.
        command = commands.add_parser(
            name, help=f"{name} with a config: dpx {name} --config run.yaml (--help: every option)", add_help=False
        )
        # The default binds this name: the lambda runs when the loop is over.
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
        trainer: Where nothing runs, arguments of the Trainer that are not up to the user.

    Raises:
        UnsupportedError: jsonargparse is missing.
    """
    try:
        # Asked for before config.py's CLI is used, whose own error names no extra to install.
        import jsonargparse  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("Configs need jsonargparse; pip install 'lightning-dpx[cli]'.") from error
    if str(Path.cwd()) not in sys.path:  # what `python` itself does, and an installed command does not
        sys.path.insert(0, str(Path.cwd()))
    cli = ConfigCLI if execute else partial(InstantiateOnlyCLI, trainer)
    return cli(
        seed_everything_default=0,
        # A config that names no strategy is run by ours.
        trainer_defaults={"strategy": {"class_path": "lightning_dpx.DPXStrategy"}},
        save_config_callback=SaveConfig if execute else None,
        # The parser of a Trainer has 50 lines of usage, above which an error would scroll away.
        parser_kwargs={"prog": "dpx", "exit_on_error": False},
        args=arguments,
    )
