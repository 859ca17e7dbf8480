"""What planned steps of a model spend beside their operators, measured on the model.

A step in which every second value is dropped that can be, and one in which the outermost calls are replayed, run in
turns with steps without a plan. What they take longer, less the operators and calls that they repeat, is bookkeeping,
whatever it consists of: Python whose code has left the caches since it ran last, operators on tensors that have left
them, hooks, noted operands, objects that are made and go. Steps whose operators take much longer are not run for it.
"""

import statistics
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.replays import Replays
from lightning_dpx.memory.execute.routine import Practised
from lightning_dpx.memory.profile.bookkeeping import Bookkeeping
from lightning_dpx.memory.profile.data import Profile, SavedCall, SavedValue
from lightning_dpx.memory.profile.step_timer import Backward, Forward, StepTimer

_WORTH_IT = 0.03  # of a step: bookkeeping that takes less of it may as well be what it is elsewhere
_WARM_UP = 2  # steps: the first is followed call by call, and the second is the first to follow the routine
_ROUNDS = 3
_ENOUGH = 0.2  # seconds

Around = Callable[[], AbstractContextManager[Any]]


def measured_in_step(
    profile: Profile,
    module: nn.Module,
    timer: StepTimer,
    *,
    forward: Forward,
    backward: Backward,
    known: Bookkeeping,
) -> Bookkeeping:
    """What planned steps of ``module`` spend beside their operators.

    Args:
        profile: Of the step; times of operators and calls are without bookkeeping.
        module: The model.
        timer: Times its steps.
        forward: One forward that returns what backward is to run from.
        backward: What to do with its result.
        known: What bookkeeping takes elsewhere: what it counts as where it is too little to be seen in the step.
    """
    # What is kept beside what is dropped passes the hooks as well, so half of the values tell more of usual plans than
    # all do: of a Llama's step, 36 dropped values took 100 us each, and all 119 of them 78 us.
    dropped = droppable_values(profile)[::2]
    made = _made_again(profile, dropped)
    calls = [call for call in profile.calls if call.parent < 0]
    by_values = known.value * len(made)
    by_calls = sum(known.of_call(call.tensors) for call in calls)
    least = _WORTH_IT * profile.step_seconds
    if timer.watches or max(by_values, by_calls) < least:
        return known
    kinds = dict[str, Around]()
    names_of = {profile.values[index].name for index in dropped}
    trusted = {profile.values[index].operator for index in dropped}
    values = Practised(CallNames(module), trusted, names_of)
    replays = Replays(module, [call.name for call in calls])
    try:
        if by_values >= least:
            kinds["dropped"] = values.active
        if by_calls >= least:
            kinds["replayed"] = replays.active
        found = _shares_in_turns(kinds, timer, forward, backward)
    finally:
        values.remove()
        replays.remove()
    if "dropped" in found:
        spent = found["dropped"] * profile.step_seconds - sum(profile.values[index].seconds for index in made)
        if spent > 0.0:
            known = replace(known, value=spent / len(made))
    if "replayed" in found:
        spent = found["replayed"] * profile.step_seconds - sum(call.seconds for call in calls)
        if spent > 0.0:
            factor = spent / by_calls
            known = replace(known, call=known.call * factor, tensor=known.tensor * factor)
    return known


def with_bookkeeping(profile: Profile, bookkeeping: Bookkeeping) -> Profile:
    """``profile``, in which all that is made again takes that, too."""
    return replace(
        profile,
        values=tuple(_with(value, bookkeeping) for value in profile.values),
        calls=tuple(_of_call(call, bookkeeping) for call in profile.calls),
    )


def _with(value: SavedValue, bookkeeping: Bookkeeping) -> SavedValue:
    if not value.seconds or value.offloaded:
        return value
    more = bookkeeping.call if value.call else bookkeeping.value
    return replace(value, seconds=value.seconds + more)


def _of_call(call: SavedCall, bookkeeping: Bookkeeping) -> SavedCall:
    return replace(call, seconds=call.seconds + bookkeeping.of_call(call.tensors))


def droppable_values(profile: Profile) -> list[int]:
    """The values that some operators make again, and no call of a module has to."""
    by_call = list[bool]()
    for value in profile.values:  # inputs come first
        unsaved = [source for source in value.inputs if profile.values[source].storage < 0]
        by_call.append(bool(value.call) or any(by_call[source] for source in unsaved))
    return [
        index
        for index, value in enumerate(profile.values)
        if value.name
        and value.storage >= 0
        and not (value.refused or value.offloaded or value.compact or by_call[index])
    ]


def _made_again(profile: Profile, dropped: Collection[int]) -> set[int]:
    """What is made again if these are dropped: they, and what nobody saves on the way to them."""
    made = set(dropped)
    stack = list(dropped)
    while stack:
        for source in profile.values[stack.pop()].inputs:
            value = profile.values[source]
            if source not in made and value.storage < 0 and not value.name and value.inputs:
                made.add(source)
                stack.append(source)
    return made


def _shares_in_turns(
    kinds: dict[str, Around], timer: StepTimer, forward: Forward, backward: Backward
) -> dict[str, float]:
    """The share of a step that a step of each kind takes longer.

    They run in turns with steps without a plan, and the median of the shares of turns counts: a processor that others
    use as well may be half as fast for seconds, and then is so for both.
    """
    shares = {kind: list[float]() for kind in kinds}
    spent = 0.0
    for turn in range(_WARM_UP + _ROUNDS):
        plain = 0.0
        if turn >= _WARM_UP:
            plain, _ = timer.timed(forward, backward)
        spent += plain
        for kind, around in kinds.items():
            seconds, _ = timer.timed(_Within(around, forward), backward)
            spent += seconds
            if turn >= _WARM_UP:
                shares[kind].append(seconds / plain - 1.0)
        if turn >= _WARM_UP and spent > _ENOUGH:
            break
    return {kind: statistics.median(found) for kind, found in shares.items()}


class _Within:
    """A forward within something."""

    def __init__(self, around: Around, forward: Forward) -> None:
        self._around = around
        self._forward = forward

    def __call__(self) -> torch.Tensor | None:
        with self._around():
            return self._forward()
