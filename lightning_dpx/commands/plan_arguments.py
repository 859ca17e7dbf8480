"""What the command line and a config say of a run that is only planned, read and checked before a model is made."""

import argparse
import os
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from lightning_dpx.commands.train import make_cli
from lightning_dpx.devices import is_host, is_modelled
from lightning_dpx.errors import ConfigurationError, UnsupportedError
from lightning_dpx.lightning import (
    ActivationPlanner,
    DeviceMemoryMonitor,
    DeviceThroughputMonitor,
    DPXStrategy,
    Settings,
    with_merged_replicas,
)
from lightning_dpx.lightning.lightning_api import Checkpoint, ClusterEnvironment
from lightning_dpx.lightning.lightning_compat import look_up
from lightning_dpx.lightning.memory.dry_run.place import on_its_device, trainer_to_look
from lightning_dpx.lightning.memory.micro_batch_obstacles import RunToCut
from lightning_dpx.simulate import simulate
from lightning_dpx.units import parse_bytes, parse_share

Found = TypeVar("Found")
_MOST_DEVICES = 128  # of a type, to torch
# They write files or watch devices, and here no step is trained.
NOT_NEEDED = (Checkpoint, DeviceMemoryMonitor, DeviceThroughputMonitor, ActivationPlanner)


def add_devices(parser: argparse.ArgumentParser) -> None:
    """The argument that says for which devices."""
    parser.add_argument(
        "--devices",
        help='a number of CUDA devices, whatever the accelerator of the config is, or names such as "cuda:0,cuda:1" or '
        '"cpu"; those of the config unless given, which are CUDA devices if its accelerator is neither cpu nor sim',
    )


def add_dry(command: argparse.ArgumentParser) -> None:
    """Adds the option that leaves devices alone."""
    command.add_argument(
        "--dry", action="store_true",
        help="use no device, though it is there: predict from tensors that take no memory, as for devices that are not",
    )  # fmt: skip


def add_plan_cache(command: argparse.ArgumentParser) -> None:
    """Adds the options that say where plans are kept."""
    command.add_argument(
        "--plan-cache", default=True, metavar="FOLDER",
        help="where profiles and plans of earlier calls are found again, for the same model, code, shapes, budget and "
        "versions (default: lightning_dpx/plans in the user's folder for caches)",
    )  # fmt: skip
    command.add_argument(
        "--no-plan-cache", dest="plan_cache", action="store_false", help="profile and plan anew, and keep nothing"
    )


def settings_of(
    strategy: Any, budget: str | None, devices: Any, planner: str | None, *, num_nodes: Any = 1
) -> Settings:
    """What of a config, and of the command line, decides about memory.

    Args:
        strategy: Of the config.
        budget: Of the command line, as all that follow.
        devices: Of a node.
        planner: By its name.
        num_nodes: Of the config.

    Raises:
        ConfigurationError: no devices, or a budget that needs the devices to be there.
        UnsupportedError: the config shifts parts of the model, or runs replicas beside each other on one device.
    """
    # A config of another strategy is planned for as ours would run it.
    own = strategy if isinstance(strategy, DPXStrategy) else DPXStrategy()
    if own.options.shifts_activations:
        raise UnsupportedError("dpx plan does not know what shifts would move; leave them out of the config.")
    parsed = parse_devices(devices)
    if own.options.execution != "auto" and len(set(parsed)) < len(parsed):
        raise UnsupportedError(
            f"execution={own.options.execution!r} runs replicas beside each other that share a device, and what they "
            'take is not predicted; leave it "auto", so that they take their slices as one, or name each device once.'
        )
    settings = Settings(
        devices=parsed,
        workload=own.workload,
        batch_dim=own.batch_dim,
        batch_slicer=own.batch_slicer,
        reducer=own.reducer,
        budget=_budgets(budget if budget is not None else own.memory_budget, parsed),
        planner=planner or own.planner,
        micro_batches=own.micro_batches,
        # Each node has a process of its own.
        run=RunToCut(verify=own.options.verify, has_processes=int(num_nodes) > 1),
    )
    return with_merged_replicas(settings)


def devices_of(args: argparse.Namespace, cli: Any) -> Any:
    """What ``--devices`` says, or the config, for :func:`parse_devices`."""
    if args.devices:
        return args.devices
    devices = look_up(cli, cli.config, "trainer.devices")
    accelerator = look_up(cli, cli.config, "trainer.accelerator")
    # Of these alone every machine has as many as are asked for, so that a config means them.
    if accelerator not in ("cpu", "sim"):
        return devices
    # A Trainer takes one, where nothing is said.
    number = 1 if devices == "auto" else int(devices)
    return ",".join(f"{accelerator}:{index}" if accelerator == "sim" else accelerator for index in range(number))


def check_config(args: argparse.Namespace, others: Sequence[str]) -> None:
    """Whether anything says what is trained.

    Raises:
        ConfigurationError: nothing does.
    """
    # As `dpx fit` takes them; its own message is of a key of its parser.
    said = any(option.partition("=")[0] in ("--model", "-c") for option in others)
    if not args.config and not said:
        raise ConfigurationError(
            "Nothing says what is trained: give --config FILE, or --model and --data, as to `dpx fit`."
        )


def check_files(args: argparse.Namespace) -> None:
    """Whether files can be read and written that the arguments name, before a model is made.

    Raises:
        ConfigurationError: a file or a folder is not there, or a file is none.
        UnsupportedError: matplotlib is missing.
    """
    if args.report is not None and args.report.suffix not in (".html", ".png", ".svg", ".pdf"):
        raise ConfigurationError(f"--report {args.report} is not allowed; name an .html, .png, .svg or .pdf file.")
    for option in ("save", "report"):
        path = getattr(args, option)
        # Refused, not made: a misspelled folder would take the result.
        if path is not None and not path.parent.is_dir():
            raise ConfigurationError(f"--{option} {path} is not allowed: there is no folder {path.parent}.")
        if path is not None and path.is_dir():
            raise ConfigurationError(f"--{option} {path} is not allowed: it is a folder; name a file.")
        # Without opening it, which would empty what is there.
        if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigurationError(f"--{option} {path} is not allowed: it may not be written; name another file.")
    if args.report is not None and find_spec("matplotlib") is None:
        raise UnsupportedError("Pictures need matplotlib; pip install 'lightning-dpx[plots]', or leave out --report.")
    for config in args.config:
        if Path(config).is_dir():
            raise ConfigurationError(f"--config {config} is not allowed: it is a folder; name a file in it.")
        if not Path(config).is_file():
            raise ConfigurationError(f"--config {config} is not allowed: there is no such file.")


def check_settings(args: argparse.Namespace) -> None:
    """Whether what the arguments say of a run is allowed, before a model is made.

    Raises:
        ConfigurationError: an argument has a value that is not allowed.
    """
    if args.budget is not None:
        _bytes(args.budget)
    if args.devices is not None:
        # torch knows the type only once there are such devices; a config may give them other sizes later.
        if "sim" in args.devices:
            simulate(16)
        parse_devices(args.devices)
    if args.micro_batches is not None:
        parse_number(args.micro_batches)


def _budgets(given: Any, devices: Sequence[torch.device]) -> int | float | dict[torch.device, int | float] | None:
    """The budget of every device, one for all, or none."""
    if given is None:
        return None
    if not isinstance(given, dict):
        return _bytes(given)
    # A device without an entry might be the one that does not fit.
    missing = [str(device) for device in devices if str(device) not in given]
    if missing:
        raise ConfigurationError(f"memory_budget={given!r} says nothing of {', '.join(missing)}; give it a budget.")
    return {device: _bytes(given[str(device)]) for device in devices}


def _bytes(budget: int | float | str) -> int | float:
    """A budget in bytes, or as a share of what a device would take without a plan."""
    if isinstance(budget, str) and "%" in budget:
        return parse_share("--budget", budget)
    # Both are shares of a device's own memory, which is not here to be asked.
    if isinstance(budget, float) or budget == "auto":
        raise ConfigurationError(
            f"memory_budget={budget!r} needs the devices to be there; give --budget in bytes, such as 8GiB, or as a "
            "share of what a device would take without a plan, such as 60%."
        )
    # A bare number is a text, too, on a command line.
    num_bytes = int(budget) if isinstance(budget, str) and budget.isdigit() else budget
    try:
        return parse_bytes("--budget", num_bytes)
    except ConfigurationError:
        raise ConfigurationError(
            f"--budget={budget!r} is not allowed; give positive bytes, such as 8GiB, or a share of what a device would "
            "take without a plan, such as 60%."
        ) from None


def parse_devices(devices: Any) -> tuple[torch.device, ...]:
    """``4`` and ``"4"``: ``cuda:0`` to ``cuda:3``; ``[0, 2]`` and ``"cuda:0,cuda:2"``: those; ``"cuda"``: the first.

    Raises:
        ConfigurationError: none of these, or an accelerator twice.
    """
    # What a Trainer does without a word of devices, and the usual config has none.
    if devices in ("auto", -1, "-1"):
        raise ConfigurationError(
            f"devices={devices!r} means all that a machine has, and the devices need not be here; give --devices a "
            "number, or names: cuda:0,cuda:1."
        )
    parts: Sequence[Any]
    try:
        if isinstance(devices, list):
            parts = devices
        elif isinstance(devices, str) and not devices.isdigit():
            parts = [part.strip() for part in devices.split(",")]
        else:
            # As a Trainer takes it: a number is how many, a list names which. No list of them is made, which would
            # fill the memory before torch refuses the first that it cannot count to.
            parts = range(int(devices))
        found = tuple(_device(str(part)) for part in parts)
    # torch.device raises a RuntimeError for a type that it does not know.
    except (TypeError, ValueError, RuntimeError):
        found = ()
    if not found:
        raise ConfigurationError(
            f"--devices {devices!r} is not allowed; give a number up to {_MOST_DEVICES}, or names: cuda:0,cuda:1."
        )
    # A Trainer refuses them, too; of the host and of simulated devices it takes several replicas.
    numbers = Counter(found)
    twice = [str(device) for device, number in numbers.items() if number > 1 and not _holds_several(device)]
    if twice:
        raise ConfigurationError(
            f"--devices {devices!r} is not allowed: it names {', '.join(twice)} twice. Name each device once."
        )
    return found


def _holds_several(device: torch.device) -> bool:
    return is_host(device) or is_modelled(device)


def _device(name: str) -> torch.device:
    device = torch.device(f"cuda:{name}" if name.isdigit() else name)
    # No device that anything runs on; and torch keeps an index in eight bits, so that 256 would be taken for 0.
    number = name.rpartition(":")[2]
    if device.type == "meta" or (number.isdigit() and int(number) != device.index):
        raise ValueError(name)
    # "The current one" has no meaning where no device need be there; of the CPU there is one.
    if device.index is None and device.type != "cpu":
        return torch.device(device.type, 0)
    return device


def parse_number(text: str) -> int | Literal["auto"]:
    """What ``--micro-batches`` says.

    Raises:
        ConfigurationError: neither a positive number nor ``"auto"``.
    """
    if text == "auto":
        return "auto"
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ConfigurationError(f'--micro-batches {text} is not allowed; give a positive number, or "auto".')


def cli_to_look(args: argparse.Namespace, others: Sequence[str]) -> Any:
    """What the config makes, for a step that is only looked at on this machine's CPU."""
    configs: list[str] = []
    for config in args.config:
        configs += ["--config", config]
    # The strategy of the config is only read, as it would ask for its devices.
    cli = make_cli(["fit", *configs, *others], execute=False, **trainer_to_look(torch.device("cpu")))
    _leave_out_callbacks(cli)
    return cli


def look_on_device(
    args: argparse.Namespace, cli: Any, devices: Sequence[torch.device], look: Callable[[Any], Found]
) -> Found:
    """What ``look(cli)`` finds, whose Trainer is one of the first device that is there; see :func:`on_its_device`."""

    def on(home: torch.device) -> Found:
        # It has one of the CPU already, unless a device has turned out to be too small.
        if cli.trainer.strategy.root_device != home:
            cli.make_trainer_again({**trainer_to_look(home), "plugins": _plugins_of_the_step(cli)})
            _leave_out_callbacks(cli)
        return look(cli)

    return on_its_device(devices, on, dry=args.dry)


def _plugins_of_the_step(cli: Any) -> list[Any]:
    """Those of the config without what tells of other processes, which take no part."""
    given = look_up(cli, cli.config_init, "trainer.plugins") or []
    plugins = given if isinstance(given, list | tuple) else [given]
    return [plugin for plugin in plugins if not isinstance(plugin, ClusterEnvironment)]


def _leave_out_callbacks(cli: Any) -> None:
    """Those that take no part in a step that is only looked at."""
    kept = [callback for callback in cli.trainer.callbacks if not isinstance(callback, NOT_NEEDED)]
    cli.trainer.callbacks[:] = kept
