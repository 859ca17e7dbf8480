"""``dpx doctor``: what is here, what "auto" would choose and why, and what is missing."""

import argparse
import importlib.metadata
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_dpx.devices import accelerators, capacity_of, has_nccl, linked_groups, num_direct_links, num_usable_cpus
from lightning_dpx.errors import UnsupportedError
from lightning_dpx.lightning.lightning_api import PACKAGE
from lightning_dpx.reducers import choose_reducer
from lightning_dpx.simulate import require_build_tools
from lightning_dpx.units import GIB

EXTRAS = {
    "matplotlib": ("plots", "pictures and reports"),
    "jsonargparse": ("cli", "dpx fit, plan and other commands with configs"),
    "shtab": ("cli", "completion of commands in a shell"),
    "highspy": ("milp", "planner='milp'"),
    "ninja": ("simulate", "simulated devices"),
    "rich": ("cli", "tables on a terminal"),
    "pynvml": ("nvidia", "what other processes hold on a GPU"),
}
PACKAGES = ("lightning_dpx", "torch", PACKAGE, "torchmetrics", "numpy", "PyYAML")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: What it is about.
        value: What was found.
        remedy: What to do, where something is missing.
    """

    topic: str
    value: str
    remedy: str = ""


def add_to(commands: Any) -> None:
    """Adds the command to ``dpx``."""
    doctor = commands.add_parser("doctor", help='what is here, what "auto" would choose and why, what is missing')
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    doctor.set_defaults(run=run, takes_more=False)


def run(args: argparse.Namespace, _others: Sequence[str]) -> int:
    """Examines this machine; prints what it finds."""
    findings = [*versions(), *devices(), *choices(), *missing()]
    if args.json:
        print(json.dumps([{"topic": f.topic, "value": f.value, "remedy": f.remedy} for f in findings], indent=1))
        return 0
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        print(f"{finding.topic:{width}}  {finding.value}" + (f"; {finding.remedy}" if finding.remedy else ""))
    return 0


def versions() -> list[Finding]:
    """The versions of Python and of the packages that matter."""
    found = [Finding("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    for package in PACKAGES:
        # Of torch its own: only that names the build, such as +cu130.
        version = torch.__version__ if package == "torch" else _installed_version(package)
        found.append(Finding(package, version))
    return found


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    # A checkout that PYTHONPATH names has no metadata: this package, mostly.
    except importlib.metadata.PackageNotFoundError:
        module = sys.modules.get(package)
        if module is None or module.__file__ is None:
            return "not installed"
        return f"{module.__version__}, not installed: run from {Path(module.__file__).parents[1]}"


def devices() -> list[Finding]:
    """The devices of this machine, how large they are, and what they are linked to."""
    cpu = capacity_of(torch.device("cpu"))
    found = [
        Finding("cpu", f"{num_usable_cpus()} usable cores, {torch.get_num_threads()} torch threads, "
                       f"{cpu.total / GIB:.0f} GiB, {cpu.others / GIB:.0f} GiB held by others")
    ]  # fmt: skip
    there = accelerators()
    for device in there:
        size = capacity_of(device)
        # Of a type with one device only, torch does not tell what it is called.
        named = getattr(torch.get_device_module(device), "get_device_name", None)
        name = device.type if named is None else named(device)
        # What other processes hold is shown only where it is known, and there is some.
        held = f", {size.others / GIB:.1f} GiB held by others" if size.others else ""
        found.append(Finding(str(device), f"{name}, {size.total / GIB:.1f} GiB{held}"))
    if len(there) > 1:
        named = []
        for group in linked_groups(there):
            members = ", ".join(str(there[index]) for index in group)
            named.append(f"{{{members}}}")
        groups = " and ".join(named)
        pairs = len(there) * (len(there) - 1) // 2
        found.append(Finding("links", f"{num_direct_links(there)} of {pairs} pairs are direct; groups: {groups}"))
    return found


def choices() -> list[Finding]:
    """What the strategy's ``"auto"`` values stand for here."""
    # The CPU is what accelerator="auto" falls back on.
    there = accelerators() or [torch.device("cpu")]
    if len(there) > 1:
        why = "NCCL is there" if has_nccl(there) else "no NCCL; every device sums its share"
    else:
        why = "one device, so one sum"
    threads = "a thread per device" if len(there) > 1 else "replicas take their slices as one"
    on_cpu = "the first step is watched, and threads are used where operators are large"
    return [
        Finding("accelerator='auto'", there[0].type),
        Finding("reducer='auto'", f"{choose_reducer(there)} ({why})"),
        Finding("execution='auto'", threads if there[0].type != "cpu" else f"{threads}, or {on_cpu}"),
        Finding("memory_budget='auto'", "what is free on each device when the first batch comes, less 5%"),
    ]


def missing() -> list[Finding]:
    """Optional parts, and what they are for."""
    found = []
    for module, (extra, purpose) in EXTRAS.items():
        try:
            found.append(Finding(module, f"{importlib.metadata.version(_distribution(module))}, for {purpose}"))
        # Asked for by its metadata: importing everything would take seconds, and may fail
        # for other reasons.
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(module, f"missing: {purpose}", f"pip install 'lightning-dpx[{extra}]'"))
    try:
        require_build_tools()
        found.append(Finding("simulated devices", "can be built"))
    except UnsupportedError as error:
        found.append(Finding("simulated devices", f"cannot be built: {error}"))
    return found


def _distribution(module: str) -> str:
    # This one is imported by another name than it is installed by.
    return {"pynvml": "nvidia-ml-py"}.get(module, module)
