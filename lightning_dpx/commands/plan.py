"""``dpx plan``: what a config would take on devices that need not be there, and what to recompute so that it fits."""

import argparse
import itertools
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_dpx.commands import plan_ranks, plan_times
from lightning_dpx.commands.plan_ranks import as_one_rank, check_ranks, num_ranks, ranks_of_fsdp2
from lightning_dpx.commands.plan_times import as_dicts, check_times, format_steps, machines_of, section_of
from lightning_dpx.commands.progress import done, progress
from lightning_dpx.commands.train import make_cli
from lightning_dpx.commands.usage import DOES_NOT_FIT
from lightning_dpx.errors import BudgetError, ConfigurationError, PlanError, UnsupportedError
from lightning_dpx.lightning import (
    ActivationPlanner,
    DeviceForecast,
    DeviceMemoryMonitor,
    DeviceThroughputMonitor,
    DPXStrategy,
    DryRun,
    Settings,
    dry_run,
    with_merged_replicas,
)
from lightning_dpx.lightning.lightning_api import Checkpoint, PossibleUserWarning
from lightning_dpx.lightning.lightning_compat import look_up
from lightning_dpx.lightning.memory.rank_run import rank_run
from lightning_dpx.lightning.memory.step_times import Machines
from lightning_dpx.lightning.monitors.base import format_rows
from lightning_dpx.lightning.silence_lightning import quiet_lightning
from lightning_dpx.memory import PLANNERS, describe_cut, format_plan, plan_profile
from lightning_dpx.memory.plan_cache import PlanCache
from lightning_dpx.pictures import DeviceStep, Section, draw_devices, draw_plan, draw_prices, save_figure, write_page
from lightning_dpx.progress import shown
from lightning_dpx.simulate import simulate
from lightning_dpx.units import format_part, parse_bytes, parse_share, unit_of_table

HEADS = (
    "device", "rows", "parameters", "gradients", "optimizer", "buffers", "inputs", "activations", "planned",
    "peak", "budget", "extra time", "fits",
)  # fmt: skip
_MOST_ROWS = 8  # of the table; where there are more devices, equal ones share a row
CHECKED_BY_A_RUN = "Whether micro-batches give what one device gives is checked before the first step of a run."
# They write files or watch devices, and here no step is trained.
NOT_NEEDED = (Checkpoint, DeviceMemoryMonitor, DeviceThroughputMonitor, ActivationPlanner)


def add_to(commands: Any) -> None:
    """Adds the command to ``dpx``."""
    plan = commands.add_parser(
        "plan",
        help="predict memory and time of a run on devices that need not be there, and plan what to recompute",
        description="Profiles one step of a config on this machine's CPU, with tensors that take no memory where the "
        "step allows that, and predicts every device's peak; with rates (--link, --network, ...) also the time of a "
        "step on 1 to N nodes, and with --strategy what a rank of FSDP2 or DDP takes. Exit status "
        "0: it fits; 2: it does not; 1: an error. All that `dpx fit` takes can follow (--model ..., --data ...).",
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
    plan_ranks.add_options(plan)
    plan_times.add_options(plan)
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.set_defaults(run=run, takes_more=True)


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
        cli = cli_on_one_cpu(args, others)
        settings = _settings(args, cli)
        with shown("planning memory"):
            run_of = cli.trainer, cli.model, cli.datamodule
            if args.strategy == "dpx":
                return dry_run(*run_of, settings, progress), settings, None
            as_one = as_one_rank(args, cli, settings)
            if args.strategy == "fsdp2":
                found = rank_run(*run_of, as_one, ranks_of_fsdp2(args, cli, settings), progress)
            else:
                found = dry_run(*run_of, as_one, progress)
            return found, settings, num_ranks(args, cli, settings)


def _report(found: DryRun, settings: Settings, ranks: int | None) -> dict[str, Any]:
    """The forecast as JSON has it."""
    report: dict[str, Any] = {
        "fits": found.fits,
        "basis": found.basis,
        "devices": [_as_dict(forecast) for forecast in found.forecasts],
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
    devices = args.devices or look_up(cli, cli.config, "trainer.devices")
    settings = settings_of(chosen, args.budget, devices, args.planner)
    settings = replace(settings, cache=PlanCache(args.plan_cache, TellOnce()))
    if args.micro_batches is not None:
        settings = replace(settings, micro_batches=parse_number(args.micro_batches))
    # With other strategies it is the memory of a rank that depends on the number of nodes.
    if args.strategy != "dpx":
        return settings
    nodes = look_up(cli, cli.config, "trainer.num_nodes")
    return replace(settings, machines=machines_of(args, chosen, settings.devices, nodes))


def tell(text: str) -> None:
    """Says it on standard error, after what :func:`progress` says."""
    done()
    print(text, file=sys.stderr)


class TellOnce:
    """Says a sentence once, however many devices and batch sizes it is true of."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, text: str) -> None:
        """Says it, unless it was said before."""
        if text not in self._said:
            self._said.add(text)
            tell(text)


@contextmanager
def written(option: str, path: Path) -> Iterator[None]:
    """Tells an error of the file system by the option that named the file.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"--{option} {path} cannot be written: {error.strerror or error}. Name another file."
        ) from error


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


def add_devices(parser: argparse.ArgumentParser) -> None:
    """The argument that says for which devices."""
    parser.add_argument(
        "--devices",
        help='a number of CUDA devices, whatever the accelerator of the config is, or names such as "cuda:0,cuda:1" or '
        '"cpu"; the number of the config unless given',
    )


def cli_on_one_cpu(args: argparse.Namespace, others: Sequence[str]) -> Any:
    """What the config makes, for a step that is only looked at: without callbacks that take no part in it."""
    configs: list[str] = []
    for config in args.config:
        configs += ["--config", config]
    # The Trainer is one of this machine's CPU; the strategy of the config is only read, as it
    # would ask for its devices.
    cli = make_cli(["fit", *configs, *others], execute=False, **on_one_cpu())
    kept = [callback for callback in cli.trainer.callbacks if not isinstance(callback, NOT_NEEDED)]
    cli.trainer.callbacks[:] = kept
    return cli


def on_one_cpu() -> dict[str, Any]:
    """What a dry run changes in a config: no step is trained, and no device of the config is needed."""
    return {
        "accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "num_sanity_val_steps": 0,
    }  # fmt: skip


def settings_of(strategy: Any, budget: str | None, devices: Any, planner: str | None) -> Settings:
    """What of a config, and of the command line, decides about memory.

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
    )
    return with_merged_replicas(settings)


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
        ConfigurationError: none of these.
    """
    # What a Trainer does without a word of devices, and the usual config has none.
    if devices in ("auto", -1, "-1"):
        raise ConfigurationError(
            f"devices={devices!r} means all that a machine has, and the devices need not be here; give --devices a "
            "number, or names: cuda:0,cuda:1."
        )
    try:
        if isinstance(devices, list):
            parts = devices
        elif isinstance(devices, str) and not devices.isdigit():
            parts = [part.strip() for part in devices.split(",")]
        else:
            # As a Trainer takes it: a number is how many, a list names which.
            parts = list(range(int(devices)))
        found = tuple(_device(str(part)) for part in parts)
    # torch.device raises a RuntimeError for a type that it does not know.
    except (TypeError, ValueError, RuntimeError):
        found = ()
    if not found:
        raise ConfigurationError(f"--devices {devices!r} is not allowed; give a number, or names: cuda:0,cuda:1.")
    return found


def _device(name: str) -> torch.device:
    device = torch.device(f"cuda:{name}" if name.isdigit() else name)
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


def _heads(found: DryRun) -> tuple[str, ...]:
    # Most runs have neither, and the table is wide already.
    heads = list(HEADS)
    if _communicates(found):
        heads.insert(heads.index("activations"), "communication")
    if _is_cut(found):
        heads.append("micro-batches")
    return tuple(heads)


def _communicates(found: DryRun) -> bool:
    return any(one.communication for one in found.forecasts)


def _is_cut(found: DryRun) -> bool:
    return any(one.plan is not None and one.plan.micro_batches > 1 for one in found.forecasts)


def _unit_of(found: DryRun) -> tuple[str, int]:
    return unit_of_table(max(max(one.peak, one.smallest) for one in found.forecasts))


def _cells(found: DryRun) -> list[list[str]]:
    rows = []
    is_cut = _is_cut(found)
    _, unit = _unit_of(found)
    for one in found.forecasts:
        share = one.plan.recompute_share if one.plan is not None else None
        sizes = [one.parameters, one.gradients, one.optimizer, one.buffers, one.inputs]
        if _communicates(found):
            sizes.append(one.communication)
        sizes.append(one.unplanned)
        rows.append(
            [
                *(one.device, str(one.rows), *(f"{size / unit:.1f}" for size in sizes)),
                f"{one.plan.peak / unit:.1f}" if one.plan is not None and one.plan.peak is not None else "-",
                f"{one.peak / unit:.1f}",
                f"{one.budget / unit:.1f}" if one.budget else "-",
                f"{share:.1%}" if share is not None else "-",
                "yes" if one.fits else f"needs {one.smallest / unit:.1f}",
                *([_micro_batches(one)] if is_cut else []),
            ]
        )
    if len(rows) <= _MOST_ROWS:
        return rows
    return _with_equal_rows_joined(rows)


def _with_equal_rows_joined(rows: list[list[str]]) -> list[list[str]]:
    """The rows, those of devices in a row that differ in nothing but their names as one."""
    joined: list[list[str]] = []
    for _, group in itertools.groupby(rows, key=lambda row: row[1:]):
        first, *others = group
        name = f"{first[0]} to {others[-1][0]}" if others else first[0]
        joined.append([name, *first[1:]])
    return joined


def _micro_batches(one: DeviceForecast) -> str:
    if one.plan is None or one.plan.micro_batches == 1:
        return "-"
    return f"{one.plan.micro_batches} x {one.plan.micro_batch_rows}"


def _cuts(found: DryRun) -> list[str]:
    """A sentence for every device whose slice is cut."""
    lines = []
    for one in found.forecasts:
        if one.plan is not None and one.plan.micro_batches > 1:
            peak = f"peak {format_part(one.peak, one.budget or one.static + one.unplanned)}"
            lines.append(f"{one.device}: {describe_cut(one.plan)}, {peak}")
    if lines:
        lines.append(CHECKED_BY_A_RUN)
    return lines


def format_dry_run(found: DryRun) -> str:
    """A table, and the plan of the tightest device."""
    unit, _ = _unit_of(found)
    how = f" {found.basis}" if found.basis else ""
    table = format_rows(f"a training step, in {unit}, predicted{how}:", _heads(found), _cells(found))
    table = "\n".join([table, *_cuts(found)])
    tightest = found.tightest
    if tightest is None or tightest.plan is None or tightest.plan.keeps_all:
        return table
    return f"{table}\n\nplan of {tightest.device}:\n{format_plan(tightest.plan)}"


def _as_dict(forecast: DeviceForecast) -> dict[str, Any]:
    # A plan has an entry for each value of a step; JSON gets its few numbers alone.
    values = asdict(replace(forecast, plan=None))
    del values["plan"]
    plan = forecast.plan
    return {
        **values,
        # These are properties, which asdict leaves out.
        "peak": forecast.peak,
        "fits": forecast.fits,
        "extra_time_share": None if plan is None else plan.recompute_share,
        "micro_batches": None if plan is None else plan.micro_batches,
        "micro_batch_rows": None if plan is None else plan.micro_batch_rows or forecast.rows,
        "values_recomputed": None if plan is None else plan.num_recomputed,
    }


def write_report(found: DryRun, path: Path, machines: Machines | None = None) -> None:
    """A page with everything, or the first of its pictures.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    steps = []
    for one in found.forecasts:
        lasting = {kind: getattr(one, kind) for kind in ("parameters", "gradients", "optimizer", "buffers")}
        # Where no plan fits, the least that one would need stands in its place.
        second = "planned" if one.fits else "the least"
        peaks = {"everything kept": one.static + one.unplanned, second: one.needed}
        steps.append(DeviceStep(one.device, lasting, peaks, budget=one.budget))
    devices = draw_devices(steps, "Memory of a training step, predicted")
    # A picture file has room for one figure, and the devices come first.
    if path.suffix != ".html":
        save_figure(devices, path)
        return
    sections = [
        Section(
            "Devices",
            f"Predicted for one training step, in {_unit_of(found)[0]}.",
            _heads(found),
            _cells(found),
            [devices],
            printed="\n".join(_cuts(found)),
        ),
    ]
    tightest = found.tightest
    if tightest is not None and tightest.plan is not None:
        profile = found.profile_of(tightest)
        plan = tightest.plan
        progress("planning for other budgets")
        chosen = (plan.peak or 0, plan.recompute_share or 0.0)
        prices = draw_prices([chosen, *prices_of(found, tightest)], tightest.unplanned, chosen)
        sections += [
            Section("What a budget costs", "Activations alone; the rest of a device's memory comes on top.",
                    figures=[prices]),
            Section("The plan", f"For {tightest.device}, whose room is the least.",
                    figures=[draw_plan(profile, plan)], printed=format_plan(plan, most_rows=1000)),
        ]  # fmt: skip
    if machines is not None:
        sections.append(section_of(found.steps, machines))
    write_page(path, "dpx: memory plan", sections)


def prices_of(found: DryRun, forecast: DeviceForecast, points: int = 8) -> list[tuple[int, float]]:
    """Peaks and extra times of a device's plans between the smallest and the unplanned peak."""
    prices = []
    # Without a budget the planner goes as low as it can. The profile is all that it reads, so an
    # empty module stands for the model.
    smallest = plan_profile(torch.nn.Module(), found.profile_of(forecast), None)
    low = smallest.peak or 0
    for step in range(points + 1):
        # The unplanned peak itself is drawn anyway, at no extra time.
        budget = low + (forecast.unplanned - low) * step // (points + 1)
        try:
            plan = found.plan_at(forecast, budget)
        except BudgetError:
            continue
        prices.append((plan.peak or 0, plan.recompute_share or 0.0))
    return prices
