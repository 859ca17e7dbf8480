"""``memory_budget`` and ``plan`` of the strategy: profiles a step of one replica, and puts plans on all of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_dpx.devices import (
    allocated_and_peak,
    canonical_device,
    capacity_of,
    free_bytes,
    is_host,
    parse_bytes,
    reset_peak_memory,
)
from lightning_dpx.errors import BudgetError, ConfigurationError
from lightning_dpx.recompute import (
    CheckpointPlan,
    Planner,
    Profile,
    applied_plan,
    apply_plan,
    format_plan,
    make_planner,
    plan_places,
    remove_plan,
    scaled,
    summary,
)
from lightning_dpx.replicas import ReplicaSet, Share
from lightning_dpx.shifting import applied_shift
from lightning_dpx.trainer.auto_shift import states_of
from lightning_dpx.trainer.profiling import Step, places_of, profile_share

_MARGIN = 0.05  # of what is free, left for what no operator reports: workspaces, fragmentation
_TOLERANCE = 0.05  # of a predicted peak
_UNNOTICED = 2**18  # bytes: gradients on their way, and other small things that come while activations go
_TIGHTER = 0.8  # of the activations of a plan that did not fit


def parse_budget(budget: int | float | str | None) -> int | float | str | None:
    """``None``, ``"auto"``, bytes, or a fraction of the device.

    Raises:
        ConfigurationError: it is none of these.
    """
    if budget is None or budget == "auto":
        return budget
    if isinstance(budget, float) and 0 < budget <= 1:
        return budget
    if isinstance(budget, float):
        raise ConfigurationError(
            f"memory_budget={budget!r} is not allowed; give a fraction up to 1.0, bytes, '8GiB', or 'auto'."
        )
    return parse_bytes("memory_budget", budget)


class LargestBatch:
    """Notices batches that are larger than those before."""

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()

    def grows(self, batch: Any) -> bool:
        """Whether ``batch`` is the first, or larger than the one that grew last."""
        sizes = tuple(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        if len(sizes) == len(self._sizes) and all(map(int.__le__, sizes, self._sizes)):
            return False
        self._sizes = sizes
        return True


class MemoryPlanning:
    """The plans of a run.

    Args:
        budget: What :func:`parse_budget` allows, for everything on a device.
        planner: Who decides.
        plan: What is decided already.

    Raises:
        ConfigurationError: an argument has a value that is not allowed, or both ``budget`` and ``plan`` are given.
        PlanError: ``plan`` is a file that holds none.
    """

    def __init__(
        self,
        budget: int | float | str | None,
        planner: str | Planner = "auto",
        plan: CheckpointPlan | str | None = None,
    ) -> None:
        self.budget, self.planner = parse_budget(budget), make_planner(planner)
        if budget is not None and plan is not None:
            raise ConfigurationError("Give memory_budget, to make a plan, or plan, to follow one; not both.")
        self._given = CheckpointPlan.load(plan) if isinstance(plan, str) else plan
        if self._given is not None and not isinstance(self._given, CheckpointPlan):
            raise ConfigurationError(f"plan={plan!r} is not allowed; give a CheckpointPlan or the path of a saved one.")
        self.plans: dict[torch.device, CheckpointPlan] = {}
        self.profiles: dict[torch.device, Profile] = {}
        self._limits: dict[torch.device, tuple[int, int]] = {}  # with the number of replicas that share the device
        self._places: dict[torch.device, list[torch.device]] = {}  # by a replica's device, all that its step runs on
        self._largest = LargestBatch()
        self._before: dict[torch.device, int] = {}
        self._steps = 0

    @property
    def wanted(self) -> bool:
        """Whether anything is to be planned or followed."""
        return self.budget is not None or self._given is not None

    def follow_given(self, modules: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        """Puts the plan that was given on every replica."""
        if self._given is not None:
            for module, device in zip(modules, devices, strict=True):
                apply_plan(module, self._given)
                self.plans[device] = self._given
            rank_zero_info(f"dpx: follows the given plan; {summary(self._given)}")

    def is_open(self, batch: Any) -> bool:
        """Whether ``batch`` needs a plan of its own: it is the first, or larger than any before."""
        return self.budget is not None and self._largest.grows(batch)

    def decide(
        self, replicas: ReplicaSet, shares: Sequence[Share], run: Step, owned: Mapping[torch.device, int]
    ) -> None:
        """Plans for the devices of ``shares`` and puts the plans on their replicas.

        Args:
            replicas: The replicas.
            shares: The parts of a batch.
            run: ``run(module, rows, num_rows)``: the training step of a stand-in for a replica.
            owned: Bytes of gradients and optimizer state on every device.

        Raises:
            PlanError: a budget cannot be met.
        """
        self.remove(replicas)
        by_device: dict[torch.device, list[Share]] = {}
        for share in shares:
            for place in places_of(share.replica):
                by_device.setdefault(place, []).append(share)
        known: dict[tuple[str, ...], dict[int, list[Profile]]] = {}  # by what is shifted, and by rows
        for device, group in by_device.items():
            if device not in replicas.devices:
                continue  # parts are shifted there; it is planned with the replicas that they belong to
            share = max(group, key=lambda share: share.num_rows)
            places = places_of(share.replica)
            static = [self._static(place, by_device[place], owned.get(place, 0)) for place in places]
            limits = [self._limit(place, replicas.devices) for place in places]
            rooms = [
                self._room(place, len(by_device[place]), held, limit)
                for place, held, limit in zip(places, static, limits, strict=True)
            ]
            profiles = _profiles(replicas, share, run, known)
            try:
                plans = plan_places(replicas.root.module, profiles, rooms, self.planner)
            except BudgetError as error:
                if error.smallest is None:
                    raise
                place, held, limit = places[error.place], static[error.place], limits[error.place]
                least = _mib(held + len(by_device[place]) * error.smallest)
                error.add_note(
                    f"On {place}, memory_budget={self.budget!r} allows {_mib(limit)} in all, of which "
                    f"parameters, gradients and optimizer state take {_mib(held)}; it must allow at least {least}."
                )
                raise
            self._places[device] = places
            for place, plan, profile, held, limit in zip(places, plans, profiles, static, limits, strict=True):
                self._limits[place] = limit, len(by_device[place])
                if place in self.plans and (self.plans[place].peak or 0) >= (plan.peak or 0):
                    continue  # several replicas are shifted there
                self.plans[place], self.profiles[place] = plan, profile
                rank_zero_info(_announcement(place, plan, held, limit, len(by_device[place]), profile))
        self._put_on(replicas)

    def _room(self, device: torch.device, sharing: int, static: int, limit: int) -> int:
        room = (limit - static) // sharing
        if room <= 0:
            raise BudgetError(
                f"memory_budget={self.budget!r} allows {_mib(limit)} on {device}, and parameters, "
                f"gradients and optimizer state alone take {_mib(static)}. Allow more, or use "
                "reducer='colocate' or shifts."
            )
        return room

    def _put_on(self, replicas: ReplicaSet) -> None:
        for replica in replicas.replicas:  # also those without a share today
            known_plan = self.plans.get(replica.device) or next(iter(self.plans.values()))
            apply_plan(replica.module, known_plan)
        self._steps = 0

    def tighten(
        self, replicas: ReplicaSet, shares: Sequence[Share], run: Step, owned: Mapping[torch.device, int]
    ) -> str:
        """After a step that ran out of memory: plans that take less, or the first ones; says what they are.

        Raises:
            BudgetError: nothing takes less.
        """
        if not self.profiles:
            if self.budget is None:
                self.budget = "auto"
            self.decide(replicas, shares, run, owned)
        else:
            tighter: dict[torch.device, CheckpointPlan] = {}
            for places in self._places.values():
                tighter |= zip(places, self._tighter(replicas.root.module, places), strict=True)
            profiles, all_places = dict(self.profiles), dict(self._places)
            self.remove(replicas)
            self.plans, self.profiles, self._places = tighter, profiles, all_places
            self._put_on(replicas)
        return "; ".join(f"on {device}, {summary(plan)}" for device, plan in self.plans.items())

    def _tighter(self, module: nn.Module, places: Sequence[torch.device]) -> list[CheckpointPlan]:
        profiles = [self.profiles[place] for place in places]
        now = [self.plans[place].peak or self.profiles[place].peak for place in places]
        rooms = [int(peak * _TIGHTER) for peak in now]
        try:
            return plan_places(module, profiles, rooms, self.planner)
        except BudgetError as error:
            if len(places) == 1:
                raise
            rooms[error.place] = now[error.place]  # nobody knows which of the devices ran out; the other one gives more
        return plan_places(module, profiles, rooms, self.planner)

    def advice(self) -> str:
        """What would help where memory ran out."""
        if not self.plans:
            return (
                "DPXStrategy(memory_budget='auto') computes again what does not fit; on_oom='replan' does so once it "
                "is needed. Otherwise use a smaller batch."
            )
        said = []
        for device, plan in self.plans.items():
            budget = f" for a budget of {_mib(self._limits[device][0])}" if device in self._limits else ""
            said.append(f"The plan of {device}{budget} predicted {_mib(plan.peak or 0)} of activations.")
            if device not in self.profiles:
                continue
            try:
                less = self._tighter(nn.Module(), [device])[0]
            except BudgetError:
                said.append("No plan takes much less: use a smaller batch.")
                continue
            said.append(
                f"One of {_mib(less.peak or 0)} costs {(less.recompute_share or 0):.1%} of a step: lower "
                "memory_budget, or on_oom='replan'."
            )
        return " ".join(said)

    def forecast(self, device: torch.device) -> tuple[int, int]:
        """Bytes of activations on ``device`` at their peak, and the budget for everything there; 0 without."""
        plan = self.plans.get(device)
        if plan is None:
            return 0, 0
        limit, sharing = self._limits.get(device, (0, 1))
        return (plan.peak or 0) * sharing, limit

    def _limit(self, device: torch.device, homes: Sequence[torch.device]) -> int:
        """Bytes for all on ``device``. Where parts are shifted to, the budget is the same number, or what there is."""
        target = device not in homes
        if isinstance(self.budget, int | float) and not (target and is_host(device)):
            total = capacity_of(device).total
            if isinstance(self.budget, float) and not total:
                raise ConfigurationError(
                    f"memory_budget={self.budget!r} is a fraction of {device}, which has no limit; give bytes."
                )
            if isinstance(self.budget, int) and 0 < total < self.budget:
                if target:
                    return total
                raise ConfigurationError(
                    f"memory_budget={self.budget!r} is more than {device} has, {_mib(total)}; give less, or 'auto'."
                )
            return int(self.budget * total) if isinstance(self.budget, float) else self.budget
        present = 0 if is_host(device) else allocated_and_peak(device)[0]
        return present + int(free_bytes(device) * (1 - _MARGIN))

    def _static(self, device: torch.device, shares: Sequence[Share], owned: int) -> int:
        """Bytes on ``device`` that are there all the time: allocated now, or about to be."""
        here = [share.replica for share in shares]
        parameters = [p for replica in here for p in replica.parameters if canonical_device(p.device) == device]
        buffers = [b for replica in here for b in replica.buffers if canonical_device(b.device) == device]
        tensors: list[torch.Tensor] = [*parameters, *buffers]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        present = sum(storages.values()) if is_host(device) else allocated_and_peak(device)[0]
        gradients = sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)
        return present + gradients + owned

    def remove(self, replicas: ReplicaSet) -> None:
        """Takes all plans off."""
        for replica in replicas.replicas:
            if applied_plan(replica.module) is not None:
                remove_plan(replica.module)
        self.plans.clear()
        self.profiles.clear()
        self._places.clear()

    def forget(self) -> None:
        """The run is over; the next one plans anew."""
        self._largest, self._before, self._steps = LargestBatch(), {}, 0
        self.plans.clear()
        self.profiles.clear()
        self._places.clear()

    def begin_step(self) -> None:
        """Before the second planned step: by then the optimizer has its state."""
        self._steps += 1
        if self._steps == 2:
            self._before = {device: allocated_and_peak(device)[0] for device in self.plans if not is_host(device)}
            for device in self._before:
                reset_peak_memory(device)

    def end_backward(self) -> None:
        """Compares what the step took with what was predicted."""
        for device, before in self._before.items():
            predicted, taken = self.forecast(device)[0], allocated_and_peak(device)[1] - before
            if predicted and taken > predicted * (1 + _TOLERANCE) + _UNNOTICED:
                rank_zero_warn(
                    f"dpx: the activations on {device} took {_mib(taken)} where {_mib(predicted)} was predicted: "
                    "operators that need much memory inside, or other work on the device."
                )
        self._before = {}


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


def owned_bytes(
    parameters: Sequence[nn.Parameter], optimizers: Sequence[Any], several: bool
) -> dict[torch.device, int]:
    """What the owners of ``parameters`` will hold beside them: optimizer state, and gradients that arrive."""
    copies = max((states_of(optimizer) for optimizer in optimizers), default=2) + (1 if several else 0)
    there = sum(len(optimizer.state) for optimizer in optimizers) > 0
    owned: dict[torch.device, int] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            share = (1 if several else 0) if there and not is_host(parameter.device) else copies
            owned[parameter.device] = owned.get(parameter.device, 0) + share * parameter.nbytes
    return owned


def _announcement(
    device: torch.device, plan: CheckpointPlan, static: int, limit: int, sharing: int, profile: Profile
) -> str:
    how = f" ({sharing} replicas share the device)" if sharing > 1 else ""
    guess = f"; profiled on 1/{profile.scale:.0f} of the rows, because all did not fit" if profile.scale > 1 else ""
    peak = static + sharing * (plan.peak or 0)
    head = (
        f"dpx: memory of {device}{how}: {_mib(peak)} predicted of {_mib(limit)} allowed, {_mib(static)} static{guess}"
    )
    return f"{head}\n{format_plan(plan) if plan.dropped else 'everything fits; nothing is computed again'}"


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"
