"""The memory of one rank in a step of a module that ``fully_shard`` has spread over ranks that are not there.

Torch's own code runs on fake tensors: it gathers a unit before its forward and its backward, fetches the next one in
backward ahead of time, keeps the outermost one, pads, copies in and out and scatters gradients as it does in a real
group, and a plan is followed as in a real step. So what is there at every moment is known to the byte, without a rule
of ours about any of it; see torch's ``FSDPParamGroup``.

The parameters while they are whole are the one thing that no operator tells of: torch resizes their storages, which are
asked for their size at every event instead.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_dpx.errors import DPXError, PlanError
from lightning_dpx.memory.apply import apply_plan, planned, remove_plan
from lightning_dpx.memory.plan.plan import MemoryPlan
from lightning_dpx.memory.profile.fake import NO_ANSWER, faked, with_or_without_numbers
from lightning_dpx.memory.profile.fake_costs import FakeCosts
from lightning_dpx.memory.profile.profiled_step import Run
from lightning_dpx.torch_compat import (
    is_offloaded,
    is_traceable_wrapper_subclass,
    reset_sharded,
    shard_of,
    sharded_parameters,
)


class RankMemory(NamedTuple):
    """What a step adds on a rank to what is there between steps, in bytes.

    Attributes:
        peak: At the most at once: activations, whole parameters, gradients, and what collectives read and write.
        gradients: The rank's parts of gradients that the step has made by then; none if they were there before.
    """

    peak: int
    gradients: int


class ShardBytes(NamedTuple):
    """What a rank holds all the time on its device, in bytes.

    Attributes:
        parameters: Its parts, with what they are padded by, and parameters that are in no unit.
        gradients: Of its parts, and of parameters that are in no unit.
        states: Of a state that an optimizer keeps for every number of a trained parameter; parts without padding.
    """

    parameters: int
    gradients: int
    states: int


def shard_bytes(module: nn.Module) -> ShardBytes:
    """What a rank holds of ``module``; that of the first rank, whose parts are the largest."""
    parameters = gradients = states = 0
    for one in sharded_parameters(module):
        if is_offloaded(one):  # with CPUOffloadPolicy all of it is on the host, where its optimizer steps
            continue
        shard = shard_of(one)
        parameters += shard.nbytes
        if one.sharded_param.requires_grad:
            # Gradients come out of a collective of equal parts, so that they are padded as well.
            gradients += shard.nbytes
            states += one.sharded_param.to_local().nbytes
    for parameter in module.parameters():
        if is_traceable_wrapper_subclass(parameter):
            continue
        parameters += parameter.nbytes
        if parameter.requires_grad:
            gradients += parameter.nbytes
            states += parameter.nbytes
    return ShardBytes(parameters, gradients, states)


def rank_memory(
    module: nn.Module,
    batch: Any,
    target: torch.device,
    step: Callable[[Any], Run],
    plan: MemoryPlan | None,
    *,
    accumulates: bool = False,
) -> RankMemory:
    """The memory of a step of a sharded module, after the first one, with ``plan`` if there is one.

    Args:
        module: Sharded over ranks of which only this one is there; see :func:`absent_ranks`.
        batch: Of this rank.
        target: What is planned for; it need not be there.
        step: The step on such a batch.
        plan: What is computed again.
        accumulates: Whether gradients of an earlier step are there, to which those of this one are added.

    Raises:
        PlanError: fake tensors cannot run the step.
    """

    def on_fakes(*, numbers: bool) -> RankMemory:
        here = torch.device("cpu")
        with faked(module, batch, target, here, numbers=numbers, sharded=True) as (inputs, costs):
            _follow_parameters(module)
            with costs.preserve_module_state(module), torch.enable_grad(), _following(module, plan, costs):
                return _traced(module, step(inputs), costs, accumulates)

    try:
        with warnings.catch_warnings():
            # Torch compares addresses of parts that it has padded, of which fakes have none.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            return with_or_without_numbers(on_fakes)
    except DPXError:  # about the step itself
        raise
    except NO_ANSWER as error:
        # Its frames hold fakes, and these their originals, which Lightning is about to move.
        traceback.clear_frames(error.__traceback__)
        first = str(error).strip().partition("\n")[0]
        raise PlanError(
            f"What a rank takes is predicted on fake tensors, and they cannot run this step of {type(module).__name__} "
            f"({type(error).__name__}: {first}). {_cure(first)}"
        ) from error
    finally:
        _follow_parameters(module)


def _cure(message: str) -> str:
    # Torch's own complaint, and no step would get further: nothing has gathered the parameters.
    if "mixed torch.Tensor and DTensor" in message:
        return (
            "A unit gathers its parameters when it is called itself: call fully_shard on what the step calls, such as "
            "self.net, and not on what only holds it."
        )
    return "Take what needs numbers out of the step, such as .item() and branches on tensors."


def _follow_parameters(module: nn.Module) -> None:
    """What ``fully_shard`` has noted of parameters is about those that the module has now: fakes, or its own again."""
    for one in sharded_parameters(module):
        reset_sharded(one)


@contextmanager
def _following(module: nn.Module, plan: MemoryPlan | None, costs: FakeCosts) -> Iterator[None]:
    """A context in which steps of ``module`` follow ``plan``, on fakes."""
    if plan is None or plan.keeps_all:
        yield
        return
    applied = apply_plan(module, plan)
    # A run has no fakes, and leaves those alone that torch itself makes.
    if applied.values is not None:
        applied.values.kinds = costs.kinds
    try:
        yield
    finally:
        remove_plan(module)


def _traced(module: nn.Module, run: Run, costs: FakeCosts, accumulates: bool) -> RankMemory:
    def forward_backward() -> None:
        with costs.as_on_target(), planned(module):
            result = run()
        if result is not None:
            result.backward()  # type: ignore[no-untyped-call]

    # The first step makes what lasts, and is followed call by call by a plan's hooks.
    forward_backward()
    if not accumulates:
        _forget_gradients(module)
    trace: Any = costs.trace()
    resized = sharded_parameters(module)
    trace.watch_resized(resized)
    with trace:
        forward_backward()
    curve = trace.curve
    # Fakes are on the host, and a gradient that leaves for it does not move.
    if all(map(is_offloaded, resized)):
        curve = trace.passing()
    # A gradient that outlives the step counts from the moment at which it comes.
    in_all = []
    for here, gathered in zip(curve, trace.resized_bytes, strict=True):
        in_all.append(here + gathered)
    peak = max(in_all, default=0)
    at = in_all.index(peak)
    gradients = curve[at] - trace.passing()[at]
    _forget_gradients(module)
    return RankMemory(peak, gradients)


def _forget_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None
