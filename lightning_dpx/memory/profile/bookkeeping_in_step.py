"""What planned steps of a model spend beside their operators, measured on the model.

Steps in which every second value is dropped that can be, or every eighth, one in which the outermost calls are replayed
and, on accelerators, one in which some values are offloaded run in turns with steps without a plan. What they take
longer, less the operators and calls that they repeat, is bookkeeping, whatever it consists of: Python whose code has
left the caches since it ran last, operators on tensors that have left them, hooks, noted operands, objects that are
made and go. Steps whose operators take much longer are not run for it. Of a device that computes beside Python, what it
has waited for is left, and that may be nothing, or less: then the operators take less than alone.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median_low
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.routine_hooks import RoutineHooks
from lightning_dpx.memory.execute.saved_tensor_hooks import ValueActions
from lightning_dpx.memory.execute.whole_call_replays import Replays
from lightning_dpx.memory.profile import timing_effort
from lightning_dpx.memory.profile.bookkeeping import Bookkeeping
from lightning_dpx.memory.profile.data import PREFETCH_DEPTH, PlanOverhead, Profile, SavedCall, SavedValue
from lightning_dpx.memory.profile.drop_sites import count_places, made_again
from lightning_dpx.memory.profile.step_timer import Backward, Forward, StepTimer, is_confirmed

_WORTH_IT = 0.03  # of a step: bookkeeping that takes less of it may as well be what it is elsewhere
_WARM_UP = 2  # steps: the first is followed call by call, and the second is the first to follow the routine
_FEWEST_ROUNDS = 3
_MOST_ROUNDS = 9
_ENOUGH = 0.4  # seconds
# Seconds of a step: with longer ones, which others on the processor disturb less, one turn warms up for them all, and
# what a place takes is not told apart from what a value takes. Otherwise a model of 2,000 layers takes 4 s for it.
_LONG = 0.02
# Seconds of a step on accelerators: of longer ones planning is to run ten at the most. What the host's caches add to
# a first planned step hides behind the device there.
_VERY_LONG = 0.1
_TOO_LONG = 0.5  # seconds of a step: even a few of them are many
# What is kept beside what is dropped passes the hooks as well, so half of the values tell more of usual plans than
# all do; and the few that are far apart tell what a place takes, see drop_sites.py.
_EVERY = 2
_FEW = 8  # offloaded values, which are enough to be seen
_MOST_PINNED = 2**28  # bytes of these
_OFFLOADED = "offloaded"
_RARELY = 8
_LEAST_RATIO = 1.0  # of a place to a value: 1.1 to 3.7, mostly 2, where nine models were measured many times
_MOST_RATIO = 3.0
_USUAL_RATIO = 2.0
_LEAST_SHARE = 0.25  # of its time alone that an operator takes within a step; what is measured as less is noise

Around = Callable[[], AbstractContextManager[Any]]


def measured_in_step(
    profile: Profile,
    module: nn.Module,
    timer: StepTimer,
    *,
    forward: Forward,
    backward: Backward,
    known: Bookkeeping,
    hides: bool = False,
) -> Bookkeeping:
    """What planned steps of ``module`` spend beside their operators.

    Args:
        profile: Of the step; times of operators and calls are without bookkeeping.
        module: The model.
        timer: Times its steps.
        forward: One forward that returns what backward is to run from.
        backward: What to do with its result.
        known: What bookkeeping takes elsewhere: what it counts as where it is too little to be seen in the step.
        hides: Whether the device computes beside Python, so that in a step it may take less than elsewhere.
    """
    sets = _sets_to_drop(profile, by_size=hides)
    away = _some_to_offload(profile)
    made = {kind: made_again(profile, dropped) for kind, dropped in sets.items()}
    calls = [call for call in profile.calls if call.parent < 0]
    # Where hooks are called for every tensor, those that are kept take their time as well.
    by_values = known.value * (len(profile.values) if profile.saves else len(made["dropped"]))
    by_calls = sum(known.of_call(call.tensors) for call in calls)
    least = _WORTH_IT * profile.step_seconds
    # Beside Python a device may take less than alone, which only steps tell.
    is_wanted = hides and profile.step_seconds <= _TOO_LONG and bool(made["dropped"] or calls or away)
    # Where writes are watched, the times hold that as well.
    if timer.watches or not (is_wanted or max(by_values, by_calls) >= least):
        return known
    # Of a step in which nothing is dropped there is nothing to tell, beside hooks that are called for every tensor.
    if by_values < least and not (is_wanted and made["dropped"]):
        sets = {}
    replayed = calls if is_wanted or by_calls >= least else []
    with _planned(profile, module, sets, away, replayed) as kinds:
        # On accelerators the host's caches count in long steps as well, but for those that the device fills.
        is_long = profile.step_seconds > (_VERY_LONG if hides else _LONG)
        warm_up = 1 if is_long else _WARM_UP
        found = timer.in_a_row(partial(_least_in_turns, kinds, timer, forward, backward, warm_up))
    plain = found[""]
    if hides:
        # Of long steps there is one round, and one slow step would make all that comes on top look like nothing.
        plain = min(plain, profile.step_seconds)
    cases = [_case_of(profile, dropped, made[kind], found[kind] - plain) for kind, dropped in sets.items()]
    is_followed = any(isinstance(hooks, RoutineHooks) and hooks.is_followed_for_good for hooks in kinds.values())
    # What is hidden takes nothing, whatever it takes elsewhere.
    told = _of_values(cases, Bookkeeping() if hides else known, is_followed=is_followed)
    least_share = _least_share(cases) if hides else 1.0
    if cases:
        told = replace(told, operator_share=least_share, call_share=least_share)
    if "replayed" in found:
        told = _with_calls(told, found["replayed"] - plain, calls, by_calls, known, least_share)
    if away:
        told = replace(told, offload=max(0.0, found[_OFFLOADED] - plain) / len(away))
    return replace(told, step_seconds=plain)


@contextmanager
def _planned(
    profile: Profile,
    module: nn.Module,
    sets: Mapping[str, Collection[int]],
    away: Collection[int],
    calls: Sequence[SavedCall],
) -> Iterator[dict[str, RoutineHooks | Replays]]:
    """The hooks of every kind of planned step, by its name; they are gone after the block.

    Args:
        profile: Of the step.
        module: The model.
        sets: Values that are dropped together.
        away: Values that are offloaded.
        calls: Those that are replayed.
    """
    kinds = dict[str, RoutineHooks | Replays]()
    try:
        for kind, dropped in sets.items():
            kinds[kind] = _dropping(profile, module, dropped)
        if away:
            kinds[_OFFLOADED] = _offloading(profile, module, away)
        if calls:
            kinds["replayed"] = Replays(module, [call.name for call in calls])
        yield kinds
    finally:
        for hooks in kinds.values():
            hooks.remove()


def _sets_to_drop(profile: Profile, *, by_size: bool) -> dict[str, list[int]]:
    """By name, the values that are dropped together in a step that is measured.

    Args:
        profile: Of the step.
        by_size: Take the largest ones, as plans do. On accelerators small ones, such as the statistics of a norm, say
            nothing of the others: alone they take what it takes to start a kernel.
    """
    droppable = droppable_values(profile)
    dropped = droppable[::_EVERY]
    if by_size:
        largest = sorted(droppable, key=lambda index: -profile.values[index].num_bytes)
        dropped = sorted(largest[: len(dropped)])
    sets = {"dropped": dropped}
    if profile.step_seconds <= _LONG:
        sets["sparsely"] = droppable[::_RARELY]
    return sets


def _some_to_offload(profile: Profile) -> list[int]:
    """A few values far apart, not the largest: their copies hide, and what a step takes longer is the host's work."""
    movable = [index for index, value in enumerate(profile.values) if value.copying and value.storage >= 0]
    if not movable:
        return []
    # Of one layer, or the largest, they would wait for each other's copies.
    middle = median_low(profile.values[index].copying for index in movable)
    smaller = [index for index in movable if profile.values[index].copying <= middle]
    # torch keeps for later what memory of the host was pinned once, so it is little.
    room = min(_MOST_PINNED, profile.offloading_room)
    chosen = list[int]()
    for index in smaller[:: -(-len(smaller) // _FEW)]:
        room -= profile.values[index].num_bytes
        if room >= 0:
            chosen.append(index)
    return chosen


def _offloading(profile: Profile, module: nn.Module, away: Collection[int]) -> RoutineHooks:
    names = {profile.values[index].name for index in away}
    return RoutineHooks(CallNames(module), (), ValueActions(offloaded=names, prefetch_depth=PREFETCH_DEPTH))


def _with_calls(
    told: Bookkeeping,
    spent: float,
    calls: Sequence[SavedCall],
    expected: float,
    known: Bookkeeping,
    least_share: float,
) -> Bookkeeping:
    """``told`` with that of replayed calls, as far as a step that replays these has any.

    Args:
        told: Of all else.
        spent: Seconds that the step takes longer.
        calls: Those that it replays.
        expected: Seconds of bookkeeping that were expected.
        known: What that was expected by.
        least_share: Of the time that a call takes alone, so much it takes within a step at least.
    """
    replays = sum(call.seconds for call in calls)
    beside = spent - replays
    told = replace(told, call_share=max(least_share, _share(spent, replays)))
    if beside <= 0.0:
        return told
    # What is known is a difference of times, and may be nothing.
    if expected <= 0.0:
        return replace(told, call=beside / len(calls))
    factor = beside / expected
    return replace(told, call=known.call * factor, tensor=known.tensor * factor)


def _dropping(profile: Profile, module: nn.Module, dropped: Collection[int]) -> RoutineHooks:
    trusted = {profile.values[index].operator for index in dropped}
    actions = ValueActions(dropped={profile.values[index].name for index in dropped})
    return RoutineHooks(CallNames(module), trusted, actions)


class _Case(NamedTuple):
    """What was found of a set of dropped values.

    Attributes:
        made: How many values are made again.
        places: At how many places something is dropped.
        spent: Seconds that the step takes longer.
        operators: Seconds of the operators that make them, alone.
    """

    made: int
    places: int
    spent: float
    operators: float

    @property
    def seconds(self) -> float:
        """Seconds that bookkeeping takes."""
        return max(0.0, self.spent - self.operators)


def _case_of(profile: Profile, dropped: Collection[int], made: Collection[int], spent: float) -> _Case:
    """What is left for bookkeeping of the seconds that a step takes longer."""
    operators = sum(profile.values[index].seconds for index in made)
    return _Case(len(made), count_places(profile, dropped), spent, operators)


def _least_share(cases: Sequence[_Case]) -> float:
    """Of the time that they take alone, what operators and calls take within a step at the least.

    A call consists of operators, which plans weigh it against: it takes no smaller share than they do, and the clock of
    a device changes from one step to the next.
    """
    if not cases:
        return _LEAST_SHARE
    return _share(cases[0].spent, cases[0].operators)


def _share(spent: float, alone: float) -> float:
    """Of the seconds that something takes alone, those that a step takes longer with it; 1 if that is more."""
    # Where others disturbed the step without a plan, what comes on top of nothing may seem to be less than that.
    if spent >= alone or alone <= 0.0:
        return 1.0
    return max(_LEAST_SHARE, spent / alone)


def _of_values(cases: Sequence[_Case], known: Bookkeeping, *, is_followed: bool) -> Bookkeeping:
    """What values take, and places, or steps whose forwards are all followed; as ``known`` where none were dropped."""
    if not cases:
        return known
    return _with_following(cases, known) if is_followed else _told_apart(cases, known)


def _told_apart(cases: Sequence[_Case], known: Bookkeeping) -> Bookkeeping:
    """What each value takes and what each place takes, of one set or two.

    All sets together tell how much it is in all, and two of them which part of it belongs to places.
    """
    usual = cases[0]
    if not usual.places:
        return known
    made = sum(case.made for case in cases)
    places = sum(case.places for case in cases)
    # In caches it takes as much as what is known, and nowhere less.
    spent = max(sum(case.seconds for case in cases), known.value * made)
    ratio = _USUAL_RATIO if len(cases) == 1 else _ratio_of(*cases)
    value = spent / (made + ratio * places)
    share = usual.places / usual.made
    return replace(known, value=value * (1.0 + ratio * share), place=value * ratio, usual_places=share)


def _with_following(cases: Sequence[_Case], known: Bookkeeping) -> Bookkeeping:
    """What each value takes, and what every step takes in which all forwards are followed call by call."""
    first = cases[0]
    last = cases[-1]
    value = known.value
    if first.made > last.made:
        # The two cases are two equations, for a value and for a step; in caches a value takes as much as is known.
        value = max(value, (first.seconds - last.seconds) / (first.made - last.made))
    left = [max(0.0, case.seconds - value * case.made) for case in cases]
    return replace(known, value=value, following=sum(left) / len(left))


def _ratio_of(usual: _Case, sparse: _Case) -> float:
    """What a place takes, over what a value takes.

    It is a difference of differences, which another process on the same core may turn around, so that is believed
    within bounds only.
    """
    # Both sets say: made * value + places * place = seconds. Of these two equations, solved, the
    # quotient of place and value.
    both = usual.made * sparse.seconds - sparse.made * usual.seconds
    each = sparse.places * usual.seconds - usual.places * sparse.seconds
    if both <= 0.0:
        return _LEAST_RATIO
    # The second set takes more for each value, as its places are farther apart.
    if each > 0.0:
        return min(max(both / each, _LEAST_RATIO), _MOST_RATIO)
    return _MOST_RATIO


def with_bookkeeping(profile: Profile, bookkeeping: Bookkeeping) -> Profile:
    """``profile``, in which all that is made again takes that, too."""
    tensors = {call.name: call.tensors for call in profile.calls}
    return replace(
        profile,
        values=tuple(_with(value, bookkeeping, tensors) for value in profile.values),
        calls=tuple(_of_call(call, bookkeeping) for call in profile.calls),
        overhead=PlanOverhead(
            per_step=bookkeeping.following,
            per_value=max(0.0, bookkeeping.value - bookkeeping.again),
            per_place=bookkeeping.place,
            usual_places=bookkeeping.usual_places,
            per_offload=bookkeeping.offload,
        ),
    )


def _with(value: SavedValue, bookkeeping: Bookkeeping, tensors: Mapping[str, int]) -> SavedValue:
    if not value.seconds or value.offloaded:
        return value
    if value.call:
        more = bookkeeping.of_call(tensors.get(value.call, 0))
        return replace(value, seconds=bookkeeping.call_share * value.seconds + more)
    return replace(value, seconds=bookkeeping.operator_share * value.seconds + bookkeeping.value)


def _of_call(call: SavedCall, bookkeeping: Bookkeeping) -> SavedCall:
    return replace(call, seconds=bookkeeping.call_share * call.seconds + bookkeeping.of_call(call.tensors))


def droppable_values(profile: Profile) -> list[int]:
    """The values that some operators make again, and no call of a module has to."""
    by_call = list[bool]()
    for value in profile.values:  # inputs come first
        unsaved = [source for source in value.inputs if profile.values[source].storage < 0]
        by_call.append(bool(value.call) or any(by_call[source] for source in unsaved))
    droppable = list[int]()
    for index, value in enumerate(profile.values):
        is_saved_here = value.name and value.storage >= 0
        # A copy or a compressed mask comes back in another way than by an operator.
        comes_back_otherwise = value.offloaded or value.compact or by_call[index]
        if is_saved_here and not value.refused and not comes_back_otherwise:
            droppable.append(index)
    return droppable


def _least_in_turns(
    kinds: dict[str, RoutineHooks | Replays], timer: StepTimer, forward: Forward, backward: Backward, warm_up: int
) -> dict[str, float]:
    """The least seconds of steps of each kind, and of steps without a plan, which have no name.

    They run in turns with steps without a plan, because a processor that others use as well may be half as fast for
    seconds. The least time of each counts: others only ever add to it, and by much where they use the same caches.
    """
    times = {kind: list[float]() for kind in ("", *kinds)}
    enough = timing_effort.seconds(_ENOUGH)
    spent = 0.0
    for hooks in kinds.values():
        if isinstance(hooks, RoutineHooks):
            hooks.remove()
    for turn in range(warm_up + _MOST_ROUNDS):
        if turn >= warm_up:
            seconds, _ = timer.timed(forward, backward)
            times[""].append(seconds)
            spent += seconds
        for kind, hooks in kinds.items():
            if isinstance(hooks, RoutineHooks):
                hooks.put_on()
            seconds, _ = timer.timed(Within(hooks.active, forward), backward)
            if isinstance(hooks, RoutineHooks):  # they are on many modules, where other steps would pay for them
                hooks.remove()
            spent += seconds
            if turn >= warm_up:
                times[kind].append(seconds)
        is_sure = len(times[""]) >= _FEWEST_ROUNDS and all(map(is_confirmed, times.values()))
        if is_sure or (turn >= warm_up and spent > enough):
            break
    return {kind: min(found) for kind, found in times.items()}


class Within:
    """A forward within something."""

    def __init__(self, around: Around, forward: Forward) -> None:
        self._around = around
        self._forward = forward

    def __call__(self) -> torch.Tensor | None:
        with self._around():
            return self._forward()
