"""``dpx tune``: which batch size, with or without recomputation and micro-batches, is fastest and fits."""

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from lightning_dpx.commands.output import TellOnce, tell, written
from lightning_dpx.commands.plan_arguments import (
    NOT_NEEDED,
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
from lightning_dpx.commands.plan_table import CHECKED_BY_A_RUN
from lightning_dpx.commands.progress import done, progress
from lightning_dpx.commands.train import make_cli
from lightning_dpx.commands.tuned_config import KEYS, check_devices, config_of, key_of, tell_other_devices, tuned_config
from lightning_dpx.commands.usage import DOES_NOT_FIT
from lightning_dpx.devices import synchronize
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning.lightning_api import Callback, LightningModule, PossibleUserWarning, Trainer
from lightning_dpx.lightning.lightning_compat import look_up
from lightning_dpx.lightning.monitors.base import format_rows
from lightning_dpx.lightning.silence_lightning import quiet_lightning
from lightning_dpx.lightning.tuning import BatchSizeForecast, TuneOptions, Tuning, rows_of_data, tune_batch_size
from lightning_dpx.memory import PLANNERS
from lightning_dpx.memory.plan_cache import PlanCache
from lightning_dpx.pictures import BatchSizePoint, Section, draw_batch_sizes, save_figure, write_page
from lightning_dpx.progress import shown
from lightning_dpx.units import unit_of_table

HEADS = (
    "batch size", "precision", "rows", "micro-batches", "recomputed", "extra time", "peak", "budget", "samples/s",
    "measured", "",
)  # fmt: skip
_MEASURED = 3  # of the best
_STEPS = 16  # of a measured run
_WARM_UP = 6  # of them: the first ones plan, rehearse and fill caches


def add_to(commands: Any) -> None:
    """Adds the command to ``dpx``."""
    tune = commands.add_parser(
        "tune",
        help="find the batch size that is fastest and fits, on devices that need not be there",
        description="Profiles a step of a config on two sizes, predicts peak and speed of other batch sizes from them, "
        "each with the memory plan and the micro-batches that its budget asks for, and names the smallest batch size "
        "that is about as fast as the fastest. The step runs on the first of the devices that is there, and is timed "
        "with Lightning's loop and loading without workers; where none is there, speed is that of forward, backward "
        "and optimizer on the slowest device, by FLOPs and bytes. Reductions between devices, hooks and callbacks of "
        "your own come on top, --measure shows by how much. Exit status 0: one fits; 2: none does; 1: an error. All "
        "that `dpx fit` takes can follow.",
    )
    tune.add_argument("--config", action="append", default=[], metavar="FILE", help="of `dpx fit`; may be repeated")
    tune.add_argument("--budget", help='for everything on a device: "8GiB" or bytes; the config\'s unless given')
    add_devices(tune)
    tune.add_argument("--planner", choices=list(PLANNERS), help="the config's unless given")
    tune.add_argument(
        "--micro-batches", default="auto", metavar="M",
        help='of every device\'s slice, or "auto" (default): as many as are fastest within the budget',
    )  # fmt: skip
    tune.add_argument(
        "--batch-sizes", metavar="B,B,...",
        help="over all devices (default: the config's, halved twice and doubled up to six times)",
    )  # fmt: skip
    tune.add_argument("--precisions", metavar="P,P,...", help="such as 32-true,bf16-mixed; the config's unless given")
    tune.add_argument(
        "--batch-size-key", metavar="KEY",
        help="where the config says the batch size, for --save and --measure (default: the one that is there of "
        f"{', '.join(KEYS)})",
    )  # fmt: skip
    tune.add_argument(
        "--measure", action="store_true",
        help=f"train the {_MEASURED} best for {_STEPS} steps each, on the devices of the config",
    )  # fmt: skip
    tune.add_argument(
        "--save", type=Path, metavar="FILE", help="write the best as a config, for `dpx fit --config FILE`"
    )
    tune.add_argument("--report", type=Path, metavar="FILE", help="write a page (.html) or a picture (.png, .svg)")
    add_plan_cache(tune)
    add_dry(tune)
    tune.add_argument("--json", action="store_true", help="print JSON instead of a table")
    tune.set_defaults(run=run, takes_more=True)


@dataclass(slots=True)
class _Candidate:
    """A batch size in a precision.

    Attributes:
        precision: As in the Trainer; as in the config where it is empty.
        forecast: What is predicted.
        config: Of a fit with it; empty where none was asked for.
        measured: Samples per second of a run; 0 where there was none.
        is_best: Whether it is the one to take.
    """

    precision: str
    forecast: BatchSizeForecast
    config: dict[str, Any]
    measured: float = 0.0
    is_best: bool = False


class _Predicted(NamedTuple):
    """What is predicted in one precision, and how many rows the data set has, where it tells."""

    tuning: Tuning
    candidates: list[_Candidate]
    rows: int | None


def run(args: argparse.Namespace, others: Sequence[str]) -> int:
    """Tunes; the status says whether a batch size fits.

    Raises:
        ConfigurationError: an argument, or the config, has a value that is not allowed.
        PlanError: the rows of a batch are not known.
    """
    _check(args, others)
    sizes = _numbers(args.batch_sizes)
    precisions = _precisions(args.precisions)
    with warnings.catch_warnings(), quiet_lightning():
        warnings.simplefilter("ignore", PossibleUserWarning)  # advice on loaders and loggers of a run that is none
        warnings.simplefilter("ignore", FutureWarning)
        found = [_predicted(args, others, precision, sizes) for precision in precisions]
        candidates = [candidate for one in found for candidate in one.candidates]
        best = _best(found)
        if args.measure and best is not None:
            best = _measured_best(candidates, best, found[0].rows)
    done()
    if best is not None:
        best.is_best = True
    basis = next((one.tuning.basis for one in found if one.tuning.basis), "")
    # Messages go to standard error, so that this can be read by other programs.
    print(_as_json(candidates, basis) if args.json else _as_table(candidates, basis))
    if best is None:
        print("dpx: No batch size meets the budget of every device.", file=sys.stderr)
    elif args.save is not None:
        _save(best, args.save)
    if args.report is not None:
        with written("report", args.report):
            _write_report(candidates, basis, args.report)
    if best is not None:
        return 0
    return DOES_NOT_FIT


def _check(args: argparse.Namespace, others: Sequence[str]) -> None:
    """Refuses, before a model is made, all that can be refused by its text.

    Raises:
        ConfigurationError: an argument, or the config, has a value that is not allowed.
    """
    check_config(args, others)
    check_files(args)
    check_settings(args)
    if args.save is not None or args.measure:
        check_devices(args)
    if args.budget is not None and "%" in args.budget:
        raise ConfigurationError(
            f"--budget={args.budget!r} is not allowed: a share would be another budget for every batch size; give "
            "bytes or a text such as '8GiB'."
        )


def _save(best: _Candidate, path: Path) -> None:
    """Writes the config of a run with the best batch size."""
    with written("save", path):
        path.write_text(yaml.safe_dump(best.config, sort_keys=False), encoding="utf-8")
    tell(
        f"dpx: batch_size={best.forecast.batch_size} is written to {path}; a batch of another size may want another "
        "learning rate."
    )


def _numbers(text: str | None) -> list[int]:
    """The batch sizes of the command line.

    Raises:
        ConfigurationError: no positive numbers.
    """
    parts = text.split(",") if text else []
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigurationError(f"--batch-sizes {text} is not allowed; give positive numbers: 32,64,128.")
    return [int(part) for part in parts]


def _precisions(text: str | None) -> list[str]:
    """The precisions of the command line; an empty one stands for that of the config.

    Raises:
        ConfigurationError: one of them is empty.
    """
    if text is None:
        return [""]
    parts = [part.strip() for part in text.split(",")]
    # A comma too many would be a second run in the precision of the config.
    if not all(parts):
        raise ConfigurationError(f"--precisions {text} is not allowed; give names: 32-true,bf16-mixed.")
    return parts


def _predicted(args: argparse.Namespace, others: Sequence[str], precision: str, sizes: Sequence[int]) -> _Predicted:
    """What the batch sizes would take in a precision; in that of the config where it is empty."""
    chosen = ["--trainer.precision", precision] if precision else []
    # A precision changes how a Trainer is made, so each has one of its own.
    cli = cli_to_look(args, [*others, *chosen])
    whole_config = config_of(cli)
    key = key_of(args, whole_config) if args.save is not None or args.measure else ""
    strategy = look_up(cli, cli.config_init, "trainer.strategy")
    nodes = look_up(cli, cli.config, "trainer.num_nodes")
    settings = settings_of(strategy, args.budget, devices_of(args, cli), args.planner, num_nodes=nodes)
    settings = replace(
        settings, cache=PlanCache(args.plan_cache, TellOnce()), micro_batches=parse_number(args.micro_batches)
    )
    options = TuneOptions(tuple(sizes)) if sizes else None
    with shown("tuning the batch size"):
        tuning = look_on_device(
            args,
            cli,
            settings.devices,
            lambda cli: tune_batch_size(cli.trainer, cli.model, cli.datamodule, settings, options, progress),
        )
    rows = rows_of_data(cli.trainer)
    if key:
        tell_other_devices(args, whole_config, settings.devices)
    if rows is not None and any(size > rows for size in sizes):
        tell(f"dpx: the data set has {rows} rows, so larger batches are predicted and would never be full.")
    candidates = []
    for forecast in tuning.batch_sizes:
        config = tuned_config(args, whole_config, key, forecast.batch_size) if key else {}
        candidates.append(_Candidate(precision, forecast, config))
    return _Predicted(tuning, candidates, rows)


def _best(found: Sequence[_Predicted]) -> _Candidate | None:
    """Of the fastest precision, the smallest batch size that is about as fast as its fastest."""
    # Within a precision the search has chosen already: the smallest that is about as fast.
    bests: list[_Candidate] = []
    for one in found:
        bests += [candidate for candidate in one.candidates if candidate.forecast is one.tuning.best]
    return max(bests, key=lambda one: one.forecast.samples_per_second, default=None)


def _measured_best(candidates: Sequence[_Candidate], best: _Candidate, rows: int | None) -> _Candidate:
    """The fastest of those that are predicted to be, in short runs; the predicted one where none can run."""
    # The predicted best takes part in any case, so that it is not lost to three that come close.
    others = [one for one in candidates if one is not best and one.forecast.fits]
    others.sort(key=lambda one: one.forecast.samples_per_second, reverse=True)
    tried = []
    for candidate in [best, *others]:
        # A loader gives no batch that is larger than the data set.
        if rows is None or candidate.forecast.batch_size <= rows:
            tried.append(candidate)
    for candidate in tried[:_MEASURED]:
        size = candidate.forecast.batch_size
        progress(f"training with batches of {size}")
        seconds = _seconds_of_steps(candidate.config, size)
        if seconds:
            # A median, as a step that happens to wait for the loader or for the machine is no rule.
            candidate.measured = size / statistics.median(seconds)
        else:
            tell(f"dpx: batches of {size} rows are not measured: fewer than {_WARM_UP + 2} came that were full.")
    measured = [one for one in tried if one.measured]
    if not measured:
        tell("dpx: no batch size was measured; the best one is that of the prediction.")
        return best
    # What was measured decides over what was predicted.
    return max(measured, key=lambda one: one.measured)


class _StepClock(Callback):
    """Takes the time from the beginning of a training step to that of the next one, and ends the fit.

    Attributes:
        seconds: Of steps on whole batches, after the first ones.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._began = 0.0
        self._is_whole = False
        self._count = 0
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Ends the time of one step, and begins that of the next."""
        now = self._now(trainer)
        # Before the first batch of an epoch other things happen than a step.
        if batch_idx > 0:
            self._note(now)
        rows = rows_of_data(trainer)
        # A last batch of fewer rows is faster, and would flatter the speed.
        self._is_whole = rows is None or (batch_idx + 1) * self._batch_size <= rows
        self._began = now

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the time of the last step of an epoch, which has no next one."""
        self._count += 1
        trainer.should_stop = self._count >= _STEPS
        if trainer.is_last_batch or trainer.should_stop:
            self._note(self._now(trainer))
            self._is_whole = False

    def _note(self, now: float) -> None:
        if self._is_whole and self._count > _WARM_UP:
            self.seconds.append(now - self._began)

    def _now(self, trainer: Trainer) -> float:
        # Only then is what was queued on the devices done, and a step over.
        for device in getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device]:
            synchronize(device)
        return time.perf_counter()


def _seconds_of_steps(config: dict[str, Any], batch_size: int) -> list[float]:
    """How long the steps on whole batches took in a short run; none, where there were none after the first ones."""
    clock = _StepClock(batch_size)
    # From a file, as a later `dpx fit --config` reads it.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        cli = make_cli(
            ["fit", "--config", str(path)],
            execute=False,
            # However many epochs the steps take, the clock ends them; a minimum of the config would
            # let the fit go on in spite of `should_stop`.
            num_sanity_val_steps=0, limit_val_batches=0, max_epochs=-1, max_steps=-1, min_epochs=None, min_steps=None,
            fast_dev_run=False,
        )  # fmt: skip
        # Of other callbacks none takes part, so that the time is that of steps alone.
        kept = [callback for callback in cli.trainer.callbacks if type(callback).__module__.startswith("lightning_dpx")]
        cli.trainer.callbacks[:] = [one for one in kept if not isinstance(one, NOT_NEEDED)] + [clock]
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return clock.seconds


def _as_json(candidates: Sequence[_Candidate], basis: str) -> str:
    rows = []
    for one in candidates:
        device = one.forecast.tightest
        plan = device.plan
        rows.append(
            {
                "batch_size": one.forecast.batch_size,
                "precision": one.precision or None,
                "fits": one.forecast.fits,
                "best": one.is_best,
                "samples_per_second": one.forecast.samples_per_second,
                "measured_samples_per_second": one.measured or None,
                "device": device.device,
                "peak": device.needed,
                "budget": device.budget,
                "micro_batches": None if plan is None else plan.micro_batches,
                "values_recomputed": None if plan is None else plan.num_recomputed,
                "extra_time_share": None if plan is None else plan.recompute_share,
            }
        )
    return json.dumps({"basis": basis, "batch_sizes": rows})


def _as_table(candidates: Sequence[_Candidate], basis: str) -> str:
    how = f" {basis}" if basis else ""
    unit, _ = _unit_of(candidates)
    table = format_rows(
        f"batch sizes, peak of the tightest device in {unit}, predicted{how}:", HEADS, _cells(candidates)
    )
    plans = [device.plan for one in candidates for device in one.forecast.devices]
    if any(plan is not None and plan.micro_batches > 1 for plan in plans):
        return f"{table}\n{CHECKED_BY_A_RUN}"
    return table


def _unit_of(candidates: Sequence[_Candidate]) -> tuple[str, int]:
    """The unit of peaks and budgets, by name and in bytes."""
    return unit_of_table(max(one.forecast.tightest.needed for one in candidates))


def _cells(candidates: Sequence[_Candidate]) -> list[list[str]]:
    _, unit = _unit_of(candidates)
    rows = []
    for one in candidates:
        device = one.forecast.tightest
        plan = device.plan
        share = None if plan is None else plan.recompute_share
        speed = f"{one.forecast.samples_per_second:,.0f}" if one.forecast.fits else "does not fit"
        measured = f"{one.measured:,.0f}" if one.measured else "-"
        rows.append(
            [
                str(one.forecast.batch_size),
                one.precision or "-",
                " ".join(str(each.rows) for each in one.forecast.devices),
                "-" if plan is None else str(plan.micro_batches),
                "-" if plan is None else str(plan.num_recomputed),
                "-" if share is None else f"{share:.1%}",
                f"{device.needed / unit:.1f}",
                f"{device.budget / unit:.1f}" if device.budget else "-",
                speed,
                measured,
                "<- best" if one.is_best else "",
            ]
        )
    return rows


def _write_report(candidates: Sequence[_Candidate], basis: str, path: Path) -> None:
    """A page with everything, or its picture.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    points = [
        BatchSizePoint(
            one.precision,
            one.forecast.batch_size,
            one.forecast.samples_per_second,
            one.measured,
            one.forecast.tightest.needed,
            one.forecast.tightest.budget,
            one.is_best,
        )
        for one in candidates
    ]
    figure = draw_batch_sizes(points)
    if path.suffix != ".html":
        save_figure(figure, path)
        return
    unit, _ = _unit_of(candidates)
    text = f"Predicted for training steps{' ' + basis if basis else ''}, peaks in {unit}."
    write_page(path, "dpx: batch size", [Section("Batch sizes", text, HEADS, _cells(candidates), [figure])])
