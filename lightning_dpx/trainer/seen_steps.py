"""The steps that plans are made for: one on the largest share of every device, profiled or taken in proportion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_dpx.recompute import Profile, extrapolate
from lightning_dpx.replicas import ReplicaSet, Share
from lightning_dpx.shifting import applied_shift
from lightning_dpx.trainer.profiling import Step, places_of, profile_share

_Known = dict[tuple[str, ...], dict[int, list[Profile]]]  # by what is shifted, and by rows


@dataclass(frozen=True, slots=True)
class SeenStep:
    """A profiled step of one replica.

    Attributes:
        profiles: One for each of the devices that it runs on.
        sharing: How many replicas' steps share each of them.
    """

    profiles: tuple[Profile, ...]
    sharing: tuple[int, ...]


def by_place(shares: Sequence[Share]) -> dict[torch.device, list[Share]]:
    """The shares that every device has a part in; the largest first."""
    shares_of: dict[torch.device, list[Share]] = {}
    for share in sorted(shares, key=lambda share: -share.num_rows):
        for place in places_of(share.replica):
            shares_of.setdefault(place, []).append(share)
    return shares_of


def profiled_steps(
    replicas: ReplicaSet, shares: Sequence[Share], run: Step, *, accumulates: bool
) -> dict[torch.device, SeenStep]:
    """By a replica's device, a step on the largest of its shares, seen from each of its devices.

    Args:
        replicas: All of them.
        shares: What each of them gets.
        run: As :func:`profile_share` takes it.
        accumulates: Whether gradients are added to those of earlier batches.
    """
    shares_of, seen = by_place(shares), dict[torch.device, SeenStep]()
    known: _Known = {}
    profile = partial(profile_share, replicas, run=run, accumulates=accumulates)
    for home, here in shares_of.items():
        if home in replicas.devices:
            sharing = tuple(len(shares_of[place]) for place in places_of(here[0].replica))
            seen[home] = SeenStep(tuple(_profiles(here[0], known, profile)), sharing)
    return seen


def _profiles(share: Share, known: _Known, profile: Callable[..., Profile]) -> list[Profile]:
    """A step on ``share``, seen from each of its devices; on a line through two that are known, if there are two.

    Not in proportion to one: weights that a library repacks and gradients do not grow with the rows.
    """
    shift, places = applied_shift(share.replica.module), places_of(share.replica)
    alike = known.setdefault(() if shift is None else tuple(shift.chosen), {})
    if share.num_rows in alike:
        return alike[share.num_rows]
    if len(alike) > 1:
        few, more = min(alike), max(alike)
        pairs = zip(alike[few], alike[more], strict=True)
        return [extrapolate(first, second, (few, more), share.num_rows) for first, second in pairs]
    for place in places:
        rank_zero_info(f"dpx: profiles a step on {share.num_rows} rows to plan the memory of {place} ...")
        alike.setdefault(share.num_rows, []).append(profile(share, place=place))
    return alike[share.num_rows]


def demand(step: SeenStep, free: Sequence[int]) -> float:
    """Bytes of activations without a plan over those that are free, on the device where that is most."""
    needed = zip(step.profiles, step.sharing, free, strict=True)
    return max(profile.peak * sharing / room for profile, sharing, room in needed)
