"""``dpx plan --strategy``: the options of runs with one process per device, and what they say."""

import argparse
from dataclasses import replace
from typing import Any

from lightning_dpx.commands.plan_times import asks_for_times, parse_nodes
from lightning_dpx.errors import ConfigurationError, UnsupportedError
from lightning_dpx.lightning import Settings
from lightning_dpx.lightning.lightning_compat import ddp_options_of, look_up, tensor_parallel_size_of
from lightning_dpx.lightning.memory.rank_run import ShardRanks

STRATEGIES = ("dpx", "ddp", "fsdp2")


def add_options(plan: Any) -> None:
    """Adds them to the parser of ``dpx plan``."""
    plan.add_argument(
        "--strategy", choices=STRATEGIES, default="dpx",
        help="what would run: dpx, one process for all devices of a node (the default); ddp or fsdp2 (fully_shard, as "
        "with ModelParallelStrategy), a process per device, each with its own batch, on --devices x --num-nodes",
    )  # fmt: skip
    plan.add_argument(
        "--shard-units", action="append", default=[], metavar="NAME",
        help="for fsdp2, unless configure_model() calls fully_shard: the modules that it is called on; * stands for "
        "anything between two dots, . for the model itself; may be repeated: --shard-units 'net.layers.*' "
        "--shard-units net",
    )  # fmt: skip


def check_ranks(args: argparse.Namespace) -> None:
    """Whether the options go together, before a model is made.

    Raises:
        ConfigurationError: an option means nothing with this strategy.
    """
    if args.shard_units and args.strategy != "fsdp2":
        raise ConfigurationError("--shard-units is for --strategy fsdp2; leave it out, or name the strategy.")
    if args.strategy == "dpx":
        return
    if asks_for_times(args):
        raise ConfigurationError(
            f"The time of a step is predicted for --strategy dpx, and not for {args.strategy}; leave out --link, "
            "--network, --flops and --memory-bandwidth."
        )
    if args.micro_batches is not None:
        raise ConfigurationError(
            f"--micro-batches is for --strategy dpx; {args.strategy} cuts no batches. Leave it out."
        )


def num_ranks(args: argparse.Namespace, cli: Any, settings: Settings) -> int:
    """How many processes there are: one for each device of each node."""
    nodes = look_up(cli, cli.config, "trainer.num_nodes")
    if args.num_nodes is not None:
        nodes = parse_nodes(args.num_nodes)
    return len(settings.devices) * int(nodes)


def ranks_of_fsdp2(args: argparse.Namespace, cli: Any, settings: Settings) -> ShardRanks:
    """Over how many processes a module is sharded, and by which units.

    Raises:
        UnsupportedError: the config's strategy shards over fewer processes than there are.
    """
    size = tensor_parallel_size_of(look_up(cli, cli.config_init, "trainer.strategy"))
    if isinstance(size, int) and size > 1:
        raise UnsupportedError(
            f"dpx plan shards over all processes, and the config has tensor_parallel_size={size}; what tensor-parallel "
            "layers take is not predicted."
        )
    return ShardRanks(num_ranks(args, cli, settings), tuple(args.shard_units))


def as_one_rank(args: argparse.Namespace, cli: Any, settings: Settings) -> Settings:
    """The settings of a process with one device, to which nothing of the strategy dpx applies."""
    keeps_buckets = False
    if args.strategy == "ddp":
        options = ddp_options_of(look_up(cli, cli.config_init, "trainer.strategy"))
        # With it gradients are views of the buckets, which then take no memory of their own.
        keeps_buckets = not options.get("gradient_as_bucket_view", False)
    budget = settings.budget
    if isinstance(budget, dict):
        budget = budget[settings.devices[0]]
    return replace(
        settings,
        devices=settings.devices[:1],
        workload="even",
        reducer="naive",
        budget=budget,
        micro_batches=1,
        machines=None,
        keeps_buckets=keeps_buckets,
    )
