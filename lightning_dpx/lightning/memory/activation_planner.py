"""The memory planner for any other strategy: a callback."""

import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_dpx.activations import arguments_of_step
from lightning_dpx.errors import BudgetError, ConfigurationError, PlanError, UnsupportedError
from lightning_dpx.lightning.lightning_api import (
    Callback,
    DeepSpeedStrategy,
    FSDPStrategy,
    LightningModule,
    Trainer,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_dpx.lightning.lightning_compat import set_trainer
from lightning_dpx.lightning.logging import StepLog
from lightning_dpx.lightning.memory.batch_shapes import KnownShapes, largest_of, most_demanding, shapes_of
from lightning_dpx.lightning.memory.kept_gradients import keeps_gradients
from lightning_dpx.lightning.memory.planning_cache import PlanningCache, agreement, key_of_run_step, shows_progress
from lightning_dpx.lightning.memory.profiled_steps import SeenStep
from lightning_dpx.lightning.memory.slice_loss import NoLossError, end_of_step
from lightning_dpx.lightning.memory.steps_without_loss import StepsWithoutLoss
from lightning_dpx.lightning.memory.trained_parameters import TrainedParameters
from lightning_dpx.lightning.memory.unplanned_steps import UnplannedSteps
from lightning_dpx.lightning.rehearsal.manual_shadow_step import ManualSandbox, hide_optimizers
from lightning_dpx.lightning.strategy import DPXStrategy
from lightning_dpx.memory import (
    MemoryPlan,
    Planner,
    Profile,
    applied_plan,
    apply_plan,
    as_taken_by,
    bytes_of_budget,
    complete_plan,
    describe_cut,
    format_plan,
    made_by_rank,
    make_planner,
    plan_of_first_rank,
    planned,
    profile_step,
    profile_unsharded,
    remove_plan,
    sharded_units,
    told_by_all_ranks,
    unwrapped,
)
from lightning_dpx.memory.profile.held_output import HeldOutput
from lightning_dpx.progress import shown
from lightning_dpx.replicas import BatchSlice, Replica, make_shadow_module


class ActivationPlanner(Callback):
    """Fits the activations of every training step into a budget, under any strategy that runs one module per process.

    The first batch is profiled on a shadow of the module, before its step, and so is every batch that is larger in
    some dim than any before: one plan then keeps all of these shapes within the budget. A step that saves what none of
    them has saved, because it skips layers or chooses among them, is announced, and the coming ones are profiled until
    one of them has shown it. Of several processes all plan when one must, each for its own batches. ``strategy="dpx"``
    plans by itself: give it ``memory_budget``.

    A module that FSDPStrategy shards, or of which ``fully_shard`` has spread parts (in ``configure_model``, with
    ModelParallelStrategy), is planned on fake tensors as what it was before; all processes follow one
    plan, which is made for the largest batches of any of them. Gathered parameters come on top of the budget, which is
    that of one process. Tensor-parallel layers are planned as they are, in each process; calls in which processes meet
    are replayed without meeting again.

    Args:
        budget: Bytes of activations at the most, ``"8GiB"``, a fraction (0 to 1, or ``"60%"``) of what they need
            without a plan, or ``None`` for as few as possible. Parameters, gradients and optimizer state come on top.
        planner: Who decides: ``"auto"``, ``"optimal"``, ``"milp"``, ``"search"``, ``"threshold"``, or a Planner.
        plan: Instead of a budget, a plan to follow, or the path of a saved one.
        plan_cache: Where plans are kept for the next run, which then plans nothing; as in DPXStrategy.

    Attributes:
        plan: What is followed; ``None`` before the first batch.
        profile: The step that leaves least room, of those that it was made for; ``None`` if it was given.

    Raises:
        ConfigurationError: an argument has a value that is not allowed, or the Trainer has two of these.
        PlanError: the budget cannot be met, or ``plan`` does not belong to the model.
        UnsupportedError: the strategy is DeepSpeed's, or a budget was given for steps by hand of a sharded module.

    Examples:
        >>> planner = dpx.ActivationPlanner(budget="200MiB")
        >>> trainer = Trainer(strategy="auto", accelerator="cpu", callbacks=[planner], max_steps=2, **quiet)
        >>> trainer.fit(BoringModel())
        >>> planner.plan.peak <= 200 * 2**20
        True
    """

    def __init__(
        self,
        budget: int | float | str | None = None,
        planner: str | Planner = "auto",
        plan: MemoryPlan | str | None = None,
        plan_cache: bool | str | os.PathLike[str] = True,
    ) -> None:
        if budget is not None and plan is not None:
            raise ConfigurationError("Give budget, to make a plan, or plan, to follow one; not both.")
        # A float stays one: it is a share of a peak that only the first batch tells.
        self._budget = budget
        bytes_of_budget(self._budget, 1)  # checks it
        self._planner = make_planner(planner)
        self._cache = PlanningCache(plan_cache, "plan_cache")
        self.plan = MemoryPlan.load(plan) if isinstance(plan, str) else plan
        self.profile: Profile | None = None
        self._given = self.plan is not None
        self._shapes = KnownShapes()
        self._trained = TrainedParameters()
        self._without_loss = StepsWithoutLoss()
        self._profiles = list[Profile]()
        self._unplanned_steps = UnplannedSteps()
        # Hooks have no block to put a context around: one enters it, another closes it.
        self._step = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses the strategy that plans by itself, and those that no shadow module can be made for."""
        if isinstance(trainer.strategy, DPXStrategy):
            raise ConfigurationError(
                'ActivationPlanner is for other strategies; give DPXStrategy(memory_budget="8GiB") its budget.'
            )
        # It shards the module in an engine of its own, and a shadow in one process would have
        # a part of each parameter.
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise UnsupportedError(
                f"ActivationPlanner profiles a whole module, and {type(trainer.strategy).__name__} shards it; use its "
                "own activation checkpointing, FSDPStrategy, or ModelParallelStrategy with fully_shard in "
                "configure_model()."
            )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        planners = [callback for callback in callbacks if isinstance(callback, ActivationPlanner)]
        # A module follows one plan: that of whichever comes first, and the budget of the other would be forgotten.
        if len(planners) > 1:
            raise ConfigurationError(
                f"The Trainer has {len(planners)} ActivationPlanner callbacks; give one, with the budget that counts."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts a plan that was given on the module."""
        if not self._given:
            _refuse_sharded_steps_by_hand(trainer, pl_module)
        if self._given and self.plan is not None:
            apply_plan(_outermost(trainer, pl_module), self.plan)
            if self.plan.micro_batches > 1:
                rank_zero_warn(
                    f"dpx: the given plan is for {describe_cut(self.plan)}, and {type(trainer.strategy).__name__} cuts "
                    "no batches: the activations of a step are those of all rows. strategy='dpx' cuts them."
                )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Plans if need be, and begins to follow."""
        self._without_loss.begin_step()
        # All plan if one must: a profiled step may hold collectives, in which
        # the others would be missed.
        if not self._given and trainer.strategy.reduce_boolean_decision(self._is_open(pl_module, batch), all=False):
            # FSDP1 is off while it is planned: the module is what it was, with names as they were.
            as_before = unwrapped(_outermost(trainer, pl_module))
            with shown("planning memory", enabled=shows_progress(trainer)), as_before:
                try:
                    self._make_plan(trainer, pl_module, batch, batch_idx)
                    self._without_loss.note_loss()
                except NoLossError as error:  # it is asked again at the next batch
                    if self._without_loss.note_none(error):
                        self._without_loss.warn(error)
        self._step.enter_context(planned(pl_module))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        """Stops following the plan: the step is over."""
        self._step.close()
        # Nothing is given for a step that returned no loss.
        if outputs:
            self._without_loss.note_loss()

    def on_exception(self, *_: Any) -> None:
        """Stops following the plan after a step that failed."""
        self._step.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves the module as it was."""
        if applied_plan(pl_module) is not None:
            remove_plan(pl_module)
        self._shapes = KnownShapes()
        self._trained = TrainedParameters()
        self._without_loss = StepsWithoutLoss()
        self._profiles = []
        self._unplanned_steps = UnplannedSteps()
        self._cache.start()

    def _is_open(self, module: LightningModule, batch: Any) -> bool:
        """Whether nothing is planned for a batch of that shape, or for steps such as an earlier one was."""
        if (applied := applied_plan(module)) is not None:
            self._unplanned_steps.look_back(applied)
        # What was unfrozen since then is in no profile.
        if self._trained.note(list(module.parameters()), module):
            self._shapes = KnownShapes()
        if self._unplanned_steps.expected and self._cache.is_used:  # what was found there is not what the steps are
            self._cache.leave()
            self._shapes = KnownShapes()
            self._profiles = []
            self._unplanned_steps = UnplannedSteps()
        return self._is_unknown(batch)

    def _is_unknown(self, batch: Any) -> bool:
        if self._without_loss.skips_profile:
            return False
        return not self._shapes.covers(batch) or self._unplanned_steps.expected

    def _make_plan(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        applied = applied_plan(module)
        if applied is not None:
            remove_plan(module)
        now = None if applied is None else applied.plan
        failure: Exception | None = None
        try:
            self._plan_step(trainer, module, batch, batch_idx, now)
        except BudgetError as error:
            self._trained.explain(error)
            failure = error
        except (NoLossError, PlanError) as error:
            failure = error
        finally:
            if self.plan is not None:
                apply_plan(module, self.plan, watches=True)
        # A process that ends here alone would be waited for in the next collective.
        may_go_on = failure is None or isinstance(failure, NoLossError)
        is_planned = trainer.strategy.reduce_boolean_decision(may_go_on, all=True)
        if failure is not None:
            raise failure
        if not is_planned:
            raise PlanError("Another process found no memory plan for its step; its own error says why.")

    def _plan_step(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, now: MemoryPlan | None
    ) -> None:
        if sharded_units(module):
            self._plan_sharded_step(trainer, module, batch, batch_idx, now)
            return
        # It looks like the known ones and is not: the cache would find the known step by its shapes.
        # Batches differ in shape between processes, and all ask the cache or none does.
        anew = self._shapes.covers(batch) and self._unplanned_steps.expected
        if trainer.strategy.reduce_boolean_decision(anew, all=False):
            profile = self._profiled(trainer, module, batch, batch_idx)
        else:
            profile = self._found_or_profiled(trainer, module, batch, batch_idx)
        seen = SeenStep((profile,), (1,))
        if self._shapes.covers(batch) and not self._unplanned_steps.found_in([seen]):
            return
        plan = self._planned(module, [profile], now)
        if not self._shapes.covers(batch):
            self._shapes.add(batch)
        self._note_plan(trainer, plan, [seen])

    def _plan_sharded_step(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, now: MemoryPlan | None
    ) -> None:
        """One plan for the steps of all processes, which keeps each of them within the budget."""
        # Any process may have the longest sequences: the first one's alone tell nothing of it.
        told = told_by_all_ranks(shapes_of(batch) if self._is_unknown(batch) else None)
        largest = largest_of({rank: shapes for rank, shapes in enumerate(told) if shapes is not None})
        profiles = list[Profile]()
        for rank in largest:
            profile = made_by_rank(rank, lambda: self._profiled_unsharded(trainer, module, batch, batch_idx))
            profiles.append(profile)
        seen = [SeenStep((profile,), (1,)) for profile in profiles]
        found = self._unplanned_steps.found_in(seen)
        is_larger = any(not self._shapes.covers_shapes(shapes) for shapes in largest.values())
        if not trainer.strategy.reduce_boolean_decision(is_larger or found, all=False):
            return
        # The first process has the profiles of all steps so far.
        plan, self.profile = plan_of_first_rank(lambda: (self._planned(module, profiles, now), self.profile))
        self.plan = plan
        # Only now: a batch for which there is no plan stays unknown, as what retries has fewer rows.
        for shapes in largest.values():
            self._shapes.add_shapes(shapes)
        self._note_plan(trainer, plan, seen)

    def _note_plan(self, trainer: Trainer, plan: MemoryPlan, seen: list[SeenStep]) -> None:
        self._trained.are_planned_for()
        self._unplanned_steps.plan_for(seen)
        rank_zero_info(f"dpx: memory plan for {trainer.strategy.root_device}:\n{format_plan(plan)}")

    def _found_or_profiled(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> Profile:
        device = trainer.strategy.root_device
        keys = [""]
        if self._cache.is_on:
            keys = [key_of_run_step(trainer, module, batch, device, keeps_gradients(trainer))]
        ((profile,),) = self._cache.profiles(
            keys,
            lambda: [[self._profiled(trainer, module, batch, batch_idx)]],
            agreement(trainer, together=True),
        )
        self._unplanned_steps.plan_for([SeenStep((profile,), (1,))])
        return profile

    def _profiled_unsharded(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> Profile:
        """The step of a module that ``fully_shard`` has spread, as what it was before, on fake tensors."""
        device = trainer.strategy.root_device
        logs_of = BatchSlice(Replica(0, device, module), 0, batch)

        def step_on(inputs: Any) -> Callable[[], torch.Tensor | None]:
            def step() -> Any:
                # The user's own module runs on fake tensors. What it logs must not reach the Trainer, and goes with the
                # step: fakes that outlive it are warned of.
                log = StepLog(logs_of)
                with log.recording_alone(module), trainer.precision_plugin.train_step_context():
                    given = inputs
                    if isinstance(trainer.strategy, FSDPStrategy):
                        # Its step is called through the wrapper, which casts what it is given.
                        given = as_taken_by(module, inputs)
                    arguments = arguments_of_step(module.training_step, given, batch_idx)
                    return module.training_step(*arguments)

            return HeldOutput(step, partial(end_of_step, module))

        return profile_unsharded(module, batch, device, step_on, accumulates=keeps_gradients(trainer))

    def _profiled(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> Profile:
        replica = Replica(0, trainer.strategy.root_device, module)
        # The Trainer and its loggers are kept by reference: a copy of them
        # would copy the whole run.
        shadow: Any = make_shadow_module(replica, [trainer, *trainer.loggers])
        set_trainer(shadow, trainer)

        if not shadow.automatic_optimization:
            hide_optimizers(shadow)
        sandbox = ManualSandbox(trainer.strategy, module, list(module.parameters()), [replica.device])

        def step() -> Any:
            # Optimizers of a step by hand really step, so each run begins from the same state.
            opened = nullcontext() if module.automatic_optimization else sandbox.opened(shadow)
            with opened, StepLog(BatchSlice(replica, 0, batch)).recording_alone(shadow):
                arguments = arguments_of_step(shadow.training_step, batch, batch_idx)
                return shadow.training_step(*arguments)

        return profile_step(
            shadow,
            HeldOutput(step, partial(end_of_step, shadow)),
            replica.device,
            context=trainer.precision_plugin.train_step_context,
            accumulates=keeps_gradients(trainer),
        )

    def _planned(self, module: LightningModule, latest: list[Profile], now: MemoryPlan | None) -> MemoryPlan:
        profiles = most_demanding([*self._profiles, *latest], lambda profile: profile.peak)
        largest = max(profiles, key=lambda profile: profile.peak)
        # A fraction is one of the largest step so far, and so grows along with the batches.
        budget = bytes_of_budget(self._budget, largest.peak)
        if budget is None:  # as few as possible where most are needed
            least = self._cache.plan_profile(module, largest, self._planner)
            self.profile = largest
            # Smaller steps may save what the largest one does not, such as another branch.
            plan = complete_plan(module, least, profiles, self._planner)
        else:
            steps = [[profile] for profile in profiles]
            rooms = [[budget] for _ in profiles]
            shared = self._cache.plan_shapes(module, steps, rooms, self._planner, now)
            plan = shared.plans[0]
            self.profile = profiles[shared.worst[0]]
        self.plan = plan
        self._profiles = profiles
        return plan


def _refuse_sharded_steps_by_hand(trainer: Trainer, module: LightningModule) -> None:
    """Refuses steps that cannot be planned, before the first of them.

    Raises:
        UnsupportedError: the module is sharded, and its steps are by hand.
    """
    # The module itself runs on fake tensors, as there can be no copy of it, and the optimizers
    # that its step calls are the real ones: they would step.
    if not module.automatic_optimization and sharded_units(_outermost(trainer, module)):
        raise UnsupportedError(
            f"ActivationPlanner was given a budget, and plans steps of a sharded module with automatic optimization "
            f"only; {type(module).__name__} has automatic_optimization=False. Give it a plan to follow instead, "
            "ActivationPlanner(plan=...): one of the same step with automatic optimization, or of search_plan."
        )


def _outermost(trainer: Trainer, module: LightningModule) -> nn.Module:
    """The wrapper of FSDP1 round ``module``, which has the user's own parameters; else the module itself."""
    wrapper = trainer.strategy.model
    if isinstance(trainer.strategy, FSDPStrategy) and wrapper is not None:
        return wrapper
    return module
