"""Several processes, each with its own replicas: connecting, agreeing on what is trained, and starting out equal."""

import atexit
import datetime
import functools
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import distributed, nn

from lightning_dpx.devices import default_backend, wire_device
from lightning_dpx.errors import CollectiveError, ConfigurationError, ReplicationError
from lightning_dpx.lightning.lightning_api import ClusterEnvironment, LightningEnvironment, SLURMEnvironment
from lightning_dpx.lightning.lightning_compat import init_dist_connection
from lightning_dpx.lightning.processes.attempt_store import agent_store, attempt_store, is_kept_by_agent
from lightning_dpx.reducers import between_processes, start_roll_call

Fingerprint = Mapping[str, Any]
_GRACE = 20  # seconds in which torch, where it notices by itself, says more than we can


def connect(environment: ClusterEnvironment, backend: str | None, device: torch.device, timeout: float) -> None:
    """Joins the default process group.

    Args:
        environment: Lightning's view of the launcher.
        backend: Of torch.distributed; gloo, and NCCL beside it for CUDA devices, unless given.
        device: The first device of this process.
        timeout: Seconds that any collective may take, this one included.

    Raises:
        CollectiveError: not all processes came in time.
        ConfigurationError: there is a process group, in which this process has another rank.
    """
    failures: list[BaseException] = []
    # A group that the user has made is left to the user when the process ends.
    ours = not distributed.is_initialized()
    if not ours:
        _check_rank(environment)

    def join() -> None:
        try:
            init_dist_connection(
                environment,
                backend or default_backend(device),
                timeout=datetime.timedelta(seconds=timeout),
                **_own_store(environment, timeout),
            )
        # An error that ends a thread is printed and lost, SystemExit and the like without a word.
        except BaseException as error:  # noqa: BLE001  raised again by the caller
            failures.append(error)

    # A listener that is no store of torch's, and never answers, makes it wait without an end.
    # A daemon, so that one that never returns does not keep the process from ending.
    thread = threading.Thread(target=join, name="dpx-connect", daemon=True)
    thread.start()
    thread.join(timeout + _GRACE)
    why: BaseException | str | None = None
    if failures:
        why = failures[0]
    elif thread.is_alive():
        why = "another program answers there"
    if why is None:
        # Only when all are connected: from here on a lost process can be told by its silence.
        start_roll_call()
        if ours:
            atexit.register(disconnect)
        return
    # Anything else is no matter of other processes, such as a module that cannot be imported.
    if isinstance(why, BaseException) and not isinstance(why, RuntimeError | ValueError):
        raise why
    raise CollectiveError(
        f"Process {environment.global_rank()} of {environment.world_size()} waited {timeout:.0f} s at "
        f"{environment.main_address}:{environment.main_port} for the others ({why})"
    ) from (why if isinstance(why, BaseException) else None)


def _check_rank(environment: ClusterEnvironment) -> None:
    """Collectives go by the ranks of the process group, samples are dealt by those of the environment."""
    here = environment.global_rank(), environment.world_size()
    there = distributed.get_rank(), distributed.get_world_size()
    if here != there:
        raise ConfigurationError(
            f"This process is rank {there[0]} of {there[1]} in the process group that is there, and rank {here[0]} of "
            f"{here[1]} for {type(environment).__name__}: give Trainer(plugins=[...]) the environment of what started "
            "the processes, such as ray.train.lightning.RayLightningEnvironment(), or make no process group before."
        )


def _own_store(environment: ClusterEnvironment, timeout: float) -> dict[str, Any]:
    """Arguments for the process group's store, where the one that it would use has seen earlier attempts."""
    # Nothing is given: torch then makes a store of its own, which no earlier attempt has seen.
    if distributed.is_initialized() or not is_kept_by_agent():
        return {}
    world_size = environment.world_size()
    store = agent_store(environment.main_address, environment.main_port, world_size, timeout)
    return {"store": attempt_store(store, environment.global_rank(), world_size, timeout)}


def disconnect() -> None:
    """Leaves the default process group, if there is one; returns when its threads have ended.

    A thread of gloo lets go of the tensors of a collective after those who waited for it go on. In an interpreter that
    is ending, that ends the process with SIGABRT; see :mod:`lightning_dpx.backward_threads`.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()


def on_wire(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` where a process group can send it from; a copy of its own."""
    # Always a copy: a collective writes into it, and a parameter must not change half-way.
    return tensor.to(wire_device(tensor.device), copy=True).contiguous()


def fingerprint(module: nn.Module, **settings: Any) -> Fingerprint:
    """What must be equal on all processes."""
    # In their order, which the buckets of gradients follow on every process.
    parameters = {name: f"{list(value.shape)} {value.dtype}" for name, value in module.named_parameters()}
    buffers = {name: f"{list(value.shape)} {value.dtype}" for name, value in module.named_buffers()}
    return {"torch": torch.__version__, **settings, "parameter": parameters, "buffer": buffers}


def agree(mine: Fingerprint) -> None:
    """Compares the fingerprints of all processes, before anything large is sent.

    Raises:
        ReplicationError: on every process, with the first difference and its ranks.
    """
    # Texts and numbers alone, so this costs little even where models turn out to differ.
    everyone = gather_objects("the comparison of what is trained", dict(mine))
    for rank, theirs in enumerate(everyone):
        difference = _first_difference(everyone[0], theirs)
        if difference is not None:
            what, first, other = difference
            with suppress(RuntimeError):  # the first to leave must not take the answer away from the others
                distributed.barrier()
            raise ReplicationError(
                f"The processes do not train the same thing: {what} is {first} on rank 0 and {other} on rank {rank}."
            )


def _first_difference(first: Fingerprint, other: Fingerprint) -> tuple[str, Any, Any] | None:
    for key, value in first.items():
        if isinstance(value, dict):
            for name in (*value, *other[key]):
                if value.get(name) != other[key].get(name):
                    return f"{key} {name}", value.get(name, "missing"), other[key].get(name, "missing")
            # The same names in another order would add gradients of one
            # parameter to those of another.
            if list(value) != list(other[key]):
                return f"the order of the {key}s", list(value), list(other[key])
        elif value != other.get(key):
            return key, value, other.get(key)
    return None


def gather_objects(what: str, mine: Any) -> list[Any]:
    """The object of every process, in order of rank.

    Raises:
        CollectiveError: a process is lost.
    """
    everyone: list[Any] = [None] * distributed.get_world_size()
    between_processes(what, lambda: distributed.all_gather_object(everyone, mine))
    return everyone


@torch.no_grad()
def start_equal(module: nn.Module) -> None:
    """Gives all processes the parameters and buffers of rank 0."""
    share("sharing the initial weights", [*module.parameters(), *module.buffers()])


@torch.no_grad()
def share(what: str, tensors: list[torch.Tensor]) -> None:
    """Gives every tensor the values that it has on rank 0.

    Raises:
        CollectiveError: a process is lost.
    """
    for tensor in tensors:
        wire = on_wire(tensor.detach())
        # Sent from a copy, as a process group cannot send from every device.
        between_processes(what, functools.partial(distributed.broadcast, wire, 0))
        tensor.copy_(wire)


def with_nodes(environment: ClusterEnvironment | None, num_nodes: int) -> ClusterEnvironment | None:
    """The environment to use, which counts one process per node where no launcher says otherwise.

    A process group that is there already says so: Ray Train makes one and sets no variable that Lightning looks for.

    Raises:
        ConfigurationError: there are several tasks of SLURM, and this process cannot tell which it is.
    """
    if environment is None:
        return None
    if isinstance(environment, SLURMEnvironment):
        environment = _complete_slurm(environment, num_nodes)
    # Exactly Lightning's own, which it takes where it knows no launcher. It would count one
    # process in each worker, and every worker would train a model of its own without a word.
    processes = distributed.get_world_size() if distributed.is_initialized() else 1
    if type(environment) is LightningEnvironment and processes >= max(num_nodes, 2):
        environment.set_world_size(processes)
        environment.set_global_rank(distributed.get_rank())
        return environment
    # A process has all devices of its node, so there are as many processes as nodes.
    environment.set_world_size(num_nodes)
    environment.set_global_rank(environment.node_rank())
    return environment


def _complete_slurm(environment: ClusterEnvironment, num_nodes: int) -> ClusterEnvironment:
    """SLURM's environment, or Lightning's own where SLURM has one task and this process is no part of a step.

    A shell of ``salloc`` and a batch script know the number of tasks, and not which of them they are.

    Raises:
        ConfigurationError: there are several tasks, and this process cannot tell which it is.
    """
    # Lightning's environment reads these with no default, and would fail with a KeyError.
    missing = [name for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID") if name not in os.environ]
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if not missing:
        return environment
    if tasks == "1" and num_nodes == 1:
        return LightningEnvironment()
    raise ConfigurationError(
        f"SLURM_NTASKS is {tasks}, but {' and '.join(missing)} are not set, so this process cannot tell which task it "
        "is: start it with srun, or unset SLURM_NTASKS for one process."
    )
