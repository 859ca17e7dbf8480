"""A profiled step as it is when some module calls are replayed as a whole.

To a planner that is a step like any other: what is saved within those calls is not there between forward and backward,
and cannot be dropped; it comes at once when backward first asks for one of its tensors, with all that the call takes
while it is made again. What the calls take is kept until then. So every planner and every forecast works on the rest as
ever, and the time of the replays stands beside it.

    curve    what is saved in a call goes when the call is over (it stays so long, until it is known whether nobody
             can tell the call from a second one), and comes back at the first request; a spike for the replay
    names    what is saved within a call counts no longer where names are given
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate

from lightning_dpx.memory.profile.data import Profile, SavedStorage, SavedValue, outermost

_WITHIN = "it is saved in {}, which is called again"
_GIVEN = "{} takes it, which is called again"
_LEADS_IN = "it is made from what only {} saves, which is called again"


def replayed(profile: Profile, names: Collection[str]) -> Profile:
    """The step of ``profile`` with these calls replayed; of nested ones, the outer."""
    chosen = outermost(profile.calls, names)
    return _Replayed(profile, chosen).profile() if chosen else profile


class _Replayed:
    def __init__(self, profile: Profile, chosen: Collection[int]) -> None:
        self._profile = profile
        self._chosen = chosen
        region = list(range(len(profile.calls)))  # of each call the chosen one that it is in, or -1
        for at, call in enumerate(profile.calls):
            region[at] = at if at in chosen else region[call.parent] if call.parent >= 0 else -1
        self._region = [region[hold.call] if hold.call >= 0 else -1 for hold in profile.holds]
        self._of_name = defaultdict[str, list[int]](list)  # holds of each value
        for at, hold in enumerate(profile.holds):
            self._of_name[hold.name].append(at)
        self._asked = dict.fromkeys(chosen, len(profile.curve))  # the event of the first request in each region
        self._ends = dict.fromkeys(chosen, 0)
        for at, hold in zip(self._region, profile.holds, strict=True):
            if at >= 0:
                self._ends[at] = max(self._ends[at], hold.end)
                if hold.asked >= 0:
                    self._asked[at] = min(self._asked[at], hold.asked)
        self._given_until = dict[int, int]()  # by storage: when the last call has gone that takes it
        for at in chosen:
            for number in profile.calls[at].given:
                self._given_until[number] = max(self._given_until.get(number, 0), self._ends[at])

    def profile(self) -> Profile:
        """The step."""
        values = self._values()
        outside = {value.storage for value in values if not value.within}
        storages = [
            self._shorter(number, storage) if number in outside else replace(storage, num_bytes=0)
            for number, storage in enumerate(self._profile.storages)
        ]
        requests = [one for one in self._profile.requests if one.hold < 0 or self._region[one.hold] < 0]
        return replace(
            self._profile,
            values=tuple(values),
            storages=tuple(storages),
            requests=tuple(requests),
            curve=tuple(self._curve()),
            replaying=self._profile.replaying + sum(self._profile.calls[at].seconds for at in self._chosen),
        )

    # ---- the memory ----

    def _curve(self) -> list[int]:
        profile = self._profile
        end = len(profile.curve)
        change = [0] * (end + 2)
        spikes = dict[int, int]()
        for number, storage in enumerate(profile.storages):
            until = self._until(number)
            if until is not None and until != storage.freed:  # it goes earlier, or what is given to a call later
                change[until] -= storage.num_bytes
                change[storage.freed] += storage.num_bytes
        beside = dict[tuple[int, int], int]()  # what calls are given and nobody saves; several may be given the same
        for at in self._chosen:
            call = profile.calls[at]
            asked = self._asked[at]
            held = sum(size for size, _ in call.again)
            for size, released in call.again:
                change[min(asked, end)] += size
                change[min(max(released, asked), end)] -= size
            change[call.end] -= call.small
            change[min(asked, end)] += call.small
            change[call.begin] += call.state
            change[min(self._ends[at], end)] -= call.state
            for one in call.given_beside:
                beside[one] = max(beside.get(one, 0), self._ends[at])
            if asked < end:
                spikes[asked] = spikes.get(asked, 0) + max(0, call.most - held - call.small) + call.state
        for (size, died), until in beside.items():
            if until > died:
                change[died] += size
                change[until] -= size
        curve = [here + there for here, there in zip(profile.curve, accumulate(change), strict=False)]
        for event, size in spikes.items():
            curve[event] += size
        return curve

    def _until(self, number: int) -> int | None:
        """The event at which a storage goes; ``None`` if no region has to do with it."""
        profile = self._profile
        storage = self._profile.storages[number]
        given = [self._given_until[number]] if number in self._given_until else []
        holds = [at for value in self._in_storage[number] for at in self._of_name[value.name]]
        within = [self._region[at] for at in holds if self._region[at] >= 0]
        if not within and not given:
            return None
        outside = [profile.holds[at].end for at in holds if self._region[at] < 0]
        left = [profile.calls[at].end for at in within]
        if not within and not outside:
            outside = [storage.freed]
        return min(max(*given, *outside, *left, storage.unused + 1, 0), len(profile.curve))

    def _shorter(self, number: int, storage: SavedStorage) -> SavedStorage:
        until = self._until(number)
        return storage if until is None else replace(storage, freed=max(until, storage.unused))

    @property
    def _in_storage(self) -> list[list[SavedValue]]:
        if not hasattr(self, "_members"):
            self._members: list[list[SavedValue]] = [[] for _ in self._profile.storages]
            for value in self._profile.values:
                if value.storage >= 0 and value.name:
                    self._members[value.storage].append(value)
        return self._members

    # ---- the values ----

    def _values(self) -> list[SavedValue]:
        profile = self._profile
        names = self._names()
        given = {storage: profile.calls[at].name for at in self._chosen for storage in profile.calls[at].given}
        found = list[SavedValue]()
        lost = dict[int, str]()  # the call without which each cannot be had
        for index, value in enumerate(profile.values):
            holds = self._of_name.get(value.name, ()) if value.name else ()
            inside = [self._region[at] for at in holds]
            if holds and min(inside) >= 0:
                call = profile.calls[inside[0]].name
                lost[index] = call
                found.append(replace(value, within=call, compact=0, refused=_WITHIN.format(repr(call))))
                continue
            call = next((lost[source] for source in value.inputs if source in lost), "") or self._conflict(value)
            name = names.get(value.name, value.name)
            if value.storage in given and not value.refused:
                found.append(replace(value, name=name, refused=_GIVEN.format(repr(given[value.storage]))))
                continue
            is_virtual = value.storage < 0 and not value.name
            if call and (is_virtual or not value.refused):
                if is_virtual:
                    lost[index] = call
                    found.append(value)
                else:
                    found.append(replace(value, name=name, refused=_LEADS_IN.format(repr(call))))
                continue
            found.append(replace(value, name=name) if name != value.name else value)
        return found

    def _conflict(self, value: SavedValue) -> str:
        """The replayed call with which the call that makes ``value`` shares anything."""
        path = value.call.partition("#")[0]
        for at in self._chosen if value.call else ():
            other = self._profile.calls[at].name.partition("#")[0]
            if path == other or other.startswith(f"{path}.") or path.startswith(f"{other}.") or not path:
                return self._profile.calls[at].name
        return ""

    def _names(self) -> dict[str, str]:
        """The names that values get where those within regions get none."""
        counts = dict[str, int]()
        found = dict[str, str]()
        for hold, region in zip(self._profile.holds, self._region, strict=True):
            if region < 0 and hold.name not in found:
                counts[hold.module_call] = number = counts.get(hold.module_call, 0) + 1
                found[hold.name] = f"{hold.module_call}:{number}"
        return found
