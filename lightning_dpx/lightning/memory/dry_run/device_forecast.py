"""One device in a training step, byte by byte: what is there all the time, and what activations take beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.errors import BudgetError
from lightning_dpx.lightning.lightning_api import LightningModule, Trainer
from lightning_dpx.lightning.memory.device_planner import DevicePlanner
from lightning_dpx.lightning.memory.dry_run.settings import Settings
from lightning_dpx.lightning.memory.freed_gradients import may_free_gradients
from lightning_dpx.lightning.memory.kept_gradients import keeps_earlier_gradients
from lightning_dpx.lightning.memory.kept_states import times_kept
from lightning_dpx.memory import BesideActivations, MemoryPlan
from lightning_dpx.reducers import make_reducer
from lightning_dpx.replicas.copying.copied_tensors import copied_tensors
from lightning_dpx.torch_compat import bytes_of


@dataclass(frozen=True, slots=True)
class DeviceForecast:
    """One device in a training step, in bytes.

    Attributes:
        device: Its name.
        rows: Of the batch.
        parameters: Of the replica.
        gradients: Of the replica, and what arrives from others on an owner.
        optimizer: State of the parameters that it owns.
        buffers: Of the replica.
        inputs: Its part of the batch.
        unplanned: Activations at their peak, if all are kept.
        plan: What is kept and what is computed again; ``None`` where the budget cannot be met.
        budget: What was allowed in all; 0 without a budget.
        smallest: The least that the device can do with in all; 0 if it was not asked for.
        communication: What processes need to share parameters and gradients: buckets of DDP, and with FSDP2 what is
            there at the peak beside activations, such as whole parameters.
        counted: Bytes of gradients that are counted among activations, from when the backward makes them, and not among
            ``gradients``, which are there all the time.
        others: What else is there all the time, as far as the device could be asked: workspaces of its libraries.
    """

    device: str
    rows: int
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    inputs: int
    unplanned: int
    plan: MemoryPlan | None
    budget: int
    smallest: int = 0
    communication: int = 0
    counted: int = 0
    others: int = 0

    @property
    def static(self) -> int:
        """Everything but activations, and but the gradients that are counted among them."""
        held = self.parameters + self.gradients + self.optimizer + self.buffers
        return held + self.inputs + self.communication + self.others

    @property
    def peak(self) -> int:
        """The predicted peak, with the plan if there is one."""
        return self.static + (self.unplanned if self.plan is None or self.plan.peak is None else self.plan.peak)

    @property
    def needed(self) -> int:
        """The predicted peak, or the least that the device can do with where that is over the budget."""
        if self.fits:
            return self.peak
        return max(self.smallest, self.budget)

    @property
    def fits(self) -> bool:
        """Whether the budget is met."""
        return not self.budget or (self.plan is not None and self.peak <= self.budget)


def forecast_device(
    device: torch.device, rows: int, static: dict[str, int], planner: DevicePlanner, allowed: int | None
) -> DeviceForecast:
    """The forecast of one device.

    Args:
        device: Which.
        rows: Of its slice.
        static: Bytes by name, as of :func:`lasting_bytes`, with those of ``"inputs"``.
        planner: Of the slice.
        allowed: Bytes of everything there; ``None`` without a budget.
    """
    counted = static["counted"]
    held = sum(static.values()) - counted
    # Of the step in one piece, with which the user compares what micro-batches or a plan save.
    unplanned = planner.whole.peak
    common = {"device": str(device), "rows": rows, **static, "unplanned": unplanned, "budget": allowed or 0}
    try:
        # At least one byte: where nothing is left, the planner says how much is missing.
        plan = planner.plan(None if allowed is None else max(1, allowed - held))
    except BudgetError as error:
        smallest = held + (error.smallest if error.smallest is not None else 0)
        return DeviceForecast(**common, plan=None, smallest=smallest)  # type: ignore[arg-type]
    # Known only now: a step that stays in one piece keeps no earlier gradients aside, and has its buffers once.
    if plan is not None and plan.micro_batches > 1:
        common["gradients"] = static["gradients"] + planner.beside.gradients
        common["counted"] = 0  # those of the first micro-batch are there all through the others
        common["unplanned"] = unplanned - counted
        common["buffers"] = static["buffers"] + plan.micro_batches * planner.beside.buffers
    return DeviceForecast(**common, plan=plan)  # type: ignore[arg-type]


def counts_gradients(trainer: Trainer, module: LightningModule, settings: Settings) -> bool:
    """Whether a run frees the gradients of every step before the next one, so that they are counted where they come."""
    # Without a budget nothing is done about memory, and several devices sum gradients in memory that stays.
    if settings.budget is None or len(settings.devices) > 1 or settings.keeps_buckets:
        return False
    return may_free_gradients(trainer, module)


def lasting_bytes(
    trainer: Trainer, module: LightningModule, settings: Settings, others: int = 0
) -> list[dict[str, int]]:
    """Per replica, the bytes that are there all the time, and those of gradients that are not.

    Args:
        trainer: Has the optimizers.
        module: What is trained.
        settings: Of the run.
        others: What a device that is there holds beside; the host is not asked.
    """
    parameters = list(module.parameters())
    owners = owners_of(parameters, settings)
    several = len(set(settings.devices)) > 1
    # Optimizers make their states in the first update, which a dry run never gets to.
    states = max(map(times_kept, trainer.optimizers), default=0)
    trained = [(p.nbytes if p.requires_grad else 0, owner) for p, owner in zip(parameters, owners, strict=True)]
    all_gradients = _bytes_of_gradients(module)
    counted = all_gradients if counts_gradients(trainer, module, settings) else 0
    found = []
    for index, device in enumerate(settings.devices):
        owned = sum(size for size, owner in trained if owner == index)
        # Between devices the reduction needs room for what arrives, beside the replica's own gradients.
        arriving = owned if several else 0
        found.append(
            {
                "parameters": sum(parameter.nbytes for parameter in parameters),
                "gradients": all_gradients + arriving - counted,
                "optimizer": int(states * owned),
                "buffers": bytes_of(module.buffers()),
                "communication": all_gradients if settings.keeps_buckets else 0,
                # They come within the step, and are no part of what is there all the time.
                "counted": counted,
                "others": 0 if is_host(device) else others,
            }
        )
    return found


def owners_of(parameters: Sequence[torch.nn.Parameter], settings: Settings) -> list[int]:
    """By parameter, the device that its gradients are summed for, and that its optimizer's state is on."""
    here = "collective" if settings.reducer in ("auto", "nccl") else settings.reducer  # the same owners, anywhere
    return make_reducer(here, settings.devices).owners([parameter.numel() for parameter in parameters])


def beside_micro_batches(trainer: Trainer, module: LightningModule, settings: Settings) -> BesideActivations:
    """Earlier batches' gradients, aside while micro-batches add up their own, and the buffers of each.

    Where a step in one piece counts its gradients as they come, those of earlier micro-batches are what is beside.
    """
    buffers = bytes_of(module.buffers())
    # The trainer leads to everything of the run, and is no part of a copy.
    attributes = bytes_of(copied_tensors(module, [trainer, trainer.strategy, *trainer.loggers]))
    beside = BesideActivations(buffers=buffers, attributes=attributes)
    if not counts_gradients(trainer, module, settings) and not keeps_earlier_gradients(trainer, module):
        return beside
    return replace(beside, gradients=_bytes_of_gradients(module))


def _bytes_of_gradients(module: LightningModule) -> int:
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
