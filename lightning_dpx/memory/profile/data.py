"""What is known of a profiled step: numbers and names only, which is all that planners see."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

# The plan cache writes these classes to disk as lists of their fields, and reads them back by
# position: a field holds numbers, texts, tuples and classes of this module, and nothing else.


PREFETCH_DEPTH = 2  # offloaded values on their way at once, in each direction, where there is room for them
IsWorth = Callable[[float], bool]  # whether a step that takes so many seconds is worth a profile
Moved = Callable[[int], int]  # the event of another step that stands for one of this


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A tensor that backward needs, or one on the way to such a tensor that is not saved.

    Attributes:
        name: The module call that saves it, and a number; empty where none does.
        operator: The autograd node that produced it.
        num_bytes: Of the tensor, made anew.
        storage: Values with the same number share one storage; -1 where it is not saved.
        inputs: Indices of the values that it is computed from.
        seconds: That this takes, without the inputs.
        refused: Why it cannot be computed again; empty if it can.
        compact: Bytes that stay while it is dropped, of a mask that is compressed instead of computed again.
        offloaded: Whether it is not computed again but comes back from the host's memory.
        copying: Seconds of a copy to the host's memory or back, the slower of the two; 0 where it cannot be offloaded.
        saved: The event of forward before which it was saved first.
        call: The module call that is made again for it; it stands for all that is picked from that call.
        beside: Bytes that come and go while it is made, beyond its own.
        picked: Whether it is a part of its only input, a call, and takes no memory of its own.
        stretches: Of a call: bytes at the most in each of its stretches, while nothing is picked; see call_course.py.
        gone: The first stretch of its call without what is picked.
        within: The call that is replayed as a whole and saves it, if one is; see replayed_steps.py.
        state: Of a call that draws random numbers: bytes of the generators' states that are kept to make it again.
    """

    name: str
    operator: str
    num_bytes: int
    storage: int
    inputs: tuple[int, ...]
    seconds: float
    refused: str
    compact: int = 0
    # Where it may come back from the host.
    offloaded: bool = False
    copying: float = 0.0
    saved: int = 0
    # Where a module call is made again for some of what it saves. Two kinds of values take part: the call itself,
    # which is no tensor (``call``, ``stretches``, ``state``), and what is picked from it (``picked``, ``gone``).
    call: str = ""
    beside: int = 0
    picked: bool = False
    stretches: tuple[int, ...] = ()
    gone: int = 0
    # Where a whole call is replayed instead.
    within: str = ""
    state: int = 0


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """The memory behind one or several values.

    Attributes:
        num_bytes: Its size.
        unused: The event of the step after which it is only kept for backward.
        freed: The event at which it goes if it is kept.
    """

    num_bytes: int
    unused: int
    freed: int

    def moved(self, event: Moved) -> "SavedStorage":
        """The same in a step with other events."""
        return replace(self, unused=event(self.unused), freed=event(self.freed))


@dataclass(frozen=True, slots=True)
class Request:
    """Backward asks for a value.

    Attributes:
        event: When.
        value: Which.
        released: The event at which it has no more use for it.
        hold: The number of what autograd holds for it among the profile's; -1 where it is not known.
    """

    event: int
    value: int
    released: int
    hold: int = -1

    def moved(self, event: Moved) -> "Request":
        """The same in a step with other events."""
        return replace(self, event=event(self.event), released=event(self.released))


@dataclass(frozen=True, slots=True)
class SavedCall:
    """A call of a module that can be replayed as a whole.

    Attributes:
        name: Of the call.
        kind: Calls of one kind do the same to tensors of the same sizes.
        parent: The number of the innermost call among these that it is made in; -1 without one.
        begin: The event at which it begins.
        end: The event at which it is over.
        tensors: That autograd saves within it.
        seconds: To make it again.
        most: Bytes at the most while it is made again, those that stay for backward among them.
        again: What stays for backward then: bytes, and the event at which they go.
        small: Bytes of what it saves that is no value of its own, and that stays as long as the call's.
        given: Storages of the profile that it takes.
        given_beside: What it takes and is not saved: bytes, and the event at which they would go.
        state: Bytes of the states of random generators that are kept for it.
    """

    name: str
    kind: str
    parent: int
    begin: int
    end: int
    tensors: int
    seconds: float
    most: int
    again: tuple[tuple[int, int], ...]
    small: int
    given: tuple[int, ...]
    given_beside: tuple[tuple[int, int], ...]
    state: int

    def moved(self, event: Moved) -> "SavedCall":
        """The same in a step with other events."""
        return replace(
            self,
            begin=event(self.begin),
            end=event(self.end),
            again=tuple((size, event(until)) for size, until in self.again),
            given_beside=tuple((size, event(until)) for size, until in self.given_beside),
        )


@dataclass(frozen=True, slots=True)
class CodeRun:
    """A call of compiled code that may save a share of what it saves by itself.

    Attributes:
        share: Of its bytes, from 0 to 1; see ``torch._functorch.config.activation_memory_budget``.
        forward: Bytes at the most while it runs, beyond those that were there before.
        stays: Bytes that are still there when it is over, its output among them.
        backward: Bytes at the most while its backward runs, beyond those that were there before.
        seconds: Of its forward and its backward.
    """

    share: float
    forward: int
    stays: int
    backward: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """A call of a compiled part.

    Attributes:
        name: Of the call.
        begin: The event with what is there when it begins.
        end: The event with what is there when it is over.
        asked: The event with what is there when its backward begins.
        over: The event at which that is over.
        runs: The same call with other shares of what it may save, the largest first: the whole, as the curve has it.
    """

    name: str
    begin: int
    end: int
    asked: int
    over: int
    runs: tuple[CodeRun, ...] = ()

    @property
    def path(self) -> str:
        """The path of the compiled part."""
        return self.name.partition("#")[0]

    def moved(self, event: Moved) -> "CompiledCall":
        """The same in a step with other events."""
        return replace(
            self, begin=event(self.begin), end=event(self.end), asked=event(self.asked), over=event(self.over)
        )


@dataclass(frozen=True, slots=True)
class Hold:
    """Autograd holds a value, or a tensor of a call that is too small to be one.

    Attributes:
        name: Of the value; empty for a small tensor.
        module_call: The name of the call that runs when it is saved; empty likewise.
        call: The number of the innermost call that can be replayed; -1 without one.
        asked: The event at which backward first asks for it; -1 if it never does.
        end: The event at which autograd lets go of it.
    """

    name: str
    module_call: str
    call: int
    asked: int
    end: int

    def moved(self, event: Moved) -> "Hold":
        """The same in a step with other events."""
        return replace(self, asked=event(self.asked), end=event(self.end))


@dataclass(frozen=True, slots=True)
class PlanOverhead:
    """Seconds that the hooks of a plan take in a step, beside the operators that run again.

    The part of :class:`~lightning_dpx.memory.profile.bookkeeping.Bookkeeping` that depends on the whole choice; the
    rest of it is in the seconds of the values and calls already.

    Attributes:
        per_step: In any step in which something is dropped, whatever that is.
        per_value: Of those of a value, what is taken once in a step, however often the value is made again.
        per_place: At each place at which something is dropped; see drop_sites.py.
        usual_places: Places for each value that is made again, as the values' seconds count them already.
        per_offload: Of each offloaded value, what the host spends on sending it away and fetching it.
    """

    per_step: float = 0.0
    per_value: float = 0.0
    per_place: float = 0.0
    usual_places: float = 0.0
    per_offload: float = 0.0

    def scaled(self, factor: float) -> "PlanOverhead":
        """The same of a step whose operators take ``factor`` times as long."""
        return replace(
            self,
            per_step=self.per_step * factor,
            per_value=self.per_value * factor,
            per_place=self.per_place * factor,
            per_offload=self.per_offload * factor,
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """A step, seen from its memory. Events are numbered through forward and backward.

    Attributes:
        values: In the order in which forward made them known.
        storages: What they occupy.
        requests: Of backward, in order.
        curve: Bytes at every event, if all is kept; without what outlives the step.
        forward_events: How many of the events belong to forward.
        step_seconds: Time in the operators of forward and backward.
        scale: Rows of the real batch for each row that was profiled.
        forward_seconds: The part of forward in the time of the step.
        offloading_room: Bytes that may be offloaded where they could be computed again as well.
        pins_offloaded: Whether that is in blocks of pinned memory, whose sizes are powers of two.
        hides_copies: Whether the device computes while copies are on their way to the host or back.
        prefetch_depth: How many offloaded values are on their way at once, in each direction; see offload.py.
        basis: What all this rests on, in words; empty for a step that was run and measured.
        saves: Event and value of everything that autograd saves, in order; empty if it asks for each at most once, so
            that the requests tell how long a value is waited for.
        operators: Event and name of every operator, in order; empty where they were not noted.
        calls: Calls of modules that can be replayed as a whole, in the order in which they begin.
        holds: What autograd holds, in order; empty if nothing can be replayed.
        replaying: Seconds that are spent on replayed calls already; see replayed_steps.py.
        overhead: What the hooks of a plan take, beside all that is made again.
        communicates: Whether the step talks to other processes.
        units: Paths of the sharded parts within which values are made again, with spaces between.
        recipes: Those of the user's that were tried in it, by name and digest, with spaces between.
        codes: Calls of compiled parts.
        adding: Events at which more would be there if backward found gradients on parameters that have none, and added
            new ones to them; and how many bytes more, or less where the curve counts new gradients. Empty for a step
            that finds them.
        called: How often each module is called with gradients, by path; empty where calls were not counted.
        returned: Bytes of the memory of what the step returns beside its loss.
        merged: Bytes of the tensors in that, made anew.
        left_behind: Bytes that the step has made and that are there after it, beside gradients.
    """

    values: tuple[SavedValue, ...]
    storages: tuple[SavedStorage, ...]
    requests: tuple[Request, ...]
    curve: tuple[int, ...]
    forward_events: int
    step_seconds: float
    scale: float = 1.0
    forward_seconds: float = 0.0
    offloading_room: int = 0
    pins_offloaded: bool = False
    hides_copies: bool = True
    prefetch_depth: int = 0
    basis: str = ""
    saves: tuple[tuple[int, int], ...] = ()
    operators: tuple[tuple[int, str], ...] = ()
    calls: tuple[SavedCall, ...] = ()
    holds: tuple[Hold, ...] = ()
    replaying: float = 0.0
    overhead: PlanOverhead = PlanOverhead()
    communicates: bool = False
    units: str = ""
    recipes: str = ""
    codes: tuple[CompiledCall, ...] = ()
    adding: tuple[tuple[int, int], ...] = ()
    called: tuple[tuple[str, int], ...] = ()
    returned: int = 0
    merged: int = 0
    left_behind: int = 0

    @property
    def peak(self) -> int:
        """Bytes of activations at the most, if all is kept."""
        return max(self.curve, default=0)

    def seconds_again(self, index: int) -> float:
        """Seconds each time the value is recomputed after the first."""
        value = self.values[index]
        # In a loop over what is made again nothing is noted, and no hook of autograd is called. A
        # call that is made again has another bookkeeping.
        if value.call:
            return value.seconds
        return max(0.0, value.seconds - self.overhead.per_value)

    def _repr_html_(self) -> str:
        """What a notebook shows: the largest values, and what it takes to make each again."""
        from lightning_dpx.notebook import html_table  # planners, which read profiles, need neither
        from lightning_dpx.units import MIB, format_mib

        rows: list[tuple[str, ...]] = []
        for value in sorted(self.values, key=lambda value: value.num_bytes, reverse=True):
            # What has no name only stands on the way to others: no plan can decide about it.
            if value.name:
                again = value.refused or f"{value.seconds * 1e3:.3f}"
                rows.append((value.name, value.operator, f"{value.num_bytes / MIB:.2f}", again))
        caption = f"{len(rows)} values are kept for backward; peak {format_mib(self.peak)}"
        basis = f" ({self.basis})" if self.basis else ""
        return html_table(f"{caption}{basis}", ("value", "operator", "MiB", "ms to make it again"), rows)


def most_with(stretches: Sequence[int], wanted: Collection[tuple[int, int]]) -> int:
    """Bytes of a call at the most, if these are ``wanted``: for each the first stretch without it, and its bytes."""
    # The last entry is for what is there to the end of the call anyway, and so adds to no stretch.
    stays = [0] * (len(stretches) + 1)
    for gone, num_bytes in wanted:
        stays[min(gone, len(stretches))] += num_bytes
    most = 0
    added = 0
    # The stretches were watched while nothing was wanted: what is wanted does not go where it went
    # then, and so adds to every stretch from there on.
    for stretch, more in zip(stretches, stays, strict=False):
        added += more
        most = max(most, stretch + added)
    return most


def outermost(calls: Sequence[SavedCall], chosen: Collection[str]) -> set[int]:
    """The numbers of the ``chosen`` calls that are in no other chosen one."""
    numbers = set()
    for at, call in enumerate(calls):
        # An outer call that is made again makes the inner ones again as well.
        parent = call.parent
        while parent >= 0 and calls[parent].name not in chosen:
            parent = calls[parent].parent
        if parent < 0 and call.name in chosen:
            numbers.add(at)
    return numbers
