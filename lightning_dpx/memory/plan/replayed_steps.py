"""A profiled step as it is when some module calls are replayed as a whole.

To a planner that is a step like any other: what is saved within those calls is not there between forward and backward,
and cannot be dropped; it comes at once when backward first asks for one of its tensors, with all that the call takes
while it is made again. What the calls take is kept until then. So every planner and every forecast works on the rest as
ever, and the time of the replays stands beside it.

    curve    what is saved in a call goes when the call is over (it stays so long, until it is known whether a
             second call is the same), and comes back at the first request; a spike for the replay
    names    what is saved within a call counts no longer where names are given
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lightning_dpx.memory.call_names import path_of, paths_round
from lightning_dpx.memory.profile.data import Profile, SavedStorage, SavedValue, outermost

_WITHIN = "it is saved in {}, which is called again"
_GIVEN = "{} takes it, which is called again"
_LEADS_IN = "it is made from what only {} saves, which is called again"


def replayed(profile: Profile, names: Collection[str]) -> Profile:
    """The step of ``profile`` with these calls replayed; of nested ones, the outer."""
    return ReplayableStep(profile).replayed(names)


class ReplayableStep:
    """A profiled step whose calls may be replayed: what is the same whichever they are is looked up once.

    Args:
        profile: The step.

    Attributes:
        profile: The same.
        of_name: The numbers of the holds of each value.
        hold_call: For each hold the innermost call that can be replayed; -1 without one.
        hold_asked: For each hold the event at which backward first asks for it; after the last one if it never does.
        hold_end: For each hold the event at which autograd lets go of it.
        call_end: For each call the event at which it is over.
        pairs: Of a storage and a hold of a value in it (2 rows).
        spans: Of each storage: bytes, last use in forward, end (3 rows).
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        never = len(profile.curve)
        self.of_name: defaultdict[str, list[int]] = defaultdict[str, list[int]](list)
        for at, hold in enumerate(profile.holds):
            self.of_name[hold.name].append(at)
        # A look at a name without holds must not add one.
        self.of_name.default_factory = None
        self.hold_call: np.ndarray = np.array([hold.call for hold in profile.holds], dtype=np.int64)
        self.hold_asked: np.ndarray = np.array(
            [never if h.asked < 0 else h.asked for h in profile.holds], dtype=np.int64
        )
        self.hold_end: np.ndarray = np.array([hold.end for hold in profile.holds], dtype=np.int64)
        self.call_end: np.ndarray = np.array([call.end for call in profile.calls], dtype=np.int64)
        pairs: list[tuple[int, int]] = []
        for value in profile.values:
            if value.storage >= 0 and value.name:
                pairs += [(value.storage, at) for at in self.of_name.get(value.name, ())]
        self.pairs: np.ndarray = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        spans = [(one.num_bytes, one.unused, one.freed) for one in profile.storages]
        self.spans: np.ndarray = np.array(spans, dtype=np.int64).reshape(-1, 3).T

    def replayed(self, names: Collection[str]) -> Profile:
        """The step with these calls replayed; of nested ones, the outer."""
        chosen = outermost(self.profile.calls, names)
        if chosen:
            return _Replayed(self, chosen).profile()
        return self.profile

    def peak(self, names: Collection[str]) -> int:
        """Bytes of activations at the most with these calls replayed, without the rest of the profile."""
        chosen = outermost(self.profile.calls, names)
        if not chosen:
            return self.profile.peak
        return int(_Replayed(self, chosen).curve().max(initial=0))


class _Replayed:
    """A step in which the ``chosen`` calls are replayed; none of them is within another one."""

    def __init__(self, step: ReplayableStep, chosen: Collection[int]) -> None:
        profile = step.profile
        self._step = step
        self._profile = profile
        self._chosen = sorted(chosen)
        # A call comes after the one that it is made in, so one pass is enough.
        region = [-1] * (len(profile.calls) + 1)  # of each call the chosen one that it is in; the last is no call
        for at, call in enumerate(profile.calls):
            region[at] = at if at in chosen else region[call.parent]
        self._region: np.ndarray = np.array(region)[step.hold_call]  # of each hold
        within = self._region >= 0
        # The event of the first request in each region, and the one at which the last of it goes.
        self._asked = np.full(len(profile.calls), len(profile.curve))
        np.minimum.at(self._asked, self._region[within], step.hold_asked[within])
        self._ends = np.zeros(len(profile.calls), dtype=np.int64)
        np.maximum.at(self._ends, self._region[within], step.hold_end[within])
        self._until = self._find_until()

    def profile(self) -> Profile:
        """The step."""
        values = self._values()
        outside = {value.storage for value in values if not value.within}
        storages = []
        for number, storage in enumerate(self._profile.storages):
            if number in outside:
                storages.append(self._shorter(number, storage))
            else:  # only calls that are replayed have it
                storages.append(replace(storage, num_bytes=0))
        # A request within a replayed call is served by the replay: to a planner it is none.
        requests = []
        for request in self._profile.requests:
            if request.hold < 0 or self._region[request.hold] < 0:
                requests.append(request)
        return replace(
            self._profile,
            values=tuple(values),
            storages=tuple(storages),
            requests=tuple(requests),
            curve=tuple(self.curve().tolist()),
            replaying=self._profile.replaying + sum(self._profile.calls[at].seconds for at in self._chosen),
        )

    # ---- the memory ----

    def curve(self) -> np.ndarray:
        """Bytes at every event."""
        profile = self._profile
        end = len(profile.curve)
        change = self._change_of_storages()
        spikes = np.zeros(end, dtype=np.int64)
        beside = dict[tuple[int, int], int]()  # what calls are given and is not saved; several may be given the same
        for at in self._chosen:
            call = profile.calls[at]
            asked = int(self._asked[at])
            held = sum(size for size, _ in call.again)
            for size, released in call.again:
                change[min(asked, end)] += size
                change[min(max(released, asked), end)] -= size
            change[call.end] -= call.small
            change[min(asked, end)] += call.small
            change[call.begin] += call.state
            change[min(int(self._ends[at]), end)] -= call.state
            for given in call.given_beside:
                beside[given] = max(beside.get(given, 0), int(self._ends[at]))
            # At the first request all comes at once that the call takes while it is made again;
            # what stays of that is counted by itself already.
            if asked < end:
                spikes[asked] += max(0, call.most - held - call.small) + call.state
        for (size, died), until in beside.items():
            if until > died:
                change[died] += size
                change[until] -= size
        found: np.ndarray = np.array(profile.curve, dtype=np.int64) + np.cumsum(change)[:end] + spikes
        return found

    def _change_of_storages(self) -> np.ndarray:
        """The steps of the curve at every event: storages go earlier, or later for a call."""
        change = np.zeros(len(self._profile.curve) + 2, dtype=np.int64)
        sizes, _, freed = self._step.spans
        moved = (self._until >= 0) & (self._until != freed)
        np.add.at(change, self._until[moved], -sizes[moved])
        np.add.at(change, freed[moved], sizes[moved])
        return change

    def _find_until(self) -> np.ndarray:
        """The event at which each storage goes; -1 if no replayed call has to do with it."""
        step = self._step
        _, unused, freed = step.spans
        given = np.full(len(freed), -1)  # when the last call has gone that takes it
        for at in self._chosen:
            for number in self._profile.calls[at].given:
                given[number] = max(given[number], self._ends[at])
        storage, hold = step.pairs
        region = self._region[hold]
        within = region >= 0
        left = np.full(len(freed), -1)
        np.maximum.at(left, storage[within], step.call_end[region[within]])
        outside = np.full(len(freed), -1)
        np.maximum.at(outside, storage[~within], step.hold_end[hold[~within]])
        # A storage without any hold stays as it was profiled.
        outside = np.where((left < 0) & (outside < 0), freed, outside)
        until = np.maximum.reduce([given, outside, left, unused + 1, np.zeros_like(freed)])
        until = np.minimum(until, len(self._profile.curve))
        found: np.ndarray = np.where((left < 0) & (given < 0), -1, until)
        return found

    def _shorter(self, number: int, storage: SavedStorage) -> SavedStorage:
        """The storage with the event at which it goes in the replayed step."""
        until = int(self._until[number])
        if until < 0:
            return storage
        return replace(storage, freed=max(until, storage.unused))

    # ---- the values ----

    def _values(self) -> list[SavedValue]:
        """The values as planners see them: those that the replays have taken over are refused."""
        profile = self._profile
        names = self._names()
        regions = self._region.tolist()
        related = self._related_paths()
        given = self._given_storages()
        found = list[SavedValue]()
        lost = dict[int, str]()  # the call without which each cannot be had
        kept = dict[int, str]()  # likewise, of what is kept for that, and there only once it is saved
        for index, value in enumerate(profile.values):
            within = self._call_that_holds(value, regions)
            if within:
                lost[index] = within
                found.append(replace(value, within=within, compact=0, refused=_WITHIN.format(repr(within))))
                continue
            call = self._call_that_leads_to(value, lost, kept)
            if not call and value.call:
                call = _conflict(value, *related)
            if value.storage < 0 and not value.name:
                if call:
                    lost[index] = call
                found.append(value)
                continue
            name = names.get(value.name, value.name)
            refused = value.refused
            if not refused and value.storage in given:
                refused = _GIVEN.format(repr(given[value.storage]))
            elif not refused and call:
                kept[index] = call
                refused = _LEADS_IN.format(repr(call))
            if name != value.name or refused != value.refused:  # most values stay as they are, and a copy takes time
                value = replace(value, name=name, refused=refused)
            found.append(value)
        return found

    def _given_storages(self) -> dict[int, str]:
        """By storage, the last replayed call that takes it as an argument."""
        given = dict[int, str]()
        for at in self._chosen:
            call = self._profile.calls[at]
            given.update(dict.fromkeys(call.given, call.name))
        return given

    def _call_that_holds(self, value: SavedValue, regions: Sequence[int]) -> str:
        """The replayed call that drops ``value``: all that autograd holds of it is held within such calls."""
        if not value.name:
            return ""
        inside = [regions[at] for at in self._step.of_name.get(value.name, ())]
        if not inside or min(inside) < 0:
            return ""
        return self._profile.calls[inside[0]].name

    def _call_that_leads_to(self, value: SavedValue, lost: Mapping[int, str], kept: Mapping[int, str]) -> str:
        """The replayed call without which ``value`` cannot be made again: only its replay has one of the inputs."""
        for source in value.inputs:
            if source in lost:
                return lost[source]
        for source in value.inputs:
            if source in kept and self._profile.values[source].saved > value.saved:
                return kept[source]
        return ""

    def _related_paths(self) -> tuple[dict[str, str], dict[str, str]]:
        """The replayed calls by the path of their module, and by those of all modules round them."""
        inside = dict[str, str]()
        around = dict[str, str]()
        for at in self._chosen:
            name = self._profile.calls[at].name
            path = path_of(name)
            inside.setdefault(path, name)
            for outer in (*paths_round(path), ""):  # the model itself, too
                around.setdefault(outer, name)
        return inside, around

    def _names(self) -> dict[str, str]:
        """The names that values get where those within regions get none."""
        counts = dict[str, int]()
        found = dict[str, str]()
        for hold, region in zip(self._profile.holds, self._region.tolist(), strict=True):
            if region < 0 and hold.name and hold.name not in found:
                counts[hold.module_call] = number = counts.get(hold.module_call, 0) + 1
                found[hold.name] = f"{hold.module_call}:{number}"
        return found


def _conflict(value: SavedValue, inside: dict[str, str], around: dict[str, str]) -> str:
    """The replayed call with which the call that makes ``value`` shares anything."""
    path = path_of(value.call)
    if path in around:
        return around[path]
    return next((inside[outer] for outer in paths_round(path) if outer in inside), "")
