"""The config that ``dpx tune`` measures and saves: the user's, with a batch size and what it was found for."""

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from lightning_dpx.commands.output import tell
from lightning_dpx.commands.plan_arguments import parse_devices, parse_number
from lightning_dpx.devices import accelerators
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning import DPXStrategy

# Where configs of a LightningCLI usually have it: in a data module or in the model, with or without
# a class path.
KEYS = ("data.init_args.batch_size", "data.batch_size", "model.init_args.batch_size", "model.batch_size")


def config_of(cli: Any) -> dict[str, Any]:
    """The whole config of a fit, as it would be written to a file."""
    # By way of text, so that it is what a file would hold, and classes are named by their paths.
    config: dict[str, Any] = yaml.safe_load(cli.parser.dump(cli.config))["fit"]
    return config


def key_of(args: argparse.Namespace, config: dict[str, Any]) -> str:
    """Where the config says the batch size.

    Raises:
        ConfigurationError: nowhere, or in several places.
    """
    if args.batch_size_key is not None:
        given = _value_at(config, args.batch_size_key)
        # A section would be lost under the number that is written in its place.
        if isinstance(given, dict | list):
            raise ConfigurationError(
                f"--batch-size-key {args.batch_size_key} is not allowed: it is a section of the config; name a key "
                f"within it, such as {args.batch_size_key}.batch_size."
            )
        if given is None:
            raise ConfigurationError(
                f"--batch-size-key {args.batch_size_key} is not allowed: the config has no such key."
            )
        return str(args.batch_size_key)
    found = [key for key in KEYS if _value_at(config, key) is not None]
    if len(found) != 1:
        said = "says the batch size in " + " and ".join(found) if found else f"says it in none of {', '.join(KEYS)}"
        raise ConfigurationError(
            f"--save and --measure set the batch size in the config, which {said}; name the place with "
            "--batch-size-key KEY."
        )
    return found[0]


def _value_at(config: dict[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        # A key may end in the middle of the config, or go past a value of another kind.
        value = value.get(part) if isinstance(value, dict) else None
    return value


def check_devices(args: argparse.Namespace) -> None:
    """Whether a Trainer can be told of the devices, and where runs are measured, whether they are there.

    Raises:
        ConfigurationError: they are of several types, one is named twice, or one is not there.
    """
    if not _are_named(args):
        return
    devices = parse_devices(args.devices)
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise ConfigurationError(
            f"--devices {args.devices} is not allowed with --save and --measure: a Trainer has devices of one type."
        )
    # Replicas may share a CPU, which a Trainer counts, and no accelerator, which it names.
    if kinds != {"cpu"} and len(set(devices)) < len(devices):
        raise ConfigurationError(
            f"--devices {args.devices} is not allowed with --save and --measure: a Trainer takes each device once."
        )
    # Simulated ones are made when the Trainer asks for them.
    if args.measure and not kinds & {"cpu", "sim"}:
        missing = [str(device) for device in devices if device not in accelerators()]
        if missing:
            raise ConfigurationError(
                f"--measure trains on the devices, and {' and '.join(missing)} cannot be found here; leave it out, or "
                "name devices of this machine."
            )


def _are_named(args: argparse.Namespace) -> bool:
    return args.devices is not None and not args.devices.isdigit()


def tell_other_devices(args: argparse.Namespace, config: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Says where what is predicted for one type of device is measured, or saved, for another one."""
    accelerator = config["trainer"]["accelerator"]
    kind = devices[0].type
    same = ("auto", kind, "gpu") if kind == "cuda" else ("auto", kind)
    # Devices that are named are written to the config, and nothing differs.
    if _are_named(args) or accelerator in same:
        return
    tell(
        f"dpx: what is predicted is for {', '.join(map(str, devices))}, and the config trains with "
        f"accelerator={accelerator!r}; name the devices of the run, as in --devices {accelerator}."
    )


def tuned_config(args: argparse.Namespace, whole: dict[str, Any], key: str, batch_size: int) -> dict[str, Any]:
    """The config with the batch size, and with what else it was predicted with."""
    # Every candidate has a config of its own.
    config = copy.deepcopy(whole)
    *folders, name = key.split(".")
    # A key may lead through several levels, as those of class paths do.
    place = config
    for folder in folders:
        place = place[folder]
    place[name] = batch_size
    trainer = config["trainer"]
    if args.devices is not None:
        _set_devices(trainer, args)
    changed = {"memory_budget": args.budget, "planner": args.planner}
    # "auto" is what the strategy does by itself where nothing else is said.
    if args.budget is not None or args.micro_batches != "auto":
        changed["micro_batches"] = parse_number(args.micro_batches)
    # What the command line does not say stays as the config has it.
    changed = {option: value for option, value in changed.items() if value is not None}
    if changed:
        strategy = trainer.get("strategy")
        is_ours = isinstance(strategy, dict) and strategy["class_path"].endswith(DPXStrategy.__name__)
        kept = strategy.get("init_args", {}) if is_ours else {}
        # Other strategies know neither budgets nor planners.
        class_path = f"lightning_dpx.{DPXStrategy.__name__}"
        trainer["strategy"] = {"class_path": class_path, "init_args": {**kept, **changed}}
    return config


def _set_devices(trainer: dict[str, Any], args: argparse.Namespace) -> None:
    """Writes the devices of the command line as a Trainer takes them."""
    devices = parse_devices(args.devices)
    # A number is how many, of the type that the config has.
    if not _are_named(args) or devices[0].type == "cpu":
        trainer["devices"] = len(devices)
    else:
        trainer["devices"] = [device.index for device in devices]
    if _are_named(args):
        trainer["accelerator"] = devices[0].type
    # Lightning's own choice for several devices is DDP, and the prediction is of this package's strategy.
    if len(devices) > 1 and trainer.get("strategy") == "auto":
        trainer["strategy"] = {"class_path": f"lightning_dpx.{DPXStrategy.__name__}"}
