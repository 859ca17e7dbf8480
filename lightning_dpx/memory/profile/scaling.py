"""The profile of a batch that is too large to be tried, or was not, from two others."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_dpx.memory.profile.data import CodeRun, CompiledCall, Profile, SavedCall, SavedValue


def extrapolate(few: Profile, more: Profile, rows: tuple[int, int], target: int) -> Profile:
    """The step on ``target`` rows, from those on ``rows``: every size and time is a line through two points.

    Where the two steps did not do the same things in the same order, all sizes are taken in proportion to the larger
    one; what does not depend on the batch is then overestimated. The time of a step is on the line all the same: it is
    that of the whole, whatever it consists of.
    """

    def line(low: float, high: float) -> float:
        # What grows faster than the rows would be less than nothing on few of them.
        return max(0.0, high + (high - low) / (rows[1] - rows[0]) * (target - rows[1]))

    def time(low: float, high: float) -> float:
        """More rows never take less time, and fewer none that is less in proportion: measured times jitter."""
        found = line(low, high)
        if target >= rows[1]:
            return max(found, high)
        return max(min(found, high), high * target / rows[1])

    # Lines join what is the same thing in both steps: the same values in the same storages, asked
    # for at the same events. One operator more in either, and the numbers do not belong together.
    same = (
        len(few.curve) == len(more.curve)
        and list(map(_described, few.values)) == list(map(_described, more.values))
        and len(few.storages) == len(more.storages)
        and few.requests == more.requests
        and list(map(_described_call, few.calls)) == list(map(_described_call, more.calls))
        and list(map(_described_code, few.codes)) == list(map(_described_code, more.codes))
    )
    if not same:
        whole = time(few.step_seconds, more.step_seconds)
        in_time = whole / more.step_seconds if more.step_seconds else target / rows[1]
        return scaled(more, target / rows[1], in_time)
    values = []
    for low, high in zip(few.values, more.values, strict=True):
        seconds = time if target < rows[1] else line
        stretches = [round(line(*pair)) for pair in zip(low.stretches, high.stretches, strict=True)]
        # Bytes of generators' states stay: they do not depend on how many numbers are drawn.
        values.append(
            replace(
                high,
                num_bytes=round(line(low.num_bytes, high.num_bytes)),
                seconds=seconds(low.seconds, high.seconds),
                compact=round(line(low.compact, high.compact)),
                copying=line(low.copying, high.copying),
                beside=round(line(low.beside, high.beside)),
                stretches=tuple(stretches),
            )
        )
    storages = []
    for before, after in zip(few.storages, more.storages, strict=True):
        storages.append(replace(after, num_bytes=round(line(before.num_bytes, after.num_bytes))))
    # Events, requests and names are those of the larger step: the smaller one has the same.
    return replace(
        more,
        values=tuple(values),
        storages=tuple(storages),
        curve=tuple(round(line(a, b)) for a, b in zip(few.curve, more.curve, strict=True)),
        step_seconds=time(few.step_seconds, more.step_seconds),
        scale=target / rows[1],
        forward_seconds=time(few.forward_seconds, more.forward_seconds),
        calls=tuple(_between(a, b, line) for a, b in zip(few.calls, more.calls, strict=True)),
        codes=tuple(_code_between(a, b, line) for a, b in zip(few.codes, more.codes, strict=True)),
    )


def _between(few: SavedCall, more: SavedCall, line: Callable[[float, float], float]) -> SavedCall:
    """The call with sizes and times on the lines through those of two steps."""

    def sizes(low: Sequence[tuple[int, int]], high: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((round(line(a[0], b[0])), b[1]) for a, b in zip(low, high, strict=True))

    return replace(
        more,
        seconds=line(few.seconds, more.seconds),
        most=round(line(few.most, more.most)),
        again=sizes(few.again, more.again),
        small=round(line(few.small, more.small)),
        given_beside=sizes(few.given_beside, more.given_beside),
    )


def _code_between(few: CompiledCall, more: CompiledCall, line: Callable[[float, float], float]) -> CompiledCall:
    """The call of compiled code, likewise."""
    runs = []
    for low, high in zip(few.runs, more.runs, strict=True):
        runs.append(
            CodeRun(
                high.share,
                round(line(low.forward, high.forward)),
                round(line(low.stays, high.stays)),
                round(line(low.backward, high.backward)) if high.backward >= 0 else -1,
                line(low.seconds, high.seconds),
            )
        )
    return replace(more, runs=tuple(runs))


def _described_code(call: CompiledCall) -> tuple[object, ...]:
    """What a call of compiled code is, whatever its size."""
    known = [(run.share, run.backward >= 0) for run in call.runs]
    return call.name, call.begin, call.end, call.asked, call.over, *known


def _described_call(call: SavedCall) -> tuple[object, ...]:
    """What a call is, whatever its size."""
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
        place_seconds=profile.place_seconds * in_time,
        noting=profile.noting * in_time,
        following=profile.following * in_time,
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
