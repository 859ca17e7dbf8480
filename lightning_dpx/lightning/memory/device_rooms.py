"""What every device has room for: its budget, less what is there beside activations."""

from collections.abc import Sequence
from typing import Any

import torch

from lightning_dpx.devices import free_garbage, is_host
from lightning_dpx.errors import BudgetError
from lightning_dpx.lightning.memory.budgets import Budgets
from lightning_dpx.lightning.memory.profiled_steps import by_device
from lightning_dpx.lightning.memory.static import StaticMemory
from lightning_dpx.lightning.memory.trained_parameters import TrainedParameters
from lightning_dpx.replicas import BatchSlice, ReplicaSet
from lightning_dpx.units import format_bytes, format_least


class DeviceRooms:
    """The budgets of a run, and what they leave for activations.

    Args:
        budget: What :func:`parse_budget` allows, for everything on a device.

    Attributes:
        budgets: Those that hold now.
        is_given: Whether the user has given one.
        trained: The parameters that get gradients, which take from the room.
    """

    def __init__(self, budget: Any) -> None:
        self.budgets: Budgets = Budgets(budget)
        self.is_given: bool = budget is not None
        self.trained: TrainedParameters = TrainedParameters()
        self._budgets_given = self.budgets

    @property
    def given(self) -> Any:
        """The budget that the user gave, whatever has become of it."""
        return self._budgets_given.given

    def allow_what_is_free(self) -> None:
        """After an out-of-memory error of a run without a budget: what is free by now is one."""
        if self.budgets.given is None:
            self.budgets = Budgets("auto", "on_oom='replan'")

    def forget(self) -> None:
        """The next run begins: a budget that an out-of-memory error has led to was for the last one."""
        self.budgets = self._budgets_given
        self.trained = TrainedParameters()

    def option(self) -> str:
        """What has led to the budget that there is now, as a user writes it."""
        return self.budgets.option

    def room(self, device: torch.device, static: StaticMemory, limit: int) -> int:
        """Bytes for activations on ``device``, of all the replicas that share it.

        Args:
            device: Which.
            static: What a step needs beside activations.
            limit: Bytes of everything there.

        Raises:
            BudgetError: there is no room for any.
        """
        held = static.beside_activations(device)
        # The reduction may peak after the backward, where no plan for activations can help.
        most = max(held, static.after_backward(device))
        if most < limit:
            return limit - held
        error = self._refusal(device, most, static.moving.get(device, 0), limit)
        self.trained.explain(error)
        raise error

    def _refusal(self, device: torch.device, most: int, moving: int, limit: int) -> BudgetError:
        """Of a budget that what is there beside activations takes: ``most`` bytes, ``moving`` of them in reductions."""
        beside = ""
        way_out = "shift parts of the model to another device (shifts)"
        if moving:
            beside = f", with {format_bytes(moving)} that the reduction of gradients needs beside them"
            way_out = "use more gradient_buckets, reducer='colocate' or shifts"
        allow = "That is all there is: use a smaller batch"
        if self.budgets.is_users:
            allow = "Allow more"
        return BudgetError(
            f"{self.budgets.describe(device)} allows {format_bytes(limit)} on {device}, and what is there beside "
            f"activations (parameters, gradients, optimizer state, the batch) takes {format_bytes(most)}{beside}. "
            f"{allow}, or {way_out}."
        )

    def free_what_counts(self, replicas: ReplicaSet, slices: Sequence[BatchSlice]) -> None:
        """Frees what is there in reference cycles only, where it would leave less room for a step of ``slices``.

        On the host what is there is listed, tensor by tensor, and such tensors are in no list; they count where a
        device tells what is allocated or free. With half a million objects loaded, as those of a library of models
        are, a search takes 0.3 s, which is a step or more of many models.

        A plan is made after another search, on all devices: later steps would have such tensors beside them.
        """
        for device in by_device(slices):
            if not is_host(device) or self.budgets.is_measured(device, replicas.devices):
                free_garbage()
                return

    def room_of_replica(
        self, replicas: ReplicaSet, slices: Sequence[BatchSlice], static: StaticMemory, device: torch.device
    ) -> int:
        """Bytes of activations that each replica on ``device`` is allowed.

        Raises:
            BudgetError: there is no room for any.
        """
        limit = self.budgets.limit(device, replicas.devices)
        return self.room(device, static, limit) // len(by_device(slices)[device])

    def explain(self, error: BudgetError, device: torch.device, held: int, limit: int, sharing: int) -> None:
        """Adds to the refusal of activations what else is on their device.

        Args:
            error: The refusal, of one replica.
            device: Where it is.
            held: Bytes there that are no activations.
            limit: Bytes of everything there.
            sharing: Replicas that share the device.
        """
        # Given as a budget, what is told must do.
        least = format_least(held + sharing * (error.smallest or 0))
        needed = f"it must allow at least {least}"
        if not self.budgets.is_users:
            needed = f"that is all there is, and the step needs at least {least}: use a smaller batch"
        error.add_note(
            f"On {device}, {self.budgets.describe(device)} allows {format_bytes(limit)} in all, of which "
            f"{format_bytes(held)} are taken all through a step (parameters, optimizer state, the batch, gradients "
            f"that stay, their reduction, and what steps leave on the module); {needed}."
        )
        self.trained.explain(error)

    def explain_micro_batches(
        self,
        replicas: ReplicaSet,
        slices: Sequence[BatchSlice],
        static: StaticMemory,
        error: BudgetError,
        device: torch.device,
        in_one_piece: int | None,
    ) -> None:
        """Adds to the refusal of micro-batches what else is on ``device``, and what a step in one piece needs."""
        limit = self.budgets.limit(device, replicas.devices)
        held = static.beside_activations(device)
        sharing = len(by_device(slices)[device])
        self.explain(error, device, held, limit, sharing)
        # A budget that only micro-batches meet is refused where they are found not to do.
        if in_one_piece is not None and in_one_piece > (error.smallest or 0):
            least = format_least(held + sharing * in_one_piece)
            error.add_note(
                f"In one piece a step needs {least}: micro-batches stay only where a check finds that they are what "
                "one device gives."
            )
