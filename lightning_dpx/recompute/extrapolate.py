"""The profile of a batch that is too large to be tried, from two small ones."""

from dataclasses import replace

from lightning_dpx.recompute.profile import Profile, SavedValue


def extrapolate(few: Profile, more: Profile, rows: tuple[int, int], target: int) -> Profile:
    """The step on ``target`` rows, from those on ``rows``: every size and time is a line through two points.

    Where the two steps did not do the same things in the same order, everything is taken in proportion to the larger
    one; what does not depend on the batch is then overestimated.
    """

    def line(low: float, high: float) -> float:
        return max(0.0, high + (high - low) / (rows[1] - rows[0]) * (target - rows[1]))

    same = (
        len(few.curve) == len(more.curve)
        and list(map(_described, few.values)) == list(map(_described, more.values))
        and len(few.storages) == len(more.storages)
        and few.requests == more.requests
    )
    if not same:
        return scaled(more, target / rows[1])
    return replace(
        more,
        values=tuple(
            replace(
                b,
                num_bytes=round(line(a.num_bytes, b.num_bytes)),
                seconds=line(a.seconds, b.seconds),
                compact=round(line(a.compact, b.compact)),
                copying=line(a.copying, b.copying),
                beside=round(line(a.beside, b.beside)),
                stretches=tuple(round(line(*pair)) for pair in zip(a.stretches, b.stretches, strict=True)),
            )
            for a, b in zip(few.values, more.values, strict=True)
        ),
        storages=tuple(
            replace(b, num_bytes=round(line(a.num_bytes, b.num_bytes)))
            for a, b in zip(few.storages, more.storages, strict=True)
        ),
        curve=tuple(round(line(a, b)) for a, b in zip(few.curve, more.curve, strict=True)),
        step_seconds=max(line(few.step_seconds, more.step_seconds), more.step_seconds),  # measured times jitter
        scale=target / rows[1],
        forward_seconds=max(line(few.forward_seconds, more.forward_seconds), more.forward_seconds),
    )


def _described(value: SavedValue) -> tuple[object, ...]:
    """What a value is, whatever its size."""
    order = len(value.stretches), value.gone
    return value.name, value.operator, value.storage, value.inputs, value.refused, value.call, *order


def scaled(profile: Profile, factor: float) -> Profile:
    """Everything in proportion."""
    if factor == 1:
        return profile
    return replace(
        profile,
        values=tuple(
            replace(
                v,
                num_bytes=round(v.num_bytes * factor),
                seconds=v.seconds * factor,
                compact=round(v.compact * factor),
                copying=v.copying * factor,
                beside=round(v.beside * factor),
                stretches=tuple(round(stretch * factor) for stretch in v.stretches),
            )
            for v in profile.values
        ),
        storages=tuple(replace(s, num_bytes=round(s.num_bytes * factor)) for s in profile.storages),
        curve=tuple(round(size * factor) for size in profile.curve),
        step_seconds=profile.step_seconds * factor,
        scale=profile.scale * factor,
        forward_seconds=profile.forward_seconds * factor,
    )
