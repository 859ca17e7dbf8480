"""A step that no profile shows, put together from profiles of steps that show parts of it each.

Where layers are skipped by chance, a step may call together what no profiled step has called together. What a call
saves and takes is the same whatever else is called: so the calls that one profile lacks are cut out of another one, and
stand where they belong in the order of forward.

    events of one profile    | forward  a   b   |   d | backward  d   |   b   a |
    of another one                          c   ^                 c   ^
    together                 | forward  a   b  [ c ] d | backward  d [ c ]  b   a |

What is between the cuts keeps its course, and lies by so much higher as the calls keep that stand before it.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from lightning_dpx.memory.profile.data import CompiledCall, Profile, Request, SavedCall, SavedStorage, SavedValue
from lightning_dpx.memory.profile.scaling import scaled

_NUMBER = re.compile(r"\d+")
_NOT_CALLED = "its call is not made"


def calls_in(profile: Profile) -> dict[str, int]:
    """How often each module is called in a step, by path: as it was counted, and as its values tell."""
    calls = dict(profile.called)
    for value in profile.values:
        if value.name:
            path, number = _call_of(value.name)
            calls[path] = max(calls.get(path, 0), number)
    return calls


def varying_paths(profiles: Sequence[Profile]) -> list[str]:
    """The modules that are called more often in some of these steps than in others."""
    counts = [calls_in(profile) for profile in profiles]
    named: set[str] = set()  # of modules that save anything
    for profile in profiles:
        named |= {_call_of(value.name)[0] for value in profile.values if value.name}
    varying = []
    for path in sorted(named):
        if path and len({calls.get(path, 0) for calls in counts}) > 1:
            varying.append(path)
    return varying


def has_calls(profile: Profile, calls: Mapping[str, int]) -> bool:
    """Whether a step makes at least these calls: so many of each path."""
    mine = calls_in(profile)
    return all(mine.get(path, 0) >= number for path, number in calls.items())


def join_steps(profiles: Sequence[Profile], calls: Mapping[str, int]) -> Profile:
    """The step that makes ``calls``, and besides what all of the profiled steps do.

    Args:
        profiles: Of steps, which make all of these calls among them.
        calls: How often it calls each of the modules that not all steps call as often.
    """

    def is_made(value: SavedValue) -> bool:
        path, number = _call_of(value.name)
        return number <= calls.get(path, number)

    def is_wanted(value: SavedValue) -> bool:
        path, number = _call_of(value.name)
        return number <= calls.get(path, 0)

    # What is not called by chance is taken from the profile that is most alike.
    most = max(range(len(profiles)), key=lambda index: _likeness(profiles[index], is_made))
    joined = _without(profiles[most], is_made)
    for index, profile in enumerate(profiles):
        if index != most:
            joined = _Insertion(joined, _as_large(profile, joined), is_wanted)()
    return replace(joined, called=tuple(sorted((calls_in(joined) | dict(calls)).items())))


def _as_large(profile: Profile, other: Profile) -> Profile:
    """The profile, of as many rows as the other one, if that has more: by what both have."""
    sizes = {value.name: value.num_bytes for value in other.values if value.name}
    mine = theirs = 0
    for value in profile.values:
        if value.name in sizes:
            mine += value.num_bytes
            theirs += sizes[value.name]
    # To make it smaller could leave out what its calls take; rather too much is counted.
    if 0 < mine < theirs:
        return scaled(profile, theirs / mine)
    return profile


def _call_of(name: str) -> tuple[str, int]:
    path, _, number = name.rpartition(":")[0].partition("#")
    return path, int(number or 1)


def _likeness(profile: Profile, is_made: Callable[[SavedValue], bool]) -> int:
    """Bytes of a step's values that the other one has as well, less those of the others."""
    bytes_alike = 0
    for value in profile.values:
        if value.name:
            bytes_alike += value.num_bytes if is_made(value) else -value.num_bytes
    return bytes_alike


def _without(profile: Profile, is_made: Callable[[SavedValue], bool]) -> Profile:
    """The step without the values of calls that are not made."""
    missing = {index for index, value in enumerate(profile.values) if value.name and not is_made(value)}
    if not missing:
        return profile
    values = list(profile.values)
    for index in missing:
        # Others may be computed from it, so it keeps its number.
        values[index] = replace(values[index], name="", refused=_NOT_CALLED, compact=0)
    rest = replace(profile, values=tuple(values))
    # A storage stays as long as one of its values is saved by a call that is made.
    present = {value.storage for index, value in enumerate(profile.values) if index not in missing}
    storages = list(profile.storages)
    for index in missing:
        number = profile.values[index].storage
        if number >= 0 and number not in present:
            storages[number] = replace(storages[number], num_bytes=0)
    return replace(
        rest,
        storages=tuple(storages),
        curve=tuple(map(int, _Insertion(rest, profile, lambda _: True).curve_without())),
        requests=tuple(request for request in profile.requests if request.value not in missing),
        saves=tuple((event, value) for event, value in profile.saves if value not in missing),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Values that follow each other in a step, of calls that another step lacks.

    Attributes:
        values: Their indices, in the order in which they are saved.
        forward: The events of forward at which their calls begin and are over.
        backward: The events of backward at which they begin and are over.
        before: The event of the other step before which the calls stand in forward.
        after: The event of the other step before which they stand in backward.
        at: The number of the value there before which they stand.
        next: The number of the value that comes after them in their own step; -1 without one.
    """

    values: tuple[int, ...]
    next: int
    forward: tuple[int, int]
    backward: tuple[int, int]
    before: int
    after: int
    at: int


class _Events:
    """Where the events of two steps are in the one that is made of them.

    Args:
        base: Into which the runs are put.
        donor: From which they are.
        runs: In the order of forward.
    """

    def __init__(self, base: Profile, donor: Profile, runs: Sequence[_Run]) -> None:
        self._donor = donor
        self.runs: Sequence[_Run] = runs
        cuts = [(run.before, number, run.forward) for number, run in enumerate(runs)]
        # What comes last in forward comes first in backward.
        cuts += [(run.after, 2 * len(runs) - number, run.backward) for number, run in enumerate(runs)]
        self.cuts: list[tuple[int, int, tuple[int, int]]] = sorted(cuts)
        shift = np.zeros(len(base.curve) + 1, dtype=np.int64)
        for event, _, (begin, end) in self.cuts:
            shift[event:] += end - begin
        # An event at a cut comes after what is put in there.
        self._shift = shift
        self.starts: dict[int, int] = {}  # of each cut, by its number
        longer = 0
        for event, number, (begin, end) in self.cuts:
            self.starts[number] = event + longer
            longer += end - begin
        self.num_added: int = longer

    def of_base(self, event: int) -> int:
        """Where that event of the base is; -1 is none."""
        if event < 0:
            return event
        return event + int(self._shift[min(event, len(self._shift) - 1)])

    def of_run(self, number: int, event: int) -> int:
        """Where that event of the donor is in a run: at its end what comes later."""
        if event < 0:
            return event
        # What happens outside of the run, such as a release much later, is moved to its nearer end.
        is_forward = event < self._donor.forward_events
        begin, end = self.runs[number].forward if is_forward else self.runs[number].backward
        start = self.starts[number if is_forward else 2 * len(self.runs) - number]
        return start + min(max(event, begin), end) - begin


class _Insertion:
    """Puts calls of one profiled step into another one.

    Args:
        base: The step that lacks them.
        donor: The step that has them.
        is_wanted: Whether a value is one of theirs.
    """

    def __init__(self, base: Profile, donor: Profile, is_wanted: Callable[[SavedValue], bool]) -> None:
        self._base = base
        self._donor = donor
        self._known = {value.name: index for index, value in enumerate(base.values) if value.name}
        self._modules: set[str] = set()  # of the base
        for name in self._known:
            path = _call_of(name)[0]
            while path:
                self._modules.add(path)
                path = path.rpartition(".")[0]
        self._events = _Events(base, donor, self._runs(is_wanted))
        self._values: list[SavedValue] = []
        self._of_base: dict[int, int] = {}  # numbers of values
        self._of_donor: dict[int, int] = {}
        self._run_of: dict[int, int] = {}  # by the number of a donor's value
        self._of_storage: dict[int, int] = {}  # of the donor's

    def __call__(self) -> Profile:
        """The step with both."""
        runs = self._events.runs
        if not runs:
            return self._base
        base, donor, events = self._base, self._donor, self._events
        storages = self._storages()
        self._lay_out_values()
        # By the share of its events: what single calls take is timed in trials only.
        part = events.num_added / max(1, len(donor.curve))
        forward = sum(run.forward[1] - run.forward[0] for run in runs)
        return replace(
            base,
            values=tuple(self._values),
            storages=tuple(storages),
            curve=tuple(map(int, self._curve())),
            requests=tuple(self._requests()),
            saves=tuple(self._saves()),
            forward_events=base.forward_events + forward,
            step_seconds=base.step_seconds + part * donor.step_seconds,
            forward_seconds=base.forward_seconds + part * donor.forward_seconds,
            operators=tuple((events.of_base(event), name) for event, name in base.operators),
            adding=tuple((events.of_base(event), size) for event, size in base.adding),
            codes=tuple(_moved_code(code, events.of_base) for code in base.codes),
            **self._calls(),
        )

    def curve_without(self) -> np.ndarray:
        """The curve of the donor as if the runs were not there, which has their events still."""
        self._storages()
        curve = np.array(self._donor.curve, dtype=np.int64)
        for run, num_bytes in zip(self._events.runs, self._kept_by_runs(), strict=True):
            curve[run.forward[1] : run.backward[0]] -= num_bytes
            # In the order of forward: what lies before a run is without the earlier ones already.
            curve[slice(*run.forward)] = _at(curve, run.forward[0] - 1)
            curve[slice(*run.backward)] = _at(curve, run.backward[1])
        return np.maximum(curve, 0)

    # ---- where the calls stand ----

    def _runs(self, is_wanted: Callable[[SavedValue], bool]) -> list[_Run]:
        donor = self._donor.values
        order = [index for index, value in enumerate(donor) if value.name]
        order.sort(key=lambda index: (donor[index].saved, index))
        runs = []
        members: list[int] = []
        unit = ""  # the outermost module that only the donor calls
        for at, index in enumerate([*order, -1]):
            now = ""
            if index >= 0 and donor[index].name not in self._known and is_wanted(donor[index]):
                now = self._outermost_unknown(donor[index])
            # Each by itself, as calls of the other step may stand between them.
            if members and now != unit:
                runs.append(self._run(members, order[: at - len(members)], order[at:]))
                members = []
            unit = now
            if now:
                members.append(index)
        return runs

    def _outermost_unknown(self, value: SavedValue) -> str:
        """The outermost module round ``value`` in which the base saves nothing."""
        call = value.name.rpartition(":")[0]
        parts = call.partition("#")[0].split(".")
        for depth in range(1, len(parts)):
            path = ".".join(parts[:depth])
            if path not in self._modules:
                return path
        return call

    def _run(self, members: Sequence[int], before: Sequence[int], after: Sequence[int]) -> _Run:
        """The run of these values, which others come before and after in the donor."""
        base, donor = self._base, self._donor
        begin = donor.values[members[0]].saved
        end = donor.values[after[0]].saved if after else donor.forward_events
        stands_at = self._place_of(members, before, after)
        earlier = {index for index in range(stands_at) if base.values[index].name}
        is_last = stands_at == len(base.values)
        return _Run(
            values=tuple(members),
            next=after[0] if after else -1,
            forward=(begin, max(begin, end)),
            backward=_asked_between(donor, set(members), set(before), set(after)),
            before=base.forward_events if is_last else base.values[stands_at].saved,
            after=_first_asked(base, earlier, len(base.curve)),
            at=stands_at,
        )

    def _place_of(self, members: Sequence[int], before: Sequence[int], after: Sequence[int]) -> int:
        """The number of the value of the base before which a run stands."""
        values = self._donor.values
        first = -1
        for index in reversed(before):
            if values[index].name in self._known:
                first = self._known[values[index].name]
                break
        end = len(self._base.values)
        for index in after:
            if values[index].name in self._known:
                end = self._known[values[index].name]
                break
        # Neither step shows which of both comes first: layers of a list are called as they are numbered.
        numbers = {_place(values[index]): _numbers(values[index]) for index in reversed(members)}
        for index in range(first + 1, end):
            value = self._base.values[index]
            if value.name and numbers.get(_place(value), _numbers(value)) < _numbers(value):
                return index
        return end

    # ---- memory ----

    def _curve(self) -> np.ndarray:
        base = np.array(self._base.curve, dtype=np.int64)
        donor = np.array(self._donor.curve, dtype=np.int64)
        kept = self._kept_by_runs()
        runs = self._events.runs
        pieces = []
        higher = 0
        done = 0
        for event, number, (begin, end) in self._events.cuts:
            pieces.append(base[done:event] + higher)
            done = event
            # Within a run the curve is the donor's, moved to the level at which the run begins.
            if number < len(runs):
                level = _at(base, event - 1) + higher - _at(donor, begin - 1)
                higher += kept[number]
            # In backward a run gives back what it has kept, and ends at the level of what comes after it.
            else:
                higher -= kept[2 * len(runs) - number]
                level = _at(base, event) + higher - _at(donor, end)
            pieces.append(donor[begin:end] + level)
        pieces.append(base[done:] + higher)
        return np.maximum(np.concatenate(pieces), 0)

    def _kept_by_runs(self) -> list[int]:
        """Bytes that each run keeps: its storages, and what is too small to be a value."""
        kept = [0] * len(self._events.runs)
        seen = set[int]()
        for number, run in enumerate(self._events.runs):
            for index in run.values:
                storage = self._donor.values[index].storage
                if storage in self._of_storage and self._of_storage[storage] >= len(self._base.storages):
                    kept[number] += 0 if storage in seen else self._donor.storages[storage].num_bytes
                    seen.add(storage)
        curve = np.array(self._donor.curve, dtype=np.int64)
        for number, run in enumerate(self._events.runs):
            risen = _at(curve, run.forward[1] - 1) - _at(curve, run.forward[0] - 1)
            fallen = _at(curve, run.backward[0]) - _at(curve, run.backward[1])
            # What is there in passing at one of these moments is not there at all of them.
            kept[number] = max(kept[number], min(risen, fallen))
        return kept

    def _storages(self) -> list[SavedStorage]:
        base, donor, events = self._base, self._donor, self._events
        storages = []
        for one in base.storages:
            storages.append(replace(one, unused=events.of_base(one.unused), freed=events.of_base(one.freed)))
        # A tensor that the other step has as well is no other one because another call uses it, too.
        for value in donor.values:
            if value.storage >= 0 and value.name in self._known:
                self._of_storage.setdefault(value.storage, base.values[self._known[value.name]].storage)
        for number, run in enumerate(events.runs):
            for index in run.values:
                self._run_of[index] = number
                storage = donor.values[index].storage
                if storage < 0 or storage in self._of_storage:
                    continue
                self._of_storage[storage] = len(storages)
                one = donor.storages[storage]
                unused = events.of_run(number, one.unused)
                freed = events.of_run(number, max(one.freed, donor.forward_events))
                storages.append(replace(one, unused=unused, freed=freed))
        return storages

    # ---- values ----

    def _lay_out_values(self) -> None:
        """The values of both in the order of forward, with what they are made from."""
        base = self._base
        waiting = sorted(range(len(self._events.runs)), key=lambda number: self._events.runs[number].at)
        for index in range(len(base.values) + 1):
            value = base.values[index] if index < len(base.values) else None
            if value is not None:
                inputs = tuple(self._of_base[source] for source in value.inputs)
                value = replace(value, inputs=inputs, saved=self._events.of_base(value.saved))
            while waiting and self._events.runs[waiting[0]].at <= index:
                value = self._lay_out_run(waiting.pop(0), value)
            if value is not None:
                self._of_base[index] = len(self._values)
                self._values.append(value)

    def _lay_out_run(self, number: int, following: SavedValue | None) -> SavedValue | None:
        """Adds the values of a run; returns what follows it.

        Layers in a row take what the one before has made: the first value of the run is made as ``following`` was, and
        ``following`` as what came after the run in the donor.
        """
        donor = self._donor
        run = self._events.runs[number]
        own = self._with_ways(run.values if run.next < 0 else [*run.values, run.next])
        for index in sorted(own):
            value = donor.values[index]
            inputs = tuple(self._inputs_of(index))
            if index == run.next:
                is_made_from_it = any(source in own for source in value.inputs)
                if following is not None and is_made_from_it and following.num_bytes == value.num_bytes:
                    following = _made_like(following, replace(value, inputs=inputs))
                continue
            storage = self._of_storage.get(value.storage, -1) if value.name else -1
            saved = self._events.of_run(number, min(value.saved, donor.forward_events - 1))
            value = replace(value, inputs=inputs, storage=storage, saved=saved)
            if index == run.values[0] and following is not None and following.num_bytes == value.num_bytes:
                value = _made_like(value, following)
            self._of_donor[index] = len(self._values)
            self._values.append(value)
        return following

    def _inputs_of(self, index: int) -> Iterator[int]:
        """What a value of the donor is made from, of what is there."""
        for source in self._donor.values[index].inputs:
            name = self._donor.values[source].name
            if source in self._of_donor:
                yield self._of_donor[source]
            elif name in self._known and self._known[name] in self._of_base:
                yield self._of_base[self._known[name]]

    def _with_ways(self, members: Sequence[int]) -> set[int]:
        """The values, and what they are made from on the way that nothing saves."""
        found = set(members)
        stack = list(members)
        while stack:
            for source in self._donor.values[stack.pop()].inputs:
                value = self._donor.values[source]
                is_on_the_way = not value.name and value.storage < 0
                if is_on_the_way and source not in found and source not in self._of_donor:
                    found.add(source)
                    stack.append(source)
        return found

    # ---- what backward asks for ----

    def _requests(self) -> list[Request]:
        events = self._events
        requests = []
        for one in self._base.requests:
            event, released = events.of_base(one.event), events.of_base(one.released)
            # A profile in which nothing can be replayed has no holds, though its requests tell of some.
            hold = one.hold if one.hold < len(self._base.holds) else -1
            requests.append(replace(one, event=event, value=self._of_base[one.value], released=released, hold=hold))
        first = len(self._base.holds)
        kept = {hold: first + at for at, hold in enumerate(self._holds_of_runs())}
        for one in self._donor.requests:
            if one.value in self._run_of and self._donor.values[one.value].name:
                number = self._run_of[one.value]
                event, released = events.of_run(number, one.event), events.of_run(number, one.released)
                hold = kept.get(one.hold, -1)
                value = self._of_donor[one.value]
                requests.append(replace(one, event=event, value=value, released=released, hold=hold))
        requests.sort(key=attrgetter("event"))
        return requests

    def _saves(self) -> list[tuple[int, int]]:
        # Without those of one of them it is not known how often each value is asked for.
        if not (self._base.saves and self._donor.saves):
            return []
        saves = [(self._events.of_base(event), self._of_base[value]) for event, value in self._base.saves]
        for event, value in self._donor.saves:
            if value in self._run_of:
                saves.append((self._events.of_run(self._run_of[value], event), self._of_donor[value]))
        return sorted(saves)

    # ---- calls that may be replayed ----

    def _calls_of_runs(self) -> dict[int, int]:
        """The donor's calls round values of the runs that the other step lacks, with the run of each."""
        known = {call.name for call in self._base.calls}
        run_of: dict[str, int] = {}  # by path of a module
        for number, run in enumerate(self._events.runs):
            for index in run.values:
                path = _call_of(self._donor.values[index].name)[0]
                while path:
                    run_of.setdefault(path, number)
                    path = path.rpartition(".")[0]
        found = {}
        for at, call in enumerate(self._donor.calls):
            path = call.name.partition("#")[0]
            if call.name not in known and path in run_of:
                found[at] = run_of[path]
        return found

    def _holds_of_runs(self) -> dict[int, int]:
        """What autograd holds in the runs: its number among the donor's, with the run."""
        calls = self._calls_of_runs()
        number_of = {self._donor.values[i].name: n for i, n in self._run_of.items()}
        found = {}
        for at, hold in enumerate(self._donor.holds):
            number = calls.get(hold.call) if not hold.name else number_of.get(hold.name)
            if number is not None:
                found[at] = number
        return found

    def _calls(self) -> dict[str, Any]:
        """Calls of both steps in the order in which they begin, and what autograd holds in both."""
        base, donor, events = self._base, self._donor, self._events
        chosen = self._calls_of_runs()
        named = {call.name: at for at, call in enumerate(base.calls)}
        calls = [_moved_call(call, events.of_base, call.given, call.parent) for call in base.calls]
        number_of = {at: len(calls) + position for position, at in enumerate(chosen)}
        for at, run in chosen.items():
            one = donor.calls[at]
            given = [self._of_storage[storage] for storage in one.given if storage in self._of_storage]
            parent = number_of.get(one.parent, -1)
            # The call round it may be one that both steps make.
            if parent < 0 <= one.parent:
                parent = named.get(donor.calls[one.parent].name, -1)
            calls.append(_moved_call(one, partial(events.of_run, run), given, parent))
        # The planner relies on an outer call coming before those in it.
        order = sorted(range(len(calls)), key=lambda at: calls[at].begin)
        new = {at: position for position, at in enumerate(order)}
        new[-1] = -1
        holds = []
        for hold in base.holds:
            asked, end = events.of_base(hold.asked), events.of_base(hold.end)
            holds.append(replace(hold, call=new[hold.call], asked=asked, end=end))
        for at, run in self._holds_of_runs().items():
            hold = donor.holds[at]
            call = number_of.get(hold.call, named.get(donor.calls[hold.call].name, -1) if hold.call >= 0 else -1)
            asked, end = events.of_run(run, hold.asked), events.of_run(run, hold.end)
            holds.append(replace(hold, call=new[call], asked=asked, end=end))
        return {
            "calls": tuple(replace(calls[at], parent=new[calls[at].parent]) for at in order),
            "holds": tuple(holds),
        }


def _moved_call(call: SavedCall, moved: Callable[[int], int], given: Sequence[int], parent: int) -> SavedCall:
    return replace(
        call,
        begin=moved(call.begin),
        end=moved(call.end),
        again=tuple((size, moved(event)) for size, event in call.again),
        given=tuple(given),
        given_beside=tuple((size, moved(event)) for size, event in call.given_beside),
        parent=parent,
    )


def _moved_code(code: CompiledCall, moved: Callable[[int], int]) -> CompiledCall:
    return replace(code, begin=moved(code.begin), end=moved(code.end), asked=moved(code.asked), over=moved(code.over))


def _place(value: SavedValue) -> str:
    """What calls of equal modules in different places have in common."""
    call, _, number = value.name.rpartition(":")
    return f"{_NUMBER.sub('', call)}:{number}"


def _numbers(value: SavedValue) -> list[int]:
    """The numbers in the path of a call."""
    return [int(number) for number in _NUMBER.findall(value.name.rpartition(":")[0])]


def _made_like(value: SavedValue, other: SavedValue) -> SavedValue:
    """The value, made as ``other`` is."""
    return replace(
        value,
        operator=other.operator,
        inputs=other.inputs,
        seconds=other.seconds,
        refused=other.refused,
        call=other.call,
        beside=other.beside,
        picked=other.picked,
        stretches=other.stretches,
        gone=other.gone,
        state=other.state,
    )


def _at(curve: np.ndarray, event: int) -> int:
    """Bytes at that event; nothing is there before the first one and after the last."""
    if 0 <= event < len(curve):
        return int(curve[event])
    return 0


def _first_asked(profile: Profile, values: Collection[int], otherwise: int) -> int:
    """The first event of backward at which one of these values is asked for."""
    events = [one.event for one in profile.requests if one.value in values and one.event >= profile.forward_events]
    return min(events, default=otherwise)


def _asked_between(
    profile: Profile, values: Collection[int], earlier: Collection[int], later: Collection[int]
) -> tuple[int, int]:
    """The events of backward that belong to ``values``: from where ``later`` ones have gone to where ``earlier`` begin.

    Not from the first request on: a recurrent layer goes back through many small tensors before it asks for its input.
    """
    asked = _first_asked(profile, values, len(profile.curve))
    begin = min(profile.forward_events, asked)
    end = len(profile.curve)
    for one in profile.requests:
        if one.value in later and begin < one.released <= asked:
            begin = one.released
        if one.event > asked and one.value in earlier:
            end = min(end, one.event)
    return begin, end
