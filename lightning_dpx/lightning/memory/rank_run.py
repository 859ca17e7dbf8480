"""What a rank of FSDP2 would hold in a training step, of any number of ranks, none of which need be there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from lightning_dpx.errors import BudgetError, ConfigurationError, PlanError
from lightning_dpx.lightning.lightning_api import LightningModule, Trainer, is_overridden
from lightning_dpx.lightning.lightning_compat import set_device_mesh
from lightning_dpx.lightning.loaded_batches import rows_to_weigh_by
from lightning_dpx.lightning.memory.auto_shift import most_states_of
from lightning_dpx.lightning.memory.batch_shapes import bytes_of_tensors
from lightning_dpx.lightning.memory.dry_run.device_forecast import DeviceForecast
from lightning_dpx.lightning.memory.dry_run.dry_run import DryRun
from lightning_dpx.lightning.memory.dry_run.first_batch import work_on_first_batch
from lightning_dpx.lightning.memory.dry_run.settings import Settings
from lightning_dpx.lightning.memory.dry_run.slice_planners import plan_step
from lightning_dpx.lightning.memory.dry_run.step_profiles import Progress, unlogged_step
from lightning_dpx.lightning.memory.kept_gradients import keeps_gradients
from lightning_dpx.lightning.memory.slice_loss import end_of_step
from lightning_dpx.memory import MemoryPlan, Profile, profile_unsharded, sharded_units
from lightning_dpx.memory.absent_ranks import NothingPinned, absent_ranks, shard_units
from lightning_dpx.memory.profile.held_output import HeldOutput
from lightning_dpx.memory.profile.profiled_step import Run
from lightning_dpx.memory.sharded_step import RankMemory, rank_memory, shard_bytes
from lightning_dpx.python_objects.overrides import overridden
from lightning_dpx.torch_compat import sharded_parameters, unpin

_CLOSE = 32  # a peak that is less than such a part of the budget below it is good enough
_MOST_TRIES = 6  # plans for one budget: what sharding adds is known only when a plan is followed


@dataclass(frozen=True, slots=True)
class ShardRanks:
    """Processes that a module is sharded over, with one device each.

    Attributes:
        num: How many.
        units: What ``fully_shard`` is called on, as names with ``*``; empty where ``configure_model()`` says so.
    """

    num: int
    units: Sequence[str] = ()


def rank_run(
    trainer: Trainer,
    module: LightningModule,
    data: Any,
    settings: Settings,
    ranks: ShardRanks,
    progress: Progress = lambda _: None,
) -> DryRun:
    """Predicts the memory of the first rank, whose parts are the largest, in a step on the first batch of ``data``.

    Args:
        trainer: On one CPU, with the precision and the callbacks of the run.
        module: What would be trained; it is sharded afterwards, and of no further use.
        data: A datamodule or a loader; ``None`` if the module has its own.
        settings: Of the run; the first device is that of a rank.
        ranks: Of the run.
        progress: Told what happens next.

    Raises:
        ConfigurationError: it is not known what ``fully_shard`` is called on.
        PlanError: fake tensors cannot run the step.
    """
    with absent_ranks(ranks.num) as mesh, overridden(module, configure_model=_without_pinning(module)):
        # Here configure_model() looks for it, which the Trainer calls.
        set_device_mesh(module, mesh)
        return work_on_first_batch(
            trainer,
            module,
            data,
            lambda trainer, module, batch: _forecast(
                _RankStep(trainer, module, batch, settings), ranks, mesh, progress
            ),
        )


def _without_pinning(module: LightningModule) -> Callable[[], None]:
    """Its ``configure_model()``, with ``CPUOffloadPolicy`` on a machine without an accelerator as well."""
    configure_model = module.configure_model

    @wraps(configure_model)
    def configure() -> None:
        with NothingPinned():
            configure_model()
        # Each time that the module is moved they would be pinned again.
        for parameter in sharded_parameters(module):
            unpin(parameter)

    return configure


class _RankStep:
    """A step of one rank, whose whole batch it has.

    Args:
        trainer: Of the dry run.
        module: What is sharded.
        batch: Of the rank.
        settings: Of the run.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, batch: Any, settings: Settings) -> None:
        self.trainer = trainer
        self.module = module
        self.batch = batch
        self.settings = settings
        self.device = settings.devices[0]
        self.accumulates = keeps_gradients(trainer)

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return rows_to_weigh_by(self.batch)

    def on(self, inputs: Any) -> Run:
        """The step on ``inputs``, which may be fakes."""
        step = partial(unlogged_step, self.trainer, self.module, inputs, self.rows)
        return HeldOutput(step, partial(end_of_step, self.module))

    def profile(self) -> Profile:
        """Its activations, as of a module that is not sharded."""
        return profile_unsharded(self.module, self.batch, self.device, self.on, accumulates=self.accumulates)

    def memory(self, plan: MemoryPlan | None) -> RankMemory:
        """All that comes and goes, with ``plan`` if there is one."""
        return rank_memory(self.module, self.batch, self.device, self.on, plan, accumulates=self.accumulates)

    def held(self) -> dict[str, int]:
        """What is there between steps, by kind."""
        shards = shard_bytes(self.module)
        states = most_states_of(self.trainer.optimizers)
        return {
            "parameters": shards.parameters,
            "gradients": shards.gradients if self.accumulates else 0,
            "optimizer": states * shards.states,
            "buffers": sum(buffer.nbytes for buffer in self.module.buffers()),
            "inputs": bytes_of_tensors(self.batch),
        }


def _forecast(step: _RankStep, ranks: ShardRanks, mesh: Any, progress: Progress) -> DryRun:
    _require_units(step.module, ranks, mesh["data_parallel"])
    if not step.module.automatic_optimization:
        raise PlanError("What a rank of fsdp2 takes is predicted for steps with automatic optimization only.")
    progress("following a step of one rank")
    memory = step.memory(None)
    held = step.held()
    budget = step.settings.budget
    if isinstance(budget, float):
        budget = int(budget * (sum(held.values()) + memory.peak))
    found = _RankForecast(step, ranks, memory, held)
    progress(f"profiling a step on {step.rows} rows")
    profile = step.profile()
    forecast = found.planned(profile, budget)  # type: ignore[arg-type]
    return DryRun((forecast,), (profile,), lambda _, room: found.plan(profile, room), basis=profile.basis)


def _require_units(module: LightningModule, ranks: ShardRanks, mesh: Any) -> None:
    """Sharded now, by ``configure_model()`` or as the command line says."""
    sharded = sharded_units(module)
    if ranks.units and sharded:
        raise ConfigurationError(
            f"configure_model() of {type(module).__name__} has called fully_shard already; leave out --shard-units."
        )
    if ranks.units:
        shard_units(module, ranks.units, mesh)
    elif not sharded:
        done = "calls no fully_shard" if is_overridden("configure_model", module) else "is not there"
        raise ConfigurationError(
            f"It is not known what fully_shard is called on: configure_model() of {type(module).__name__} {done}. Name "
            "the modules by --shard-units, once for each, such as --shard-units 'model.layers.*' --shard-units model."
        )


class _RankForecast:
    """The first rank in a step, with and without plans.

    Args:
        step: Of the rank.
        ranks: All of them.
        memory: Of the step without a plan.
        held: Bytes that are there between steps, by kind.
    """

    def __init__(self, step: _RankStep, ranks: ShardRanks, memory: RankMemory, held: dict[str, int]) -> None:
        self._step = step
        self._ranks = ranks
        self._memory = memory
        self._held = held

    def plan(self, profile: Profile, room: int | None) -> MemoryPlan:
        """The plan for so many bytes of activations, or for as few as possible.

        Raises:
            BudgetError: there is none.
        """
        return plan_step(self._step.module, self._step.settings, profile, room)

    def of(self, memory: RankMemory, unplanned: int, activations: int, **more: Any) -> DeviceForecast:
        """What is there at the peak, which is that of ``memory``.

        Args:
            memory: Of the step.
            unplanned: Bytes of activations without a plan.
            activations: With the plan that the step follows, if any.
            more: Fields of the forecast: the plan, and the budget.
        """
        held: dict[str, Any] = {**self._held, "gradients": self._held["gradients"] + memory.gradients}
        return DeviceForecast(
            device=f"rank 0 of {self._ranks.num}",
            rows=self._step.rows,
            **held,
            unplanned=unplanned,
            communication=max(0, memory.peak - memory.gradients - activations),
            **{"plan": None, "budget": 0, **more},
        )

    def planned(self, profile: Profile, budget: int | None) -> DeviceForecast:
        """The rank in a step within ``budget``; without one, everything is kept."""
        most = profile.peak
        if budget is None:
            return self.of(self._memory, most, most, plan=self.plan(profile, most))
        room = budget - sum(self._held.values())
        adds = max(0, self._memory.peak - most)
        found = self._plan_within(profile, room, adds)
        if found is not None:
            plan, memory = found
            return self.of(memory, most, plan.peak or 0, plan=plan, budget=budget)
        least = self._memory_with(self.plan(profile, None), adds).peak
        smallest = max(budget + 1, sum(self._held.values()) + least)
        return self.of(self._memory, most, most, budget=budget, smallest=smallest)

    def _plan_within(self, profile: Profile, room: int, adds: int) -> tuple[MemoryPlan, RankMemory] | None:
        """The plan with the least recomputation, of some that were tried, with which a step takes up to ``room`` bytes.

        A plan moves the peak to where more, or less, of the parameters is whole, so what is left for activations is
        known only when a plan is followed: it is searched for between too much and too little.
        """
        found = None
        too_much = min(profile.peak, room)
        too_little = 0
        least = 0
        given = room - adds
        for _ in range(_MOST_TRIES):
            try:
                plan = self.plan(profile, max(1, given))
            except BudgetError as error:
                # Below the least that there is a plan for, only that least is left to be tried.
                too_little = max(too_little, given)
                least = error.smallest or 0
                given = max(least, (too_little + too_much) // 2)
                continue
            memory = self._memory_with(plan, adds)
            if memory.peak <= room:
                found = plan, memory
                too_little = given
            else:
                too_much = min(given, plan.peak or given)
                if too_much <= least:
                    break
            if found is not None and (given == room - adds or room - found[1].peak <= room // _CLOSE):
                break
            # If what is there beside activations stays the same, this is right; else the middle gets nearer.
            given = room - (memory.peak - (plan.peak or 0))
            if not too_little < given < too_much:
                given = (too_little + too_much) // 2
        return found

    def _memory_with(self, plan: MemoryPlan, adds: int) -> RankMemory:
        """What comes and goes in a step that follows ``plan``."""
        # Fakes are on the host, where nothing is offloaded to the host: then both peaks are taken together, as if
        # they were at one time.
        if plan.names("offload"):
            return self._memory._replace(peak=(plan.peak or 0) + adds)
        return self._step.memory(plan)
