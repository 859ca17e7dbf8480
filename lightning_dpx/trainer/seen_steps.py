"""The steps that plans are made for: one on the largest share of every device, profiled or taken in proportion."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_dpx.recompute import Profile, scaled
from lightning_dpx.replicas import ReplicaSet, Share
from lightning_dpx.shifting import applied_shift
from lightning_dpx.trainer.profiling import Step, places_of, profile_share


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


def profiled_steps(replicas: ReplicaSet, shares: Sequence[Share], run: Step) -> dict[torch.device, SeenStep]:
    """By a replica's device, a step on the largest of its shares, seen from each of its devices."""
    shares_of, seen = by_place(shares), dict[torch.device, SeenStep]()
    known: dict[tuple[str, ...], dict[int, list[Profile]]] = {}  # by what is shifted, and by rows
    for home, here in shares_of.items():
        if home in replicas.devices:
            sharing = tuple(len(shares_of[place]) for place in places_of(here[0].replica))
            seen[home] = SeenStep(tuple(_profiles(replicas, here[0], run, known)), sharing)
    return seen


def _profiles(
    replicas: ReplicaSet, share: Share, run: Step, known: dict[tuple[str, ...], dict[int, list[Profile]]]
) -> list[Profile]:
    """A step on ``share``, seen from each of its devices; in proportion to one that is known, if there is one."""
    shift, places = applied_shift(share.replica.module), places_of(share.replica)
    alike = known.setdefault(() if shift is None else tuple(shift.chosen), {})
    if share.num_rows not in alike:
        if alike:
            rows, profiles = next(iter(alike.items()))
            return [scaled(profile, share.num_rows / rows) for profile in profiles]
        for place in places:
            rank_zero_info(f"dpx: profiles a step on {share.num_rows} rows to plan the memory of {place} ...")
            alike.setdefault(share.num_rows, []).append(profile_share(replicas, share, run, place))
    return alike[share.num_rows]


def demand(step: SeenStep, free: Sequence[int]) -> float:
    """Bytes of activations without a plan over those that are free, on the device where that is most."""
    needed = zip(step.profiles, step.sharing, free, strict=True)
    return max(profile.peak * sharing / room for profile, sharing, room in needed)
