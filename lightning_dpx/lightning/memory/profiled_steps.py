"""The steps that plans are made for: one on the largest slice of every device, profiled or taken in proportion."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from lightning_dpx.lightning.lightning_api import Trainer
from lightning_dpx.lightning.lightning_compat import trainer_of
from lightning_dpx.lightning.memory.batch_shapes import Shapes, bytes_of_tensors, shapes_of
from lightning_dpx.lightning.memory.planning_cache import PlanningCache, agreement, key_of_run_step
from lightning_dpx.lightning.memory.profiling import announce_profile, devices_of, profile_slice
from lightning_dpx.lightning.memory.shadow_slice import Step
from lightning_dpx.lightning.memory.slice_loss import merges_outputs
from lightning_dpx.lightning.memory.static import StaticMemory
from lightning_dpx.memory import Profile, extrapolate
from lightning_dpx.memory.profile.other_outputs import beside_earlier_outputs, beside_merged_outputs
from lightning_dpx.replicas import BatchSlice, ReplicaSet
from lightning_dpx.shifting import applied_shift

KnownProfiles = dict[tuple[int, bool], Profile]  # by rows, and by whether gradients are added to earlier ones
_Known = dict[tuple[str, ...], dict[int, list[Profile]]]  # by what is shifted, and by rows


@dataclass(frozen=True, slots=True)
class SeenStep:
    """A profiled step of one replica.

    Attributes:
        profiles: One for each of the devices that it runs on.
        sharing: How many replicas' steps share each of them.
        is_joined: Whether it was put together from several, see joint_calls.py.
    """

    profiles: tuple[Profile, ...]
    sharing: tuple[int, ...]
    is_joined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepToPlan:
    """A training step that is about to run, as far as its memory is planned.

    Attributes:
        replicas: All of them.
        slices: Of its batch; nothing new is planned if each is within a known one.
        run: ``run(module, rows, num_rows)``: the step of a replica's shadow module.
        static_of: What a step of some slices needs beside activations.
    """

    replicas: ReplicaSet
    slices: Sequence[BatchSlice]
    run: Step
    static_of: Callable[[Sequence[BatchSlice]], StaticMemory]

    @property
    def is_of_one_process(self) -> bool:
        """Whether it may be tried without other processes, in whose collectives it would wait."""
        return getattr(trainer_of(self.replicas.root.module).strategy, "num_processes", 1) == 1


def by_device(slices: Sequence[BatchSlice]) -> dict[torch.device, list[BatchSlice]]:
    """The slices that every device has a part in at a time, the largest first; of micro-batches the largest alone."""
    slices_of: dict[torch.device, list[BatchSlice]] = {}
    seen: set[int] = set()
    for batch_slice in sorted(slices, key=_size, reverse=True):
        # Micro-batches of a device share their parameters, and run one after the other.
        parameters = batch_slice.replica.parameters
        if parameters and id(parameters[0]) in seen:  # it has its turn when the largest is gone
            continue
        seen.update(id(parameter) for parameter in parameters[:1])
        for device in devices_of(batch_slice.replica):
            slices_of.setdefault(device, []).append(batch_slice)
    return slices_of


def _size(batch_slice: BatchSlice) -> tuple[int, int]:
    """By which slices are compared: of as many rows some are larger, such as graphs of more nodes."""
    return batch_slice.num_rows, bytes_of_tensors(batch_slice.batch)


def _are_alike(slices: Sequence[BatchSlice]) -> bool:
    """Whether all slices of as many rows have the same shapes, so that rows tell which step it is."""
    shapes: dict[int, Shapes] = {}
    for batch_slice in slices:
        mine = shapes_of(batch_slice.batch)
        if shapes.setdefault(batch_slice.num_rows, mine) != mine:
            return False
    return True


def profiled_steps(
    step: StepToPlan,
    held: StaticMemory,
    cache: PlanningCache,
    known_profiles: KnownProfiles,
    *,
    together: bool,
    anew: bool,
    by_forward: bool = False,
    most_rows: Mapping[torch.device, int] | None = None,
) -> dict[torch.device, SeenStep]:
    """By a replica's device, a step on the largest of its slices, seen from each of its devices.

    Args:
        step: What it is a step of.
        held: What that needs beside its activations: which gradients are there says how it is profiled.
        cache: Where profiles of an earlier run may be.
        known_profiles: Those of steps of this batch that were profiled already, with no parts shifted, and with
            gradients counted as in ``held``.
        together: Whether all processes of the run profile now.
        anew: Whether what an earlier run has kept is known to be wrong.
        by_forward: As :func:`profile_slice` takes it; what is found is not kept for other runs, whose steps may run
            a backward.
        most_rows: By a replica's device, as :func:`profile_slice` takes it.
    """
    replicas = step.replicas
    slices_of = by_device(step.slices)
    accumulates = held.accumulates
    largest = {home: here[0] for home, here in slices_of.items() if home in replicas.devices}

    def profiled() -> list[list[Profile]]:
        # Where micro-batches were chosen, the same steps were profiled moments ago.
        known: _Known = {}
        if _are_alike(step.slices):
            known[()] = {rows: [one] for (rows, adds), one in known_profiles.items() if adds == accumulates}
        profile = partial(
            profile_slice,
            replicas,
            run=step.run,
            accumulates=accumulates,
            counts_gradients=held.frees_gradients,
            by_forward=by_forward,
        )
        limits = most_rows or {}
        found = []
        for home, batch_slice in largest.items():
            found.append(_profiles(batch_slice, known, profile, limits.get(home)))
        return found

    trainer = trainer_of(replicas.root.module)
    is_kept = cache.is_on and not by_forward
    ways = accumulates, held.frees_gradients, merges_outputs(replicas)
    keys = _keys(trainer, list(largest.values()), *ways) if is_kept else []
    # An empty key finds nothing and keeps nothing, and there must be as many keys as steps.
    found = cache.profiles(
        keys or [""] * len(largest),
        profiled,
        agreement(trainer, together=together),
        devices=[devices_of(batch_slice.replica) for batch_slice in largest.values()],
        anew=anew,
    )
    seen: dict[torch.device, SeenStep] = {}
    for (home, batch_slice), profiles in zip(largest.items(), found, strict=True):
        sharing = tuple(len(slices_of[device]) for device in devices_of(batch_slice.replica))
        # Of a replica on several devices, its outputs are taken to be on its own.
        own = _beside_other_outputs(profiles[0], replicas, step.slices, batch_slice, sharing[0])
        seen[home] = SeenStep((own, *profiles[1:]), sharing)
    return seen


def _beside_other_outputs(
    profile: Profile, replicas: ReplicaSet, slices: Sequence[BatchSlice], largest: BatchSlice, sharing: int
) -> Profile:
    """The step on the ``largest`` slice of its device, beside what other slices return."""
    device = largest.replica.device
    parts = 0.0
    # All outputs are merged on the first device.
    if device == replicas.root.device and largest.num_rows:
        rows = sum(batch_slice.num_rows for batch_slice in slices)
        parts = rows / largest.num_rows / sharing
    if replicas.cuts_slices:
        here = [one for one in slices if one.replica.device == device]
        return beside_earlier_outputs(profile, max(1, len(here) // sharing), parts)
    if len(slices) > 1:
        return beside_merged_outputs(profile, parts)
    return profile


def _keys(trainer: Trainer | None, slices: Sequence[BatchSlice], *ways: bool) -> list[str]:
    """The cache key of each step; where more than two differ, some lie on a line through others."""
    rows = [batch_slice.num_rows for batch_slice in slices]
    found = list[str]()
    for batch_slice in slices:
        shift = applied_shift(batch_slice.replica.module)
        module = batch_slice.replica.module
        shifted = () if shift is None else tuple(shift.chosen)
        # The rows of the other slices as well: they decide which profiles are
        # measured and which lie on a line.
        others = devices_of(batch_slice.replica), batch_slice.num_rows, rows, shifted, *ways
        found.append(key_of_run_step(trainer, module, batch_slice.batch, batch_slice.replica.device, *others))
    return found


def _profiles(
    batch_slice: BatchSlice, known: _Known, profile: Callable[..., Profile], most_rows: int | None
) -> list[Profile]:
    """A step on ``batch_slice``, seen from each of its devices; on a line through two that are known, if there are two.

    Not in proportion to one: weights that a library repacks and gradients do not grow with the rows.
    """
    shift = applied_shift(batch_slice.replica.module)
    devices = devices_of(batch_slice.replica)
    # With other parts shifted, the devices of a replica hold other values.
    alike = known.setdefault(() if shift is None else tuple(shift.chosen), {})
    if batch_slice.num_rows in alike:
        return alike[batch_slice.num_rows]
    if len(alike) > 1:
        few = min(alike)
        more = max(alike)
        pairs = zip(alike[few], alike[more], strict=True)
        found = [extrapolate(first, second, (few, more), batch_slice.num_rows) for first, second in pairs]
        return [replace(profile, scale=1.0) for profile in found]  # all rows would have fitted
    for device in devices:
        announce_profile(min(batch_slice.num_rows, most_rows or batch_slice.num_rows), device)
        alike.setdefault(batch_slice.num_rows, []).append(profile(batch_slice, device=device, most_rows=most_rows))
    return alike[batch_slice.num_rows]


def pressure(step: SeenStep, free: Sequence[int]) -> float:
    """Bytes of activations without a plan over those that are free, on the device where that is most."""
    needed = zip(step.profiles, step.sharing, free, strict=True)
    return max(profile.peak * sharing / room for profile, sharing, room in needed)
