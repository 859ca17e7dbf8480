"""The times of ``dpx plan``: what its options say of machines, a table of steps on 1 to N nodes, and its picture."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning import DPXStrategy
from lightning_dpx.lightning.memory.step_times import Machines
from lightning_dpx.lightning.monitors.base import format_rows
from lightning_dpx.memory.profile.roofline import Rates, rates_of
from lightning_dpx.pictures import Section, StepPoint, draw_step_times
from lightning_dpx.step_time import MOST_NODES, Link, StepTime
from lightning_dpx.units import format_seconds, parse_byte_rate, parse_flops, parse_seconds

HEADS = (
    "nodes", "devices", "step", "compute", "reduction", "hidden", "between nodes", "parameters", "in line",
    "samples/s", "efficiency",
)  # fmt: skip
_ASKING = ("link", "network", "flops", "memory_bandwidth")


def add_options(plan: Any) -> None:
    """Adds what times need to the parser of ``dpx plan``."""
    times = plan.add_argument_group(
        "times",
        "With any of these the time of a step is predicted as well, on 1, 2, 4, ... nodes with one process each: "
        "compute by FLOPs and bytes, the reduction within a node and what of it backward can hide, a ring between "
        "nodes. The rows of a device stay the same (weak scaling).",
    )
    times.add_argument(
        "--num-nodes", metavar="N",
        help=f"the most nodes of the table; the config's unless given, or {MOST_NODES} with --network. With --strategy "
        "fsdp2: over how many nodes parameters are sharded",
    )  # fmt: skip
    times.add_argument("--link", metavar="RATE", help="what a device of a node sends and receives: 50GB/s, or 400Gb/s")
    times.add_argument(
        "--link-latency", metavar="TIME", default="0s", help="of every copy between devices, such as 5us"
    )
    times.add_argument("--network", metavar="RATE", help="what a node sends while it receives as much: 25GB/s")
    times.add_argument("--network-latency", metavar="TIME", default="0s", help="of a round between nodes, such as 20us")
    times.add_argument("--flops", metavar="RATE", help="of a matrix product in the config's precision: 100TF/s")
    times.add_argument("--memory-bandwidth", metavar="RATE", help="of a device's own memory: 2TB/s")


def asks_for_times(args: argparse.Namespace) -> bool:
    """Whether an option is given that only times need."""
    return any(getattr(args, name) is not None for name in _ASKING)


def check_times(args: argparse.Namespace) -> None:
    """Whether the options are allowed, before a model is made.

    Raises:
        ConfigurationError: one has a value that is not allowed; says what is required.
    """
    if args.num_nodes is not None:
        parse_nodes(args.num_nodes)
    for option in ("link", "network", "memory_bandwidth"):
        text = getattr(args, option)
        if text is not None:
            parse_byte_rate(_flag(option), text)
    for option in ("link_latency", "network_latency"):
        parse_seconds(_flag(option), getattr(args, option))
    if args.flops is not None:
        parse_flops("--flops", args.flops)


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def parse_nodes(text: str) -> int:
    """What ``--num-nodes`` says.

    Raises:
        ConfigurationError: no positive number.
    """
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ConfigurationError(f"--num-nodes {text} is not allowed; give a positive number.")


def machines_of(
    args: argparse.Namespace, strategy: Any, devices: Sequence[torch.device], configured_nodes: Any
) -> Machines | None:
    """What steps are timed for; ``None`` if nothing asks for times.

    Args:
        args: Of the command line.
        strategy: Of the config.
        devices: Of a node.
        configured_nodes: The config's number of nodes.

    Raises:
        ConfigurationError: a rate is missing that is needed.
    """
    if not asks_for_times(args) and args.num_nodes is None:
        return None
    nodes = _most_nodes(args, configured_nodes)
    if len(set(devices)) > 1 and args.link is None:
        raise ConfigurationError(
            f"The time of a step on {len(set(devices))} devices needs --link: what a device of a node sends and "
            "receives, such as --link 50GB/s."
        )
    if nodes > 1 and args.network is None:
        raise ConfigurationError(
            f"The time of a step on {nodes} nodes needs --network: what a node sends while it receives as much, such "
            "as --network 25GB/s."
        )
    # A config of another strategy is timed as ours would run it.
    options = (strategy if isinstance(strategy, DPXStrategy) else DPXStrategy()).options
    return Machines(
        rates=_rates(args, devices),
        link=_link(args, "link"),
        network=_link(args, "network"),
        most_nodes=nodes,
        gradient_buckets=options.gradient_buckets,
        wire_dtype=options.wire_dtype,
        communication_hook=options.communication_hook,
    )


def _most_nodes(args: argparse.Namespace, configured: Any) -> int:
    if args.num_nodes is not None:
        return parse_nodes(args.num_nodes)
    # A Trainer's own default is one node, and who names a network has more.
    if isinstance(configured, int) and configured > 1:
        return configured
    if args.network is None:
        return 1
    return MOST_NODES


def _link(args: argparse.Namespace, name: str) -> Link | None:
    rate = getattr(args, name)
    if rate is None:
        return None
    latency = parse_seconds(f"--{name}-latency", getattr(args, f"{name}_latency"))
    return Link(bytes_per_second=parse_byte_rate(f"--{name}", rate), latency=latency)


def _rates(args: argparse.Namespace, devices: Sequence[torch.device]) -> Rates:
    rates = rates_of(devices[0])
    if args.flops is not None:
        rates = replace(rates, flops=parse_flops("--flops", args.flops))
    if args.memory_bandwidth is not None:
        rates = replace(rates, bytes=parse_byte_rate("--memory-bandwidth", args.memory_bandwidth))
    return rates


def cells_of(steps: Sequence[StepTime]) -> list[list[str]]:
    """A row for each number of nodes."""
    rows = []
    for step in steps:
        times = (
            step.seconds, step.compute, step.reduction, step.hidden, step.between_nodes, step.parameters,
            step.seconds_in_line,
        )  # fmt: skip
        rows.append(
            [
                *(str(step.nodes), str(step.num_devices), *map(format_seconds, times)),
                f"{step.samples_per_second:,.0f}",
                f"{step.efficiency:.1%}",
            ]
        )
    return rows


def about(machines: Machines) -> str:
    """What the times rest on, in words."""
    rates = machines.rates
    told = f"{rates.flops / 1e12:g} TFLOP/s and {rates.bytes / 1e9:g} GB/s of memory on a device"
    for name, link in (("within a node", machines.link), ("between nodes", machines.network)):
        if link is not None:
            told += f", {link.bytes_per_second / 1e9:g} GB/s {name}"
    return told


def format_steps(steps: Sequence[StepTime], machines: Machines) -> str:
    """A table, with what it rests on, and what its columns mean."""
    table = format_rows(f"a training step, predicted with {about(machines)}:", HEADS, cells_of(steps))
    return f"{table}\n{_LEGEND}"


_LEGEND = (
    "step = compute + reduction (what backward does not hide) + between nodes + parameters (back to the devices); "
    "in line: if nothing is hidden."
)


def as_dicts(steps: Sequence[StepTime]) -> list[dict[str, Any]]:
    """For JSON: seconds."""
    found = []
    for step in steps:
        derived = {
            "seconds": step.seconds, "samples_per_second": step.samples_per_second, "efficiency": step.efficiency,
        }  # fmt: skip
        found.append({**asdict(step), **derived})
    return found


def section_of(steps: Sequence[StepTime], machines: Machines) -> Section:
    """The part of a report page.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    points = []
    for step in steps:
        kinds = {
            "compute": step.compute, "reduction within a node": step.reduction, "between nodes": step.between_nodes,
            "parameters": step.parameters,
        }  # fmt: skip
        points.append(StepPoint(step.nodes, kinds, step.samples_per_second, step.efficiency))
    text = f"Predicted with {about(machines)}. The rows of a device stay the same. {_LEGEND}"
    return Section("Time of a step", text, HEADS, cells_of(steps), figures=[draw_step_times(points)])
