"""The profile of a batch that is too large to be tried, or was not, from two others."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_dpx.memory.profile.data import CodeRun, CompiledCall, Profile, SavedCall, SavedValue


def extrapolate(few: Profile, more: Profile, rows: tuple[int, int], target: int) -> Profile:
    """The step on ``target`` rows, from those on ``rows``: every size and time is a line through two points.

    Where the two steps did not do the same things in the same order, all sizes are taken in proportion to the larger
    one; what does not depend on the batch is then overestimated. The time of a step is on the line all the same: it is
    that of the whole, whatever it consists of.
    """

    line = _Line(rows, target)
    if not _are_same_step(few, more):
        whole = line.time(few.step_seconds, more.step_seconds)
        in_time = line.factor
        if more.step_seconds:
            in_time = whole / more.step_seconds
        return scaled(more, line.factor, in_time)
    values = []
    for low, high in zip(few.values, more.values, strict=True):
        values.append(line.value(low, high))
    storages = []
    for before, after in zip(few.storages, more.storages, strict=True):
        storages.append(replace(after, num_bytes=line.size(before.num_bytes, after.num_bytes)))
    # Events, requests and names are those of the larger step: the smaller one has the same.
    return replace(
        more,
        values=tuple(values),
        storages=tuple(storages),
        curve=tuple(map(line.size, few.curve, more.curve)),
        step_seconds=line.time(few.step_seconds, more.step_seconds),
        scale=line.factor,
        forward_seconds=line.time(few.forward_seconds, more.forward_seconds),
        calls=tuple(map(line.call, few.calls, more.calls)),
        codes=tuple(map(line.code, few.codes, more.codes)),
        returned=line.size(few.returned, more.returned),
        merged=line.size(few.merged, more.merged),
        left_behind=line.size(few.left_behind, more.left_behind),
    )


def _are_same_step(few: Profile, more: Profile) -> bool:
    """Whether lines may join the numbers of two steps.

    They join what is the same thing in both: the same values in the same storages, asked for at the same events. One
    operator more in either, and the numbers do not belong together.
    """
    return (
        len(few.curve) == len(more.curve)
        and list(map(_described, few.values)) == list(map(_described, more.values))
        and len(few.storages) == len(more.storages)
        and few.requests == more.requests
        and list(map(_described_call, few.calls)) == list(map(_described_call, more.calls))
        and list(map(_described_code, few.codes)) == list(map(_described_code, more.codes))
    )


class _Line:
    """The line through what two steps take, as a function of their rows.

    Args:
        rows: Of the smaller step, and of the larger one.
        target: The rows that are asked for.

    Attributes:
        factor: Times as many rows as in the larger step.
    """

    def __init__(self, rows: tuple[int, int], target: int) -> None:
        few, more = rows
        self.factor: float = target / more
        self._beyond = target - more
        self._apart = more - few

    def number(self, low: float, high: float) -> float:
        """What is ``low`` in the smaller step and ``high`` in the larger one."""
        # What grows faster than the rows would be less than nothing on few of them.
        return max(0.0, high + (high - low) / self._apart * self._beyond)

    def size(self, low: float, high: float) -> int:
        """The scaled size, in whole bytes."""
        return round(self.number(low, high))

    def time(self, low: float, high: float) -> float:
        """Seconds. More rows never take less, and fewer none that is less in proportion: measured times jitter."""
        found = self.number(low, high)
        if self.factor >= 1:
            return max(found, high)
        return max(min(found, high), high * self.factor)

    def value(self, low: SavedValue, high: SavedValue) -> SavedValue:
        """A value of both steps."""
        seconds = self.number(low.seconds, high.seconds)
        if self.factor < 1:
            seconds = self.time(low.seconds, high.seconds)
        # Bytes of generators' states stay: they do not depend on how many numbers are drawn.
        return replace(
            high,
            num_bytes=self.size(low.num_bytes, high.num_bytes),
            seconds=seconds,
            compact=self.size(low.compact, high.compact),
            copying=self.number(low.copying, high.copying),
            beside=self.size(low.beside, high.beside),
            stretches=tuple(map(self.size, low.stretches, high.stretches)),
        )

    def call(self, low: SavedCall, high: SavedCall) -> SavedCall:
        """A module call of both steps."""
        return replace(
            high,
            seconds=self.number(low.seconds, high.seconds),
            most=self.size(low.most, high.most),
            again=self._sizes(low.again, high.again),
            small=self.size(low.small, high.small),
            given_beside=self._sizes(low.given_beside, high.given_beside),
        )

    def _sizes(self, low: Sequence[tuple[int, int]], high: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Bytes with the events at which they go."""
        found = []
        for (few, _), (more, event) in zip(low, high, strict=True):
            found.append((self.size(few, more), event))
        return tuple(found)

    def code(self, low: CompiledCall, high: CompiledCall) -> CompiledCall:
        """A call of compiled code of both steps."""
        return replace(high, runs=tuple(map(self._code_run, low.runs, high.runs)))

    def _code_run(self, low: CodeRun, high: CodeRun) -> CodeRun:
        # Negative where it has none, which no line goes through.
        backward = -1
        if high.backward >= 0:
            backward = self.size(low.backward, high.backward)
        return CodeRun(
            high.share,
            self.size(low.forward, high.forward),
            self.size(low.stays, high.stays),
            backward,
            self.number(low.seconds, high.seconds),
        )


def _described_code(call: CompiledCall) -> tuple[object, ...]:
    """What a call of compiled code is, whatever its size."""
    known = [(run.share, run.backward >= 0) for run in call.runs]
    return call.name, call.begin, call.end, call.asked, call.over, *known


def _described_call(call: SavedCall) -> tuple[object, ...]:
    """What a call is, whatever its size."""
    # Events are places in the step: where they differ, the steps do not do the same.
    gone = [event for _, event in (*call.again, *call.given_beside)]
    return call.name, call.parent, call.begin, call.end, call.given, len(call.again), *gone


def _described(value: SavedValue) -> tuple[object, ...]:
    """What a value is, whatever its size."""
    order = len(value.stretches), value.gone
    return value.name, value.operator, value.storage, value.inputs, value.refused, value.call, *order


def scaled(profile: Profile, factor: float, in_time: float | None = None) -> Profile:
    """The profile with all sizes and times in proportion.

    Args:
        profile: Of a step.
        factor: Times as many rows.
        in_time: Times as many seconds; as many as rows unless given.
    """
    if factor == 1:
        return profile
    if in_time is None:
        in_time = factor
    # Copies go by bytes, on a link of their own: they take no longer where the device is slower.
    values = []
    for value in profile.values:
        stretches = [round(stretch * factor) for stretch in value.stretches]
        values.append(
            replace(
                value,
                num_bytes=round(value.num_bytes * factor),
                seconds=value.seconds * in_time,
                compact=round(value.compact * factor),
                copying=value.copying * factor,
                beside=round(value.beside * factor),
                stretches=tuple(stretches),
            )
        )
    return replace(
        profile,
        values=tuple(values),
        storages=tuple(replace(s, num_bytes=round(s.num_bytes * factor)) for s in profile.storages),
        curve=tuple(round(size * factor) for size in profile.curve),
        step_seconds=profile.step_seconds * in_time,
        scale=profile.scale * factor,
        forward_seconds=profile.forward_seconds * in_time,
        calls=tuple(_scaled(call, factor, in_time) for call in profile.calls),
        codes=tuple(_scaled_code(call, factor, in_time) for call in profile.codes),
        overhead=profile.overhead.scaled(in_time),
        returned=round(profile.returned * factor),
        merged=round(profile.merged * factor),
        left_behind=round(profile.left_behind * factor),
    )


def _scaled(call: SavedCall, factor: float, in_time: float) -> SavedCall:
    """The call with sizes and times in proportion."""
    return replace(
        call,
        seconds=call.seconds * in_time,
        most=round(call.most * factor),
        again=tuple((round(size * factor), event) for size, event in call.again),
        small=round(call.small * factor),
        given_beside=tuple((round(size * factor), event) for size, event in call.given_beside),
    )


def _scaled_code(call: CompiledCall, factor: float, in_time: float) -> CompiledCall:
    """The call of compiled code, likewise."""
    runs = []
    for run in call.runs:
        runs.append(
            replace(
                run,
                forward=round(run.forward * factor),
                stays=round(run.stays * factor),
                backward=round(run.backward * factor) if run.backward >= 0 else -1,
                seconds=run.seconds * in_time,
            )
        )
    return replace(call, runs=tuple(runs))
