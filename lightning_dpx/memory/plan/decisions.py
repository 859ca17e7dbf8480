"""What was chosen, by name: a decision for each compiled part, call and value, as a plan has it."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from lightning_dpx.memory.plan.code_shares import bytes_and_seconds
from lightning_dpx.memory.plan.plan import Action, Decision
from lightning_dpx.memory.plan.problem import Choice, Problem
from lightning_dpx.memory.profile.data import Profile, SavedValue


def decisions_about_code(profile: Profile, shares: Mapping[str, float]) -> Iterator[Decision]:
    """A decision for each compiled part that saves less."""
    for path, share in shares.items():
        # Of the code as a whole: what a partitioner drops in it has no names.
        num_bytes, seconds = bytes_and_seconds(profile, path, share)
        yield Decision(path, "compiled code", num_bytes, seconds, "save less", share=share)


def decisions_about_calls(profile: Profile, names: Collection[str]) -> Iterator[Decision]:
    """A decision for each call that is replayed as a whole; they are ``names``."""
    for call in profile.calls:
        if call.name in names:
            num_bytes = call.small + sum(size for size, _ in call.again)
            yield Decision(call.name, f"a call of {call.kind}", num_bytes, call.seconds, "replay")


def decisions_about_values(profile: Profile, problem: Problem, choice: Choice) -> Iterator[Decision]:
    """A decision for each value that has a name and memory, with the seconds of its way back."""
    dropped = problem.values_of(choice.dropped)
    uncached = problem.values_of(choice.uncached)
    shares = _shares_of_calls(profile)
    for index, (value, planned) in enumerate(zip(profile.values, problem.profile.values, strict=True)):
        # Nothing is decided about what takes no memory of its own here.
        if not value.name or value.storage < 0:
            continue
        # Where calls are replayed, what lies outside of them may have another name than it was
        # profiled by: the name that it will have in planned steps is that of the problem.
        seconds = planned.seconds if index in dropped else value.seconds
        if not planned.offloaded:
            seconds += shares.get(index, 0.0)
        within = (planned.within,) if planned.within else ()
        action = _action(planned, index in dropped, index in uncached)
        calls = _calls_on_way(profile, index) or within
        yield Decision(planned.name, value.operator, value.num_bytes, seconds, action, calls)


def _shares_of_calls(profile: Profile) -> dict[int, float]:
    """The share of a repeated call's seconds that falls to each value picked from it, by bytes."""
    values = profile.values
    sizes = Counter[int]()
    for value in values:
        if value.picked:
            sizes[value.inputs[0]] += value.num_bytes
    shares = dict[int, float]()
    for index, value in enumerate(values):
        if value.picked and sizes[value.inputs[0]]:
            call = value.inputs[0]
            shares[index] = values[call].seconds * value.num_bytes / sizes[call]
    return shares


def _calls_on_way(profile: Profile, index: int) -> tuple[str, ...]:
    """The module calls that are made again on the way to a value.

    Also those behind what is saved only later: whether that is kept is not known yet when the value is dropped.
    """
    if profile.values[index].refused:
        return ()
    saved = profile.values[index].saved
    stack = list(profile.values[index].inputs)
    seen = set[int]()
    calls = set[str]()
    while stack:
        source = stack.pop()
        value = profile.values[source]
        is_there = value.storage >= 0 and value.saved <= saved
        # What has a name and no storage was there before the step, or is on another device.
        is_elsewhere = value.storage < 0 and bool(value.name)
        if source in seen or is_there or is_elsewhere:
            continue
        seen.add(source)
        stack += value.inputs
        if value.call:
            calls.add(value.call)
    return tuple(sorted(calls))


def _action(value: SavedValue, dropped: bool, uncached: bool) -> Action:
    if not dropped:
        if value.within:
            return "replay"
        return "keep"
    if value.offloaded:
        return "offload"
    if value.compact:
        if uncached:
            return "compress each time"
        return "compress"
    if uncached:
        return "recompute each time"
    return "recompute"
