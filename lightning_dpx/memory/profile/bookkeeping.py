"""What a planned step spends beside its operators: on noting what is dropped, and on finding it again.

It is measured once in a process, on a model of small tensors whose operators cost next to nothing: the time of a
planned step, less that of the same step without a plan and of the operators that are repeated. Where operators run
beside Python, as on accelerators, such time counts as far as the device waits for it, which only the step itself tells:
one of many small kernels waits for the host all the time, and one of few large ones never does.

There the code and what it works on stay in the processor's caches. Between the operators of a larger model they do not,
and the same lines take two to three times as long; see :mod:`lightning_dpx.memory.profile.bookkeeping_in_step`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.recomputation import compute
from lightning_dpx.memory.execute.routine_hooks import RoutineHooks
from lightning_dpx.memory.execute.saved_tensor_hooks import Rematerialization, ValueActions
from lightning_dpx.memory.execute.tensor_identity import identity_of
from lightning_dpx.memory.execute.values import Value
from lightning_dpx.memory.execute.whole_call_replays import Replays
from lightning_dpx.memory.profile import timing_effort

_ROWS = 32
_WIDTH = 64
_BLOCKS = 8
_ROUNDS = 9
_WARM = 3
_RECIPES = 5
_CHAIN = 64
_TENSORS = 10  # of a block: values that are made again, and tensors that autograd saves


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """Prices of a planned step's Python, for one value, call, tensor or step: seconds of processor time.

    What a process measures, of any model or of one. A profile gets them added to its values and calls, and what no
    single one of them takes as its :class:`~lightning_dpx.memory.profile.data.PlanOverhead`, which is all that planners
    see of it.

    Attributes:
        value: For a value that is made again, beside its operator.
        call: For a call that is replayed as a whole, beside the replay itself.
        tensor: For each tensor that is saved within such a call.
        place: Of what values take, for each place at which some are dropped; see drop_sites.py.
        usual_places: For each value that is made again, so many places count in ``value`` already.
        again: For each further time that a value is made in a step: nothing is noted then, and found by no hook.
        following: For a step in which anything is dropped, whatever that is: steps with backwards of their own have
            hooks on every module and for every tensor.
        operator_share: Of what operators take that are tried one by one, so much they take within a step. A device that
            computes beside Python gets the next one while it is busy, and alone each begins on an idle device.
        call_share: The same of calls that are replayed.
        offload: For a value that is sent to the host's memory and fetched, beside its copies.
        step_seconds: Of the step without a plan that this was measured beside; 0 where it was measured elsewhere.
    """

    value: float = 0.0
    call: float = 0.0
    tensor: float = 0.0
    place: float = 0.0
    usual_places: float = 0.0
    again: float = 0.0
    following: float = 0.0
    operator_share: float = 1.0
    call_share: float = 1.0
    offload: float = 0.0
    step_seconds: float = 0.0

    def of_call(self, tensors: int) -> float:
        """Seconds for a call that saves so many tensors: each is given to autograd and back."""
        return self.call + 2 * tensors * self.tensor


class _Block(nn.Module):
    """A block with some of everything that models are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, _WIDTH)
        self.down = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return added


@cache
def measured_bookkeeping() -> Bookkeeping:
    """The bookkeeping of a small network on the host: values dropped, and blocks replayed."""
    # The model draws its weights, and the step that is planned is to draw what it would have drawn
    # without that.
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        # Wherever new tensors are to be made.
        with torch.device("cpu"):
            module = nn.Sequential(*(_Block() for _ in range(_BLOCKS)))
        x = torch.ones(_ROWS, _WIDTH, device="cpu", requires_grad=True)
        plain = _seconds(lambda: module(x).sum().backward())
        forward = _seconds(lambda: module(x))
        # All values are dropped, so backward repeats the operators of forward, without a graph.
        # What is beyond their time is bookkeeping.
        with torch.no_grad():
            again = _seconds(lambda: module(x))
        values = _everything_dropped(module, x)
        try:
            planned = _seconds(partial(_planned_step, values, module, x))
        finally:
            values.remove()
        blocks = [str(number) for number in range(_BLOCKS)]
        # The same tensors are saved whether every block is replayed or the one module round them:
        # what they take is the same then, and the difference is what the calls take.
        each = _replayed_forward(module, x, blocks) - forward
        whole = nn.Sequential(module)
        once = _replayed_forward(whole, x, ["0"]) - forward
    # Differences of times: where others disturb one of them it may be negative.
    tensor = max(0.0, once) / (_BLOCKS * _TENSORS)
    return Bookkeeping(
        value=max(0.0, planned - plain - again) / (_BLOCKS * _RECIPES),
        call=max(0.0, each / _BLOCKS - _TENSORS * tensor),
        tensor=tensor,
        again=_seconds_again(),
    )


def _seconds_again() -> float:
    """Seconds for a value of many that are made again for one request, without its operator."""
    tensor = torch.ones(_ROWS, _WIDTH, device="cpu")
    kept = Value("", "")
    kept.keep(tensor)
    chain = [kept]
    for _ in range(_CHAIN):
        value = Value("", "")
        value.identity = identity_of(tensor)
        value.learn(_as_it_is, [chain[-1]])
        value.dropped = value.uncached = value.nested = True
        chain.append(value)
    with torch.no_grad():
        seconds = _seconds(lambda: _computed_anew(chain))
    return seconds / _CHAIN


def _computed_anew(chain: list[Value]) -> None:
    for value in chain[1:]:
        value.tensor = None
    compute(chain[-1])


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _everything_dropped(module: nn.Module, x: Tensor) -> RoutineHooks:
    """Hooks that drop all that comes from the graph."""
    names = CallNames(module)
    seen = _Seen(names)
    with seen.active():
        module(x)
    return RoutineHooks(names, set(seen.operators.values()), ValueActions(dropped=list(seen.operators)))


class _Seen(Rematerialization):
    """Drops nothing, and notes the names and operators of what could be."""

    def __init__(self, names: CallNames) -> None:
        super().__init__(names)
        self.operators: dict[str, str] = {}

    def consider(self, value: Value, node: Any | None, output: int) -> bool:
        """Keeps it."""
        if node is not None:
            self.operators[value.name] = value.operator
        return False


def _replayed_forward(module: nn.Module, x: Tensor, names: list[str]) -> float:
    """Seconds of a forward in which these calls are noted, to be replayed."""
    replays = Replays(module, names)

    def forward() -> None:
        with replays.active():
            module(x)

    try:
        return _seconds(forward)
    finally:
        replays.remove()


def _planned_step(values: RoutineHooks, module: nn.Module, x: Tensor) -> None:
    with values.active():
        result = module(x).sum()
    result.backward()


def _seconds(run: Callable[[], object]) -> float:
    return timing_effort.least_seconds(run, _ROUNDS, _WARM)
