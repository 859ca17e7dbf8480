"""How a step is watched and its operators are tried: by running them where the step runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_dpx.devices import (
    HostRoom,
    accelerators,
    clock_of,
    counts_by_its_clock,
    free_bytes,
    is_host,
    is_modelled,
    synchronize,
)
from lightning_dpx.memory.execute.offload import copy_seconds
from lightning_dpx.memory.execute.recomputation import repeat, run_recipe
from lightning_dpx.memory.execute.stored_otherwise import compress
from lightning_dpx.memory.execute.values import Value
from lightning_dpx.memory.execute.whole_call_replays import WholeCallReplay
from lightning_dpx.memory.profile.bookkeeping import Bookkeeping, measured_bookkeeping
from lightning_dpx.memory.profile.call_course import CallCourse, course_of
from lightning_dpx.memory.profile.replay_trials import TimedReplay, WatchedReplay
from lightning_dpx.memory.profile.step_timer import StepTimer
from lightning_dpx.memory.tracing.allocator_account import account_of, hidden_on
from lightning_dpx.memory.tracing.communication import has_other_processes
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.memory.tracing.storage_ledger import Allocation
from lightning_dpx.python_objects.leave_no_trace import BeforeWrites, CopyOnWrite, Reach, untouched


class Trial(NamedTuple):
    """What making a value again gave.

    Attributes:
        tensor: The value.
        seconds: That it took.
        most: Bytes that were there at once, the result's own among them.
    """

    tensor: torch.Tensor
    seconds: float
    most: int


class CostModel:
    """Measures on a device.

    Args:
        device: Where the tensors of the step are.
        watches_room: Whether a step that the host seems to have no room for is stopped.
        part: How many rows are run of how many that the step has, if a part of them stands for all.

    Attributes:
        basis: What the figures rest on, if not on a step that was measured.
        kinds: Types of the tensors of the step.
        is_sure_at_once: Whether what is timed again would take exactly as long.
        times_steps: Whether steps are timed as they are, and not by the trace.
        hides_copies: Whether the device computes while tensors are copied to the host's memory or back.
        offloads: Whether what is planned for is a device that can leave tensors in the host's memory.
    """

    basis: str = ""
    kinds: tuple[type[torch.Tensor], ...] = (torch.Tensor,)
    is_sure_at_once: bool = False

    def __init__(self, device: torch.device, *, watches_room: bool = True, part: tuple[int, int] | None = None) -> None:
        self.device = device
        self._part = part
        self._fixed_sizes: set[int] = set()  # of dims that do not grow with the rows
        self._watches_room = watches_room and is_host(device)
        self._account = account_of(device)
        self.offloads: bool = not is_host(device)
        self.times_steps: bool = not is_modelled(device)
        self.hides_copies: bool = not counts_by_its_clock(device)
        self._wait: float | None = None
        self._writes: CopyOnWrite | None = None
        self._room: HostRoom | None = None
        self._reach: tuple[nn.Module, Reach] | None = None
        if why := hidden_on(device):
            self.basis = f"without what operators take inside: {why}"

    def note_sizes(self, module: nn.Module) -> None:
        """Notes the dims of parameters and buffers, if a part of the rows stands for all."""
        if self._part is None:
            return
        for tensor in (*module.parameters(), *module.buffers()):
            if not is_lazy(tensor):
                self._fixed_sizes.update(tensor.shape)

    def bytes_in_step(self, tensor: torch.Tensor) -> int:
        """Of a saved tensor in a step on all rows, as far as its dims tell: the same are to be values there."""
        if self._part is None or not tensor.dim():
            return tensor.nbytes
        # Statistics of channels, as batch norm saves them, are as long as what it has for each.
        if tensor.dim() == 1 and tensor.shape[0] in self._fixed_sizes:
            return tensor.nbytes
        rows, all_rows = self._part
        # Rows come first, also where they are joined with another dim; some modules have them second.
        if tensor.shape[0] % rows == 0 or rows in tensor.shape:
            return tensor.nbytes * all_rows // rows
        return tensor.nbytes

    def preserve_module_state(self, module: nn.Module) -> AbstractContextManager[None]:
        """A context for a traced run: puts the module and random generators back."""
        return self._untouched(module)

    def reach_of(self, module: nn.Module) -> Reach:
        """What ``module`` leads to, looked for once: every run puts it back as it was."""
        if self._reach is None or self._reach[0] is not module:
            self._reach = module, Reach(module)
        return self._reach[1]

    def forget_reach(self) -> None:
        """Holds nothing of the module any longer, such as fakes that stand in for its tensors."""
        self._reach = None

    @contextmanager
    def _untouched(self, module: nn.Module) -> Iterator[None]:
        # The trace of the run tells it of every write before it happens; see :meth:`_watch`.
        with untouched(module, reach=self.reach_of(module)) as self._writes:
            # Processes that meet in the step would wait for the one that has stopped.
            if self._watches_room and not has_other_processes():
                self._room = self.room_for_step()
            try:
                yield
            finally:
                self._writes = None
                self._room = None

    def room_for_step(self) -> HostRoom:
        """What is left on the host before a run."""
        return HostRoom()

    def trace(self) -> MemoryTrace:
        """Follows the storages of a run."""
        return self._watch()

    def trying(self) -> AbstractContextManager[object]:
        """A context in which operators are repeated."""
        return nullcontext()

    def trial_of(self, value: Value) -> Trial:
        """What making ``value`` again gives and takes, by the allocator's account."""
        wait = self._seconds_of_waiting()
        token = self._account.start()
        try:
            tensor, seconds = self._repeated(value)
        finally:
            taken = self._account.stop(token)
        return Trial(tensor, _beyond(wait, seconds), taken.most)

    def timed_replay(self, replay: WholeCallReplay) -> TimedReplay:
        """Makes a call again, as backward will, and measures how long that takes."""
        wait = self._seconds_of_waiting()
        clock = clock_of(self.device)
        # Operators of accelerators return before they are done: those before must not count, and
        # this one must to its end.
        synchronize(self.device)
        start = clock()
        found = replay.replay()
        synchronize(self.device)
        return TimedReplay(found, _beyond(wait, clock() - start))

    def watched_replay(self, replay: WholeCallReplay) -> WatchedReplay:
        """Makes a call again, as backward will, with a trace of its memory."""
        synchronize(self.device)
        trace = self._watch()
        with trace:
            found = replay.replay()
        synchronize(self.device)
        return WatchedReplay(found, trace)

    def _seconds_of_waiting(self) -> float:
        """Seconds until an operator is over that does next to nothing: to start it, and to wait for it.

        No operator of a step is waited for, and what it takes to start them counts as far as the device waits for that,
        as bookkeeping does. On a virtual machine with an H200, layer norms whose kernel runs for 21 us took 160 us so,
        and products of matrices 207 instead of 85 us.
        """
        if is_host(self.device) or is_modelled(self.device):
            return 0.0
        if self._wait is None:
            one = Value("", "")
            one.keep(torch.zeros(1, device=self.device))
            negated = Value("", "")
            negated.learn(torch.neg, [one])
            self._wait = min(self._repeated(negated)[1] for _ in range(_WAITS))
        return self._wait

    def _repeated(self, value: Value) -> tuple[torch.Tensor, float]:
        clock = clock_of(self.device)
        synchronize(self.device)
        start = clock()
        tensor = repeat(value)
        synchronize(self.device)
        return tensor, clock() - start

    def timer(self, module: nn.Module) -> StepTimer:
        """Times steps of ``module``."""
        return StepTimer(self.device, partial(self._alone, module))

    @contextmanager
    def _alone(self, module: nn.Module, *, watches: bool) -> Iterator[CopyOnWrite | None]:
        with self.preserve_module_state(module):
            writes = self._writes
            # A step that is timed has no trace that would tell of writes.
            with nullcontext() if writes is None or not watches else BeforeWrites(writes, self._take_room()):
                yield writes

    def bookkeeping(self) -> Bookkeeping:
        """What a planned step spends beside its operators, as far as that is known without running one."""
        if not self.times_steps:
            return Bookkeeping()
        known = measured_bookkeeping()
        if is_host(self.device):
            return known
        # What leaves for the host's memory passes the hooks that what is dropped does. Its streams
        # and events come on top, of which only a step tells.
        return replace(known, offload=known.value)

    def course_of(self, call: Value) -> CallCourse:
        """What ``call`` takes while it is made again.

        Raises:
            NotRecomputable: it talks to other processes, which would not answer.
        """
        return course_of(call, self._watch())

    def _watch(self) -> MemoryTrace:
        return MemoryTrace(self.device, self._writes, self._take_room())

    def _take_room(self) -> Callable[[int], None] | None:
        if self._room is None:
            return None
        return self._room.take

    def is_same(self, again: torch.Tensor, original: torch.Tensor) -> bool:
        """Whether a tensor that was made again is right: to the bit on the host."""
        if torch.equal(again, original):  # nearly always; a comparison with tolerances takes eleven times as long
            return True
        # Also asked of equal tensors with NaNs, which torch.equal takes for unequal. On
        # accelerators the order of atomic sums is not fixed, and neither are the last digits.
        tolerance = 0.0
        if not is_host(self.device) and again.dtype.is_floating_point:
            tolerance = 4 * torch.finfo(again.dtype).eps
        scale = float(original.abs().max()) if tolerance and original.numel() else 1.0
        return torch.allclose(again, original, rtol=tolerance, atol=tolerance * scale, equal_nan=True)

    def compressed(self, value: Value, span: Allocation) -> tuple[int, float] | None:
        """The bytes of ``value`` as a compressed mask, and the seconds that packing and unpacking take."""
        clock = clock_of(self.device)
        start = clock()
        # On a value of its own: that of the step is to be tried as it is.
        trial = Value(value.name, "")
        trial.tensor = value.tensor
        if not compress(trial):
            return None
        run_recipe(trial)
        return trial.inputs[0].nbytes, clock() - start

    def copy_seconds(self, tensor: torch.Tensor) -> float:
        """Seconds of a copy to the host's memory or back, the slower of the two."""
        return copy_seconds(tensor)

    def offloading_room(self) -> int:
        """Bytes of the host's memory for what could be computed again as well."""
        if not self.offloads:
            return 0
        # Each device is profiled by itself, and all of them offload to the same host: so each gets
        # an equal part of one half.
        return free_bytes(_HOST) // (2 * max(1, len(accelerators())))


def _beyond(wait: float, seconds: float) -> float:
    """What an operator takes beyond that, and no less than any kernel does."""
    if not wait:
        return seconds
    return max(_SHORTEST_KERNEL, seconds - wait)


_HOST = torch.device("cpu")
_WAITS = 20
_SHORTEST_KERNEL = 2e-6  # seconds
