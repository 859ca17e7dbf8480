"""The command line: ``dpx bench``."""

import argparse
import json
import platform
import sys
from collections.abc import Sequence

import torch

from lightning_dpx.bench import MODELS, MODES, compare_steps, format_table
from lightning_dpx.devices import num_usable_cpus
from lightning_dpx.errors import DPXError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that ``arguments`` (or the process's own) name; returns the exit status."""
    parser = argparse.ArgumentParser(prog="dpx", description="One process drives all your devices.")
    commands = parser.add_subparsers(required=True, metavar="command")
    benches = commands.add_parser("bench", help="measure this machine").add_subparsers(required=True, metavar="bench")
    step = benches.add_parser("step", help="a training step of one device, dpx and DDP (CPU)")
    step.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    step.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    step.add_argument("--devices", type=_positive, default=4, help="replicas of dpx, processes of DDP")
    step.add_argument("--rounds", type=_positive, default=5, help="turns of every job")
    step.add_argument("--json", action="store_true", help="print JSON instead of a table")
    step.set_defaults(run=_bench_step)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except DPXError as error:
        print(f"dpx: {error}", file=sys.stderr)
        return 1


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not allowed; give 1 or more")
    return value


def _bench_step(args: argparse.Namespace) -> int:
    def progress(text: str) -> None:
        print(text, file=sys.stderr)

    results = compare_steps(args.models, args.modes, args.devices, args.rounds, progress)
    machine = {"cpus": num_usable_cpus(), "processor": platform.machine(), "torch": torch.__version__}
    if args.json:
        print(json.dumps({"machine": machine, "results": [result.as_dict() for result in results]}, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in machine.items()))
        print(format_table(results))
    return 0
