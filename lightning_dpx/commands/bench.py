"""``dpx bench``: measures this machine, next to the alternatives."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lightning_dpx.bench import (
    BUDGETS,
    COMPILE_BUDGETS,
    MODELS,
    MODES,
    SCALE_PARAMETERS,
    SHARES,
    SIZES,
    STAGED_MODELS,
    ZOO,
    Where,
    compare_micro_batches,
    compare_plans,
    compare_reductions,
    compare_steps,
    compare_zoo,
    format_contests,
    format_micro_batches,
    format_reductions,
    format_scale,
    format_table,
    format_zoo,
    measure_scale,
    plot_contests,
    plot_micro_batches,
    plot_reductions,
)
from lightning_dpx.commands.progress import done, progress
from lightning_dpx.devices import num_usable_cpus
from lightning_dpx.errors import ConfigurationError, UnsupportedError
from lightning_dpx.lightning.silence_lightning import quiet_lightning
from lightning_dpx.simulate import is_built, simulate


def add_to(commands: Any) -> None:
    """Adds the command to ``dpx``."""
    benches = commands.add_parser("bench", help="measure this machine").add_subparsers(required=True, metavar="bench")
    step = benches.add_parser("step", help="a training step of one device, dpx and DDP (CPU)")
    step.add_argument("--models", nargs="+", choices=MODELS, help="default: all of them")
    step.add_argument("--modes", nargs="+", choices=MODES, help="default: all of them")
    step.add_argument("--devices", type=_positive, help="replicas of dpx, processes of DDP (default: 4)")
    step.add_argument("--rounds", type=_positive, default=5, help="turns of every job")
    step.add_argument(
        "--scale", nargs="*", type=_positive, metavar="PARAMETERS",
        help="instead: K = 1, 2, 4, 8 replicas of a module of 20, 200 and 2,000 parameters, or of those given, each as "
        "processor time over K plain steps; on simulated devices, too, where their backend is built",
    )  # fmt: skip
    step.add_argument("--json", action="store_true", help="print JSON instead of a table")
    step.set_defaults(run=_bench_step, takes_more=False)
    reduce = benches.add_parser("reduce", help="summing gradients: every mode, DDP's all-reduce and a plain copy")
    reduce.add_argument("--sizes", nargs="+", default=list(SIZES), help="elements, or resnet50, or gpt2")
    reduce.add_argument("--devices", nargs="+", default=["cpu"] * 4, help="one per replica, for example cuda:0 cuda:1")
    reduce.add_argument("--rounds", type=_positive, default=9, help="turns of every contestant")
    reduce.add_argument("--json", action="store_true", help="print JSON instead of a table")
    reduce.add_argument("--plot", type=_picture, metavar="FILE", help="also draw the bandwidths (PNG, SVG, PDF)")
    reduce.set_defaults(run=_bench_reduce, takes_more=False)
    plan = benches.add_parser("plan", help="memory plans and other ways of checkpointing: peak and step time (CPU)")
    plan.add_argument("--models", nargs="+", choices=STAGED_MODELS, help="default: all of them")
    plan.add_argument(
        "--budgets",
        nargs="+",
        type=_share_above_zero,
        help=f"shares of the unplanned peak (default: {' '.join(map(str, BUDGETS))})",
    )
    plan.add_argument(
        "--zoo", nargs="*", choices=ZOO, metavar="MODEL",
        help="instead: real models of libraries, or those that are named, each beside its library's own checkpointing "
        f"and at its peak: {', '.join(ZOO)}",
    )  # fmt: skip
    plan.add_argument(
        "--micro-batches", action="store_true",
        help="instead: a plan of all rows, micro-batches by hand and both, in one thread (default: gpt lstm unet at "
        f"{' '.join(map(str, SHARES))} of the peak)",
    )  # fmt: skip
    plan.add_argument("--rounds", type=_positive, default=7, help="turns of every contestant")
    plan.add_argument(
        "--compile", nargs="*", type=_share, metavar="BUDGET",
        help="also torch.compile, without and with these activation_memory_budgets (minutes for each; default: "
        f"{' '.join(map(str, COMPILE_BUDGETS))})",
    )  # fmt: skip
    plan.add_argument(
        "--compile-backend", default="inductor", metavar="NAME", help="what compiles (default: %(default)s)"
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.add_argument("--plot", type=_picture, metavar="FILE", help="also draw time over memory (PNG, SVG, PDF)")
    plan.set_defaults(run=_bench_plan, takes_more=False)


# argparse turns an ArgumentTypeError into its usual message with the name of the option.
def _positive(text: str) -> int:
    # Else its message would name this function.
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; give 1 or more")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; give 0 to 1")
    return value


def _share_above_zero(text: str) -> float:
    value = _share(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; give more than 0 and at most 1")
    return value


def _picture(text: str) -> Path:
    """The file of a picture, looked at before minutes are spent on what it shall show."""
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} is not allowed; name a .png, .svg or .pdf file")
    # Refused, not made: a misspelled folder would take the result.
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not allowed: there is no folder {path.parent}")
    return path


def _bench_step(args: argparse.Namespace, _others: Sequence[str]) -> int:
    if args.scale is not None:
        return _bench_scale(args)
    models = args.models or list(MODELS)
    results = compare_steps(models, args.modes or list(MODES), args.devices or 4, args.rounds, progress)
    _report(args.json, [result.as_dict() for result in results], format_table(results))
    return 0


def _bench_scale(args: argparse.Namespace) -> int:
    """The table of how host time grows with the replicas.

    Raises:
        ConfigurationError: an option is given that has no meaning for it.
    """
    for option in ("models", "modes", "devices"):
        # Refused instead of ignored: a table that leaves out what was asked for would mislead.
        if getattr(args, option) is not None:
            raise ConfigurationError(f"--{option} is for the bench's own models; leave it out with --scale.")
    where: list[Where] = ["inline"]
    # Compiling the backend takes a while, and a bench should not begin with it unasked.
    if is_built():
        where.append("simulated")
    sizes = args.scale or SCALE_PARAMETERS
    # It trains in this process, where Lightning would write between the lines of progress.
    with quiet_lightning():
        results = measure_scale(sizes, where=where, rounds=args.rounds, progress=progress)
    _report(args.json, [result.as_dict() for result in results], format_scale(results))
    return 0


def _check_plot(args: argparse.Namespace) -> None:
    """Whether what a picture needs is installed.

    Raises:
        UnsupportedError: it is not.
    """
    if args.plot is not None and find_spec("matplotlib") is None:
        raise UnsupportedError("Pictures need matplotlib; pip install 'lightning-dpx[plots]', or leave out --plot.")


def _bench_reduce(args: argparse.Namespace, _others: Sequence[str]) -> int:
    _check_plot(args)
    # Simulated devices must be there before the first backward of the process.
    if any(device.startswith("sim") for device in args.devices):
        simulate(16)
    results = compare_reductions(args.sizes, args.devices, args.rounds, progress)
    _report(args.json, [result.as_dict() for result in results], format_reductions(results))
    if args.plot is not None:
        plot_reductions(results, args.plot)
    return 0


def _bench_plan(args: argparse.Namespace, _others: Sequence[str]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler tells of every start and stop
    if args.zoo is not None:
        return _bench_zoo(args)
    if args.micro_batches:
        return _bench_micro_batches(args)
    _check_plot(args)
    results = compare_plans(
        args.models or list(STAGED_MODELS),
        args.budgets or list(BUDGETS),
        args.rounds,
        progress,
        # The option without numbers stands for the usual ones, and no option for no compiler.
        compile_budgets=COMPILE_BUDGETS if args.compile == [] else args.compile,
        compile_backend=args.compile_backend,
        missing=_missing,
    )
    _report(args.json, [result.as_dict() for result in results], format_contests(results))
    if args.plot is not None:
        plot_contests(results, args.plot)
    return 0


def _bench_micro_batches(args: argparse.Namespace) -> int:
    """The table of plans, micro-batches and both; the picture where matplotlib is installed.

    Raises:
        ConfigurationError: an option is given that has no meaning for them.
    """
    if args.compile is not None:
        raise ConfigurationError("--compile is for other ways of checkpointing; leave it out with --micro-batches.")
    models = args.models or ["gpt", "lstm", "unet"]
    results = compare_micro_batches(models, args.budgets or SHARES, args.rounds, progress, _missing)
    _report(args.json, [result.as_dict() for result in results], format_micro_batches(results))
    if args.plot is not None and find_spec("matplotlib") is None:
        _missing(f"{args.plot} is not drawn: pictures need matplotlib; pip install 'lightning-dpx[plots]'.")
    elif args.plot is not None:
        plot_micro_batches(results, args.plot)
    return 0


def _bench_zoo(args: argparse.Namespace) -> int:
    """The table of real models.

    Raises:
        ConfigurationError: an option is given that has no meaning for them.
    """
    for option in ("models", "budgets", "compile", "plot", "micro_batches"):
        # Refused instead of ignored: a table that leaves out what was asked for would mislead.
        if getattr(args, option) not in (None, False):
            raise ConfigurationError(
                f"--{option.replace('_', '-')} is for the bench's own models; with --zoo name models behind it "
                "(--zoo bert llama), and their budgets are the peaks of their own checkpointing."
            )
    # An empty list of names stands for all of them.
    results = compare_zoo(args.zoo or list(ZOO), args.rounds, progress, _missing)
    if not results:
        raise UnsupportedError("No model of the zoo can be made here; pip install transformers torch_geometric.")
    _report(args.json, [result.as_dict() for result in results], format_zoo(results))
    return 0


def _missing(text: str) -> None:
    # On a terminal the line of progress is still there, and would stand in front of the text.
    done()
    print(f"dpx: {text}", file=sys.stderr)


def _report(as_json: bool, results: list[dict[str, Any]], table: str) -> None:
    done()
    # Times say little without the machine that they were taken on.
    machine = {"cpus": num_usable_cpus(), "processor": platform.machine(), "torch": torch.__version__}
    if as_json:
        print(json.dumps({"machine": machine, "results": results}, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in machine.items()))
        print(table)
