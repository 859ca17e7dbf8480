"""The numbers that :mod:`lightning_dpx.step_time` predicts a step from, of a config and a module."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_dpx.boundaries import split_at_boundaries
from lightning_dpx.devices import distinct_devices
from lightning_dpx.errors import UnsupportedError
from lightning_dpx.lightning.lightning_api import Trainer
from lightning_dpx.lightning.memory.auto_shift import states_of
from lightning_dpx.lightning.memory.shadow_optimizer import ShadowOptimizer, trained_by, with_shadow_optimizer
from lightning_dpx.memory.profile.roofline import OperatorSeconds, Rates
from lightning_dpx.memory.profile.step_seconds import StepSeconds
from lightning_dpx.reducers import REDUCERS, GradientReducer, HierarchicalReducer, make_reducer
from lightning_dpx.reducers.base import HALVES
from lightning_dpx.replicas.parameter_copies import SMALL
from lightning_dpx.step_time import Bucket, Link, Node, StepTime, Work, messages_of, predict_steps

_HOOKS_LOOK = 3  # times in a step of Lightning at which hooks may look at all gradients: see root_gradients.py
_NARROW = {"bf16": 2, "fp16": 2}  # bytes of a number as hooks of these names send it


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What a step runs on.

    Attributes:
        rates: Of a device.
        link: Between the devices of a node; ``None`` where there is one.
        network: Between nodes; ``None`` where there is one.
        most_nodes: The largest number of nodes that is asked for.
        gradient_buckets: As in the strategy.
        wire_dtype: What gradients travel in, unless their own dtype is smaller.
        communication_hook: As in the strategy.
    """

    rates: Rates
    link: Link | None = None
    network: Link | None = None
    most_nodes: int = 1
    gradient_buckets: int = 8
    wire_dtype: torch.dtype | None = None
    communication_hook: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceOfStep:
    """What the slowest device has to do.

    Attributes:
        seconds: Of its slice in one piece.
        extra: Time of the plan as a share of a step.
        micro_batches: Into how many its slice is cut.
        rows: Of the batch of the node.
    """

    seconds: StepSeconds
    extra: float
    micro_batches: int
    rows: int


def predicted_steps(
    trainer: Trainer,
    module: nn.Module,
    devices: Sequence[torch.device],
    reducer: str | GradientReducer,
    machines: Machines,
    of: SliceOfStep,
) -> list[StepTime]:
    """The times of a step on 1, 2, 4, ... nodes.

    Args:
        trainer: Has the optimizers, and how many batches accumulate.
        module: What is trained.
        devices: Of a node, one per replica.
        reducer: As in the strategy.
        machines: What the step runs on.
        of: What the slowest device does.

    Raises:
        UnsupportedError: it is not known what the reducer, or the communication hook, moves.
    """
    parameters = list(module.parameters())
    distinct = distinct_devices(devices)
    name = name_of_reducer(reducer, distinct)
    owners = _owners(reducer, name, distinct, parameters)
    work = _work(trainer, parameters, owners, machines, of, max(Counter(devices).values()))
    node = Node(
        num_devices=len(distinct),
        reducer=name,
        link=machines.link,
        buckets=_buckets(parameters, owners, machines, of.seconds, work.backward),
        parameters=messages_of([p.nbytes for p in parameters], owners, SMALL * parameters[0].element_size()),
        buffers=[buffer.nbytes for buffer in module.buffers()],
        times_shown=_HOOKS_LOOK if any(owners) else 0,
        groups=reducer.groups if isinstance(reducer, HierarchicalReducer) else [],
    )
    between = sum(_bytes_between_nodes(parameter, machines) for parameter in parameters if parameter.requires_grad)
    return predict_steps(work, node, between, machines.network, machines.most_nodes)


def name_of_reducer(reducer: str | GradientReducer, devices: Sequence[torch.device]) -> str:
    """The name of what a run on these devices would use; they need not be there."""
    if isinstance(reducer, GradientReducer):
        names = [name for name in REDUCERS if REDUCERS[name] is type(reducer)]
        if names:
            return names[0]
        return type(reducer).__name__
    if reducer != "auto":
        return reducer
    # What this machine's own PyTorch can do is of no interest: CUDA devices come with NCCL.
    if {device.type for device in devices} == {"cuda"}:
        return "nccl"
    return "collective"


def _owners(reducer: Any, name: str, devices: Sequence[torch.device], parameters: Sequence[nn.Parameter]) -> list[int]:
    # All parameters belong to the first device there, as with "nccl", which this machine may not have.
    there = "collective" if name == "nccl" else reducer
    if there == "auto":
        there = name
    return make_reducer(there, devices).owners([parameter.numel() for parameter in parameters])


def _work(
    trainer: Trainer,
    parameters: Sequence[nn.Parameter],
    owners: Sequence[int],
    machines: Machines,
    of: SliceOfStep,
    replicas: int,
) -> Work:
    """What the slowest device computes, which runs so many replicas in turn."""
    whole = of.seconds.forward + of.seconds.backward
    extra = of.extra * whole
    # Gradients are whole with the last micro-batch, so only its backward can hide their way.
    backward = (of.seconds.backward + extra) / of.micro_batches
    # A step by hand runs its backwards and its optimizers itself, so that they are in its time already.
    is_by_hand = not of.seconds.backward
    return Work(
        forward=replicas * (whole + extra) - backward,
        backward=backward,
        optimizer=0.0 if is_by_hand else seconds_of_update(trainer.optimizers, parameters, owners, machines.rates),
        rows=of.rows,
        batches=trainer.accumulate_grad_batches,
    )


def seconds_of_update(
    optimizers: Sequence[Any], parameters: Sequence[nn.Parameter], owners: Sequence[int], rates: Rates
) -> float:
    """The time of a step of the optimizers where the owner of most parameters has these rates."""
    owned: Counter[int] = Counter()
    for parameter, owner in zip(parameters, owners, strict=True):
        if parameter.requires_grad:
            owned[owner] += parameter.nbytes
    everything = sum(owned.values())
    if not everything:
        return 0.0
    of_all = sum(_seconds_of_step(optimizer, rates) for optimizer in optimizers)
    return float(of_all) * max(owned.values()) / everything


def _seconds_of_step(optimizer: Any, rates: Rates) -> float:
    """The time of a step of an optimizer on one device."""
    # Few operators work on all parameters at once, so what they move counts and not how many there are.
    moving = replace(rates, start=0.0)

    def seconds(shadow: ShadowOptimizer) -> float:
        with OperatorSeconds(moving) as found:
            shadow.step()
        return float(found.seconds) * shadow.scale

    measured = with_shadow_optimizer(optimizer, seconds, elsewhere=True)
    if measured is not None:
        return measured
    # Parameters and states are read and written, gradients are read.
    num_bytes = sum(parameter.nbytes for parameter in trained_by(optimizer))
    return (3 + 2 * states_of(optimizer)) * num_bytes / rates.bytes


def _buckets(
    parameters: Sequence[nn.Parameter],
    owners: Sequence[int],
    machines: Machines,
    seconds: StepSeconds,
    backward: float,
) -> list[Bucket]:
    overlaps = machines.gradient_buckets > 0
    runs = split_at_boundaries([p.numel() for p in parameters], max(1, machines.gradient_buckets))
    # What is computed again, or cut, stretches the backward evenly.
    stretch = backward / seconds.backward if seconds.backward else 0.0
    buckets = []
    for run in runs:
        trained = [index for index in run if parameters[index].requires_grad]
        if not trained:
            continue
        last = max(seconds.gradients[index] for index in trained)
        buckets.append(
            Bucket(
                ready=stretch * last if overlaps else backward,
                gradients=[_bytes_on_link(parameters[index], machines) for index in trained],
                owners=[owners[index] for index in trained],
            )
        )
    return buckets


def _bytes_on_link(parameter: nn.Parameter, machines: Machines) -> int:
    """A gradient between the devices of a node: halves are summed, and travel, as float32, see reducers/base.py."""
    itemsize = _summed_itemsize(parameter)
    # A dtype of more bits than a gradient has would only make it longer.
    if machines.wire_dtype is not None:
        itemsize = min(itemsize, machines.wire_dtype.itemsize)
    return parameter.numel() * itemsize


def _summed_itemsize(parameter: nn.Parameter) -> int:
    """Bytes of a number of the gradient while it is summed."""
    if parameter.dtype in HALVES:
        return 4
    return parameter.element_size()


def _bytes_between_nodes(parameter: nn.Parameter, machines: Machines) -> int:
    """A gradient between nodes: in the hook's dtype; halves as float32, see reducers/processes.py.

    Raises:
        UnsupportedError: how much a hook sends is not known.
    """
    hook = machines.communication_hook
    if hook is None:
        # Unlike between devices, halves are never narrowed again.
        if parameter.dtype in HALVES:
            return parameter.numel() * _summed_itemsize(parameter)
        return _bytes_on_link(parameter, machines)
    if not isinstance(hook, str) or hook not in _NARROW:
        raise UnsupportedError(
            f"How much communication_hook={hook!r} sends between nodes is not known before it runs; times are "
            "predicted for 'bf16', 'fp16' and None."
        )
    return parameter.numel() * _NARROW[hook]
