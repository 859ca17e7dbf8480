"""Where in a forward the values of a plan are saved, so that hooks are on there and nowhere else.

A hook costs time for every tensor that autograd saves, and most of them are kept. Steps repeat themselves: so the first
forward is followed call by call, with hooks on every module and for every tensor, and what it saves is noted. From then
on hooks on a few modules switch the saved-tensor hooks on where a stretch begins in which something is saved that the
plan drops, and they go off with the last such tensor.

    modules entered    a       b    c         d    e          of these, b and e get a hook
    tensors saved        k k k   k   D k D       k   D        D: dropped, or what a dropped one is made from
    hooks are on               |---------|         |-|

Which tensor a decision is about is told by its place; whether it can be dropped, and how it is made again, is found in
the graph of this very step. So a step of another structure may take more time or memory, and is never wrong. A tensor
with another producer than the one that was noted, a stretch that is not over where the next one begins, or a call that
was never seen ends the routine. For the rest of that forward everything is dropped that the plan's own operators make;
the next forwards are followed call by call, the more of them the more often this happens.

A step that runs a backward of its own within the forward is followed call by call for good.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_dpx.memory.call_names import call_of

_WORTH_A_BREAK = 2  # tensors that are kept: a hook on a module costs as much as two of them


class Entered(NamedTuple):
    """A call of a module that began: which module, and which of its calls, from 0."""

    path: str
    number: int


class Saved(NamedTuple):
    """A tensor that was saved.

    Attributes:
        name: Of its value; empty where it has none.
        node: The operator that produced the tensor; empty for a leaf.
        call: The module call that is made again for it: it knows the tensor by its number among those that it saves.
    """

    name: str
    node: str
    call: Entered | None = None


class Noted(NamedTuple):
    """An operator whose operands were noted, see untracked_inputs.py, and its number among these."""

    number: int


ROOT = Entered("", 0)
Event = Saved | Entered | Noted


@dataclass(frozen=True, slots=True)
class Routine:
    """What a forward does.

    Attributes:
        stretches: What is saved from a call on, up to the last tensor that matters. ``None`` for a
            tensor that does not.
        calls: How often each module was called.
        unseen: Calls that the plan is about and that were not made.
        passed: Calls that begin within a stretch.
        noting: Calls at whose beginning operands begin to be noted, or no longer are.
    """

    stretches: dict[Entered, tuple[Saved | None, ...]]
    calls: dict[str, int]
    unseen: frozenset[Entered]
    passed: frozenset[Entered]
    noting: dict[Entered, bool]

    def contradicts(self, other: "Routine") -> bool:
        """Whether the two have something else to drop in the same calls, so that no routine is one of both.

        As in steps that train parts in turns: what is frozen saves nothing.
        """
        for call in self.stretches.keys() | other.stretches.keys():
            in_both = all(call == ROOT or call.number < one.calls.get(call.path, 0) for one in (self, other))
            if in_both and self.stretches.get(call) != other.stretches.get(call):
                return True
        return False

    def joined(self, newer: "Routine") -> "Routine":
        """What both of them know; where they differ, what the newer one says."""
        calls = dict(self.calls)
        for path, num_calls in newer.calls.items():
            calls[path] = max(calls.get(path, 0), num_calls)

        # The newer forward tells nothing of calls that it did not make: there the older one holds.
        def is_missing(call: Entered) -> bool:
            return call.number >= newer.calls.get(call.path, 0)

        stretches = {call: stretch for call, stretch in self.stretches.items() if is_missing(call)}
        passed = {call for call in self.passed if is_missing(call)}
        noting = {call: on for call, on in self.noting.items() if is_missing(call)}
        unseen = frozenset(call for call in newer.unseen if call.number >= calls.get(call.path, 0))
        stretches |= newer.stretches
        noting |= newer.noting
        return Routine(stretches, calls, unseen, newer.passed | passed, noting)


def make_routine(
    events: Sequence[Event],
    calls: dict[str, int],
    needed: Collection[str],
    containers: Collection[str],
    unpacked: Collection[int] = (),
) -> Routine:
    """The routine of a forward.

    Args:
        events: Of the forward, in order.
        calls: How often each module was called.
        needed: The names of the values that matter.
        containers: The modules that have modules in them. A stretch does not go on across the call of one, because such
            a call may be missing in another step.
        unpacked: The operators whose operands were unpacked.
    """
    # A call that is made again knows its tensors by their numbers, so from its beginning up to the
    # last one that matters nothing may go unheard: there a stretch begins, and none ends.
    counted = _where_to_count(events, needed)
    stretches = _Stretches(containers)
    for at, event in enumerate(events):
        if isinstance(event, Entered):
            stretches.enter(at, event, counted.get(at, -1))
        elif isinstance(event, Saved):
            stretches.save(at, event, matters=event.name in needed)
    stretches.end()
    unseen = frozenset(_unseen_calls(calls, needed))
    return Routine(stretches.found, calls, unseen, frozenset(stretches.passed), _where_to_note(events, unpacked))


class _Stretches:
    """Cuts what a forward saves into stretches, each from a call on to the last tensor that matters.

    Args:
        containers: The modules that have modules in them.

    Attributes:
        found: What is saved in each, by the call with which it begins; ``None`` for what does not matter.
        passed: Calls across which a stretch goes on.
    """

    def __init__(self, containers: Collection[str]) -> None:
        self._containers = containers
        self.found: dict[Entered, tuple[Saved | None, ...]] = {}
        self.passed = set[Entered]()
        self._start = ROOT
        self._entries = list[Saved | None]()
        self._quiet = list[Saved | None]()  # tensors that do not matter, since the last that does
        self._counted_until = -1
        self._last_call: Entered | None = None
        self._quiet_before = 0  # tensors that do not matter, before that call
        self._crossed = False  # into a container
        self._passing = list[Entered]()

    def enter(self, at: int, call: Entered, counted_until: int) -> None:
        """A call begins.

        Args:
            at: The number of the event.
            call: Which.
            counted_until: The number of the last event that has to be heard for this call, if it is made again.
        """
        if counted_until >= 0 and at > self._counted_until:  # from here on everything is heard
            self._begin(call)
            self._quiet = []
            self._forget_calls()
        else:
            # Whether the stretch ends here shows with the next tensor that matters.
            self._last_call = call
            self._quiet_before = len(self._quiet)
            self._crossed = self._crossed or call.path in self._containers
            self._passing.append(call)
        self._counted_until = max(self._counted_until, counted_until)

    def save(self, at: int, tensor: Saved, *, matters: bool) -> None:
        """Autograd saves a tensor; ``at`` is the number of the event."""
        if not matters:
            self._quiet.append(None)
            return
        # The stretch ends and another begins with the last call, if enough tensors lie between them
        # to be worth a hook on that module, or the call of a container does.
        is_worth_it = not self._entries or self._crossed or self._quiet_before >= _WORTH_A_BREAK
        if self._last_call is not None and at > self._counted_until and is_worth_it:
            self._begin(self._last_call)
            self._quiet = self._quiet[self._quiet_before :]
        else:
            # The stretch goes on across these calls; that they are made then is no news.
            self.passed.update(self._passing)
        self._entries += [*self._quiet, tensor]
        self._quiet = []
        self._forget_calls()

    def end(self) -> None:
        """The forward is over."""
        if self._entries:
            self.found[self._start] = tuple(self._entries)

    def _begin(self, call: Entered) -> None:
        self.end()
        self._start = call
        self._entries = []

    def _forget_calls(self) -> None:
        """No call has begun since the last tensor that matters."""
        self._last_call = None
        self._quiet_before = 0
        self._crossed = False
        self._passing = []


def _unseen_calls(calls: dict[str, int], needed: Collection[str]) -> Iterator[Entered]:
    """Calls that the plan may be about and that this forward has left out.

    One that comes after all ends the routine, which knows nothing of what is saved in it.
    """
    for name in needed:
        path, number = call_of(name)
        which = Entered(path, number - 1)
        if path and which.number >= calls.get(path, 0):
            yield which


def _where_to_count(events: Sequence[Event], needed: Collection[str]) -> dict[int, int]:
    """Where calls begin that are made again for a tensor that they save, and where the last such tensor is saved."""
    begun = dict[Entered, int]()
    found = dict[int, int]()
    for at, event in enumerate(events):
        if isinstance(event, Entered):
            begun[event] = at
        elif isinstance(event, Saved) and event.call in begun and event.name in needed:
            found[begun[event.call]] = at
    return found


def _where_to_note(events: Sequence[Event], unpacked: Collection[int]) -> dict[Entered, bool]:
    """Calls at which noting begins (``True``), for an operator before the next call, or ends."""
    found: dict[Entered, bool] = {}
    last = ROOT
    is_on = False
    for event in events:
        if isinstance(event, Entered):
            if is_on:
                found[event] = False
            last = event
            is_on = False
        elif isinstance(event, Noted) and event.number in unpacked:
            found[last] = is_on = True
    return found
