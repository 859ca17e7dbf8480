"""``dpx plan``: what a config would take on devices that need not be there, and what to recompute so that it fits."""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_dpx.commands import plan_ranks, plan_times
from lightning_dpx.commands.output import TellOnce, written
from lightning_dpx.commands.plan_arguments import (
    add_devices,
    add_dry,
    add_plan_cache,
    check_config,
    check_files,
    check_settings,
    cli_to_look,
    devices_of,
    look_on_device,
    parse_number,
    settings_of,
)
from lightning_dpx.commands.plan_ranks import as_one_rank, check_ranks, num_ranks, ranks_of_fsdp2
from lightning_dpx.commands.plan_report import write_report
from lightning_dpx.commands.plan_table import forecast_as_dict, format_dry_run
from lightning_dpx.commands.plan_times import as_dicts, check_times, format_steps, machines_of
from lightning_dpx.commands.progress import done, progress
from lightning_dpx.commands.usage import DOES_NOT_FIT
from lightning_dpx.errors import PlanError
from lightning_dpx.lightning import (
    DryRun,
    Settings,
    dry_run,
)
from lightning_dpx.lightning.lightning_api import PossibleUserWarning
from lightning_dpx.lightning.lightning_compat import look_up
from lightning_dpx.lightning.memory.rank_run import rank_run
from lightning_dpx.lightning.silence_lightning import quiet_lightning
from lightning_dpx.memory import PLANNERS
from lightning_dpx.memory.plan_cache import PlanCache
from lightning_dpx.progress import shown


def add_to(commands: Any) -> None:
    """Adds the command to ``dpx``."""
    plan = commands.add_parser(
        "plan",
        help="predict memory and time of a run on devices that need not be there, and plan what to recompute",
        description="Profiles one step of a config, on the first of its devices that is there, or else on this "
        "machine's CPU with tensors that take no memory, where the step allows that, and predicts every device's peak; "
        "with rates (--link, --network, ...) also the time of a step on 1 to N nodes, and with --strategy what a rank "
        "of FSDP2 or DDP takes. Exit status 0: it fits; 2: it does not; 1: an error. All that `dpx fit` takes can "
        "follow (--model ..., --data ...).",
    )
    plan.add_argument("--config", action="append", default=[], metavar="FILE", help="of `dpx fit`; may be repeated")
    plan.add_argument(
        "--budget",
        # argparse formats help texts, so a percent sign is written twice.
        help='for everything on a device: "8GiB", bytes, or "60%%" of what it would take without a plan; the config\'s '
        "unless given",
    )
    add_devices(plan)
    plan.add_argument("--planner", choices=list(PLANNERS), help="the config's unless given")
    plan.add_argument(
        "--micro-batches", metavar="M",
        help='cut every device\'s slice into M micro-batches, or "auto": as many as are fastest within the budget; the '
        "config's unless given",
    )  # fmt: skip
    plan.add_argument("--save", type=Path, metavar="FILE", help="write the plan, for DPXStrategy(plan=FILE)")
    plan.add_argument("--report", type=Path, metavar="FILE", help="write a page (.html) or a picture (.png, .svg)")
    add_plan_cache(plan)
    add_dry(plan)
    plan_ranks.add_options(plan)
    plan_times.add_options(plan)
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.set_defaults(run=run, takes_more=True)


def run(args: argparse.Namespace, others: Sequence[str]) -> int:
    """Plans; the status says whether the run fits.

    Raises:
        ConfigurationError: an argument, or the config, has a value that is not allowed.
        PlanError: there is nothing to save.
    """
    # Before a model is made, which may take minutes.
    check_config(args, others)
    check_files(args)
    check_settings(args)
    check_times(args)
    check_ranks(args)
    found, settings, ranks = _forecast(args, others)
    # The line of progress goes before anything else is printed.
    done()
    if args.json:
        print(json.dumps(_report(found, settings, ranks)))
    else:
        if ranks is not None:
            print(f"one of {ranks} processes with --strategy {args.strategy}:")
        print(format_dry_run(found))
        num_devices = len(set(settings.devices))
        num_idle = num_devices - len(found.forecasts)
        if num_idle > 0 and ranks is None:
            print(f"{num_idle} of {num_devices} devices get no rows of this batch, and idle.")
        if settings.machines is not None:
            print(f"\n{format_steps(found.steps, settings.machines)}")
    if args.save is not None:
        _save(found, args.save)
    if args.report is not None:
        with written("report", args.report):
            write_report(found, args.report, settings.machines)
        # Standard output holds the result alone, so that it can be read by other programs.
        done()
    if found.fits:
        return 0
    return DOES_NOT_FIT


def _forecast(args: argparse.Namespace, others: Sequence[str]) -> tuple[DryRun, Settings, int | None]:
    """What a step takes, for which settings, and how many processes run it where a strategy has several."""
    with warnings.catch_warnings(), quiet_lightning():
        warnings.simplefilter("ignore", PossibleUserWarning)  # advice on loaders and loggers of a run that is none
        warnings.simplefilter("ignore", FutureWarning)
        cli = cli_to_look(args, others)
        settings = _settings(args, cli)
        with shown("planning memory"):
            if args.strategy == "dpx":
                return _dry_run(args, cli, settings), settings, None
            as_one = as_one_rank(args, cli, settings)
            if args.strategy == "fsdp2":
                ranks = ranks_of_fsdp2(args, cli, settings)
                found = rank_run(cli.trainer, cli.model, cli.datamodule, as_one, ranks, progress)
            else:
                found = _dry_run(args, cli, as_one)
            return found, settings, num_ranks(args, cli, settings)


def _dry_run(args: argparse.Namespace, cli: Any, settings: Settings) -> DryRun:
    """A step of the config, on its device where that is there."""
    return look_on_device(
        args,
        cli,
        settings.devices,
        lambda cli: dry_run(cli.trainer, cli.model, cli.datamodule, settings, progress),
    )


def _report(found: DryRun, settings: Settings, ranks: int | None) -> dict[str, Any]:
    """The forecast as JSON has it."""
    report: dict[str, Any] = {
        "fits": found.fits,
        "basis": found.basis,
        "devices": [forecast_as_dict(forecast) for forecast in found.forecasts],
    }
    if ranks is not None:
        report["ranks"] = ranks
    if settings.machines is not None:
        report["steps"] = as_dicts(found.steps)
    return report


def _save(found: DryRun, path: Path) -> None:
    """Saves the plan of the device with least room.

    Raises:
        PlanError: no device has anything to plan.
    """
    tightest = found.tightest
    if not found.fits:
        # The table tells what is missing, so this is no error, and the status is that of a run
        # that does not fit.
        print(f"dpx: Not all devices can meet their budget: nothing is saved in {path}.", file=sys.stderr)
    elif tightest is None or tightest.plan is None:
        raise PlanError(f"No device has activations to plan, so there is no plan to save in {path}.")
    else:
        with written("save", path):
            tightest.plan.save(path)


def _settings(args: argparse.Namespace, cli: Any) -> Settings:
    """Of the config, with what the command line says of the run."""
    # The initialized config holds the strategy as an object, and the other one the number of
    # devices as it was written.
    chosen = look_up(cli, cli.config_init, "trainer.strategy")
    nodes = look_up(cli, cli.config, "trainer.num_nodes")
    settings = settings_of(chosen, args.budget, devices_of(args, cli), args.planner, num_nodes=nodes)
    settings = replace(settings, cache=PlanCache(args.plan_cache, TellOnce()))
    if args.micro_batches is not None:
        settings = replace(settings, micro_batches=parse_number(args.micro_batches))
    # With other strategies it is the memory of a rank that depends on the number of nodes.
    if args.strategy != "dpx":
        return settings
    return replace(settings, machines=machines_of(args, chosen, settings.devices, nodes))
