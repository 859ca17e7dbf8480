"""What a run asks the cache of plans: whether its steps and its plans are known from an earlier run.

Several processes look a step up together: one that profiled it alone would wait for the others in its collectives. What
was found is watched as a plan from a file is. Where the steps of the run turn out to be others, it is forgotten, and
planned anew; where they turn out to differ from each other, nothing is kept for the next run, which could not know
which of them comes first.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_dpx.devices import free_bytes
from lightning_dpx.lightning.lightning_api import Trainer, rank_zero_info
from lightning_dpx.memory import MemoryPlan, Planner, Profile, SharedPlan, plan_shapes
from lightning_dpx.memory.plan.forecast_of_plan import forecast_plan
from lightning_dpx.memory.plan_cache import PlanCache, found_or_planned, key_of_plans, key_of_step

Agree = Callable[[bool], bool]
_MORE_ROOM = 1.1  # times what was free when a plan was made


class PlanningCache:
    """The entries that a run uses.

    Args:
        where: As :class:`PlanCache` takes it.
        argument: What turns it off, as a user writes it.

    Attributes:
        is_used: Whether something that is planned for was found, and not seen.
    """

    def __init__(self, where: bool | str | os.PathLike[str], argument: str) -> None:
        self._cache = PlanCache(where, rank_zero_info)
        self._argument = argument
        self.is_used: bool = False
        self._keys: list[str] = []  # of what the run has found, or kept

    def profiles(
        self,
        keys: Sequence[str],
        make: Callable[[], Sequence[Sequence[Profile]]],
        agree: Agree,
        *,
        devices: Sequence[Sequence[torch.device]] = (),
        anew: bool = False,
    ) -> Sequence[Sequence[Profile]]:
        """The profiles of some steps: of an earlier run, or else from ``make``.

        Args:
            keys: Of each step; empty where they are not known.
            make: Profiles all steps.
            agree: Whether all processes of the run say yes.
            devices: Whose memory is looked at, of each step.
            anew: Whether what an earlier run has kept is known to be wrong.
        """
        found = [] if anew else [one for key in keys if (one := self._cache.profiles(key)) is not None]
        for kept, places in zip(found, devices, strict=False):
            # The earlier run had no room for all rows, and this one has it.
            if any(map(is_short_of_rows, kept, places)):
                found = []
                break
        # Asked also where nothing was found: the other processes wait for the answer.
        if agree(len(found) == len(keys) > 0):
            self.is_used = True
            self._keys += keys
            return found
        made = make()
        for key, profiles in zip(keys, made, strict=True):
            self._cache.keep_profiles(key, profiles)
        self._keys += keys
        return made

    def plan_shapes(
        self,
        module: nn.Module,
        steps: Sequence[Sequence[Profile]],
        rooms: Sequence[Sequence[int]],
        planner: str | Planner,
        now: MemoryPlan | None,
        *,
        measured: bool = False,
    ) -> SharedPlan:
        """The plan that several steps share, of an earlier run or else of :func:`plan_shapes`.

        Args:
            module: As the function takes it.
            steps: As the function takes them.
            rooms: As the function takes them.
            planner: As the function takes it.
            now: As the function takes it.
            measured: Whether the rooms are what happens to be free. Then an earlier plan does that was made for nearly
                as much and fits.

        Raises:
            BudgetError: a budget cannot be met.
        """
        key = ""
        free = list(chain.from_iterable(rooms))
        if self._cache.is_on:
            every = list(chain.from_iterable(steps))
            # The plan that is followed is preferred, so another one may come out where
            # another was followed before.
            before = () if now is None else (now.fingerprint, [(one.name, one.action) for one in now.decisions])
            allowed = "what is free" if measured else rooms
            key = key_of_plans(every, planner, [len(profiles) for profiles in steps], allowed, before)
            shared = self._found(key, module, steps, rooms)
            if shared is not None:
                self._tell(key)
                return shared
        shared = plan_shapes(module, steps, rooms, planner, now)
        # With the rooms that it was made for, by which a later run judges whether it still does.
        self._cache.keep_plans(key, shared.plans, [*shared.worst, *free])
        self._keys.append(key)
        return shared

    def _found(
        self, key: str, module: nn.Module, steps: Sequence[Sequence[Profile]], rooms: Sequence[Sequence[int]]
    ) -> SharedPlan | None:
        """The plans of an earlier run, if they do for these rooms."""
        found = self._cache.plans(key, module)
        if found is None:
            return None
        plans, numbers = found
        num_devices = len(steps[0])
        free = list(chain.from_iterable(rooms))
        worst = numbers[:num_devices]
        before = numbers[num_devices:]
        if len(plans) != num_devices or len(before) != len(free):
            return None
        # With much more room than then a plan may be found that computes less again.
        if not plans[0].keeps_all and any(now > _MORE_ROOM * then for now, then in zip(free, before, strict=True)):
            return None
        # The same rooms need no look: a forecast of a large step takes a while.
        if free != before:
            for profile, room in zip(chain.from_iterable(steps), free, strict=True):
                if forecast_plan(profile, plans[0]).peak > room:
                    return None
        allowed = [rooms[step][device] for device, step in enumerate(worst)]
        # The budget of a plan is told to the user, and is that of this run.
        now = tuple(replace(plan, budget=budget) for plan, budget in zip(plans, allowed, strict=True))
        return SharedPlan(now, tuple(worst))

    def plan_profile(
        self, module: nn.Module, profile: Profile, planner: str | Planner, budget: int | None = None
    ) -> MemoryPlan:
        """The plan of one step, of an earlier run or else made now."""
        plan, key = found_or_planned(self._cache, module, profile, budget, planner)
        if key and budget is None:
            self._tell(key)
        return plan

    def _tell(self, key: str) -> None:
        self._keys.append(key)
        rank_zero_info(
            f"dpx: the memory plan was found in the cache, in {self._cache.path_of(key)}; "
            f"{self._argument}=False plans anew."
        )

    def leave(self) -> None:
        """Says that the plan from the cache does not fit this run, and forgets it."""
        rank_zero_info("dpx: the memory plan from the cache does not fit the steps of this run: it is planned anew.")
        self.forget()

    def forget(self) -> None:
        """Forgets all that this run has found or kept, here and in the folder of the cache."""
        # What this run has kept goes as well: it was kept before the steps turned out to differ.
        self._cache.forget(*self._keys)
        self.start()

    def start(self) -> None:
        """Begins a run, which has found and kept nothing yet."""
        self._keys = []
        self.is_used = False

    @property
    def is_on(self) -> bool:
        """Whether anything is looked for and kept."""
        return self._cache.is_on


def is_short_of_rows(profile: Profile, device: torch.device) -> bool:
    """Whether a step was profiled on fewer rows than it has, all of which fit on ``device`` now."""
    return profile.scale > 1 and profile.peak <= free_bytes(device)


def agreement(trainer: Trainer | None, *, together: bool) -> Agree:
    """Asks all processes of a run; where they are not ``together``, one among several finds nothing."""
    strategy = None if trainer is None else trainer.strategy
    if strategy is not None and together:
        return partial(strategy.reduce_boolean_decision, all=True)
    # A process that plans alone, after it ran out of memory, has no others to ask.
    if getattr(strategy, "num_processes", 1) == 1:
        return bool
    return _never


def _never(_mine: bool) -> bool:
    return False


def shows_progress(trainer: Trainer | None) -> bool:
    """Whether a bar may show how far planning is: in one process, and unless ``enable_progress_bar=False``."""
    return trainer is not None and trainer.is_global_zero and trainer.progress_bar_callback is not None


def key_of_run_step(trainer: Trainer | None, module: nn.Module, batch: Any, device: torch.device, *others: Any) -> str:
    """The key of a training step of ``module`` on ``batch``, as it is run now, and seen from ``device``.

    Args:
        trainer: What runs it.
        module: What is trained.
        batch: Its data; or a part of them.
        device: The device whose memory is looked at.
        others: What else the step depends on.
    """
    run: list[Any] = []
    if trainer is not None:
        data = getattr(trainer, "datamodule", None)
        # The module itself is part of the key below; this is what else decides how its step runs.
        precision = trainer.precision_plugin
        run = [
            type(data), type(precision).__qualname__, str(trainer.precision), trainer.accumulate_grad_batches,
            trainer.global_rank, trainer.world_size, trainer.global_step == 0,
        ]  # fmt: skip
    return key_of_step(module, batch, device, *run, *others)
