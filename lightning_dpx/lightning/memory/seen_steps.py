"""The steps that plans are made for: one on the largest share of every device, profiled or taken in proportion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_dpx.lightning.lightning_compat import trainer_of
from lightning_dpx.lightning.memory.planning_cache import PlanningCache, agreement, key_of_run_step
from lightning_dpx.lightning.memory.profiling import Step, places_of, profile_share
from lightning_dpx.memory import Profile, extrapolate
from lightning_dpx.replicas import ReplicaSet, Share
from lightning_dpx.shifting import applied_shift

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
    replicas: ReplicaSet,
    shares: Sequence[Share],
    run: Step,
    cache: PlanningCache,
    *,
    accumulates: bool,
    together: bool,
    anew: bool,
) -> dict[torch.device, SeenStep]:
    """By a replica's device, a step on the largest of its shares, seen from each of its devices.

    Args:
        replicas: All of them.
        shares: What each of them gets.
        run: As :func:`profile_share` takes it.
        cache: Where profiles of an earlier run may be.
        accumulates: Whether gradients are added to those of earlier batches.
        together: Whether all processes of the run profile now.
        anew: Whether what an earlier run has kept is known to be wrong.
    """
    shares_of = by_place(shares)
    largest = {home: here[0] for home, here in shares_of.items() if home in replicas.devices}

    def profiled() -> list[list[Profile]]:
        known: _Known = {}
        profile = partial(profile_share, replicas, run=run, accumulates=accumulates)
        return [_profiles(share, known, profile) for share in largest.values()]

    trainer = trainer_of(replicas.root.module)
    keys = _keys(trainer, list(largest.values()), accumulates) if cache.is_on else []
    found = cache.profiles(keys or [""] * len(largest), profiled, agreement(trainer, together=together), anew=anew)
    seen: dict[torch.device, SeenStep] = {}
    for (home, share), profiles in zip(largest.items(), found, strict=True):
        sharing = tuple(len(shares_of[place]) for place in places_of(share.replica))
        seen[home] = SeenStep(tuple(profiles), sharing)
    return seen


def _keys(trainer: Trainer | None, shares: Sequence[Share], accumulates: bool) -> list[str]:
    """Of each step; where more than two differ, some profiles lie on a line through others."""
    rows = [share.num_rows for share in shares]
    found = list[str]()
    for share in shares:
        shift = applied_shift(share.replica.module)
        module = share.replica.module
        shifted = () if shift is None else tuple(shift.chosen)
        others = places_of(share.replica), share.num_rows, rows, shifted, accumulates
        found.append(key_of_run_step(trainer, module, share.batch, share.replica.device, *others))
    return found


def _profiles(share: Share, known: _Known, profile: Callable[..., Profile]) -> list[Profile]:
    """A step on ``share``, seen from each of its devices; on a line through two that are known, if there are two.

    Not in proportion to one: weights that a library repacks and gradients do not grow with the rows.
    """
    shift = applied_shift(share.replica.module)
    places = places_of(share.replica)
    alike = known.setdefault(() if shift is None else tuple(shift.chosen), {})
    if share.num_rows in alike:
        return alike[share.num_rows]
    if len(alike) > 1:
        few = min(alike)
        more = max(alike)
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
