"""Keeps the replicas equal to replica 0: parameters after they changed, buffers after a step, train/eval flags."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from lightning_dpx.errors import ReplicationError
from lightning_dpx.replicas.replica import Replica

BufferMode = Literal["broadcast", "mean"]


class StateSync:
    """Notices what changed on replica 0 and carries it to the other replicas.

    A change is seen by the parameter's version counter. Writes through ``.data`` leave no trace there, so the owner
    calls :meth:`mark_changed` wherever such writes are customary (around evaluation, weight averaging).
    """

    def __init__(self, replicas: Sequence[Replica], buffers: BufferMode = "broadcast") -> None:
        self._root, self._others, self._buffers = replicas[0], tuple(replicas[1:]), buffers
        self._owners: list[int] = []
        self._flags: list[bool] = []
        self._owned: list[nn.Parameter] = []
        self._versions: list[int] = []
        self._changed = True

    def mark_changed(self) -> None:
        """The next :meth:`synchronize` copies everything."""
        self._changed = True

    def set_owners(self, owners: Sequence[int]) -> None:
        """The replica whose copy of each parameter the optimizer changes; replica 0 unless said otherwise."""
        self._owners = list(owners) if any(owners) else []
        self._flags = [parameter.requires_grad for parameter in self._root.parameters]

    @torch.no_grad()
    def optimizer_stepped(self) -> None:
        """The owners have new values, perhaps written without a trace; with other owners all replicas get them now."""
        self.mark_changed()
        if not self._owners:
            return
        replicas = (self._root, *self._others)
        for index, owner in enumerate(self._owners):
            value = replicas[owner].parameters[index]
            for replica in replicas:
                target = replica.parameters[index]
                if target is not value and target.data_ptr() != value.data_ptr():
                    target.copy_(value, non_blocking=True)
        self._owned = self._root.parameters
        self._versions = [parameter._version for parameter in self._owned]
        self._changed = False

    def _take_flags_of_owners(self) -> None:
        """Freezing may happen on the user's module or, through an optimizer, on the owner's copy."""
        replicas = (self._root, *self._others)
        for index, owner in enumerate(self._owners):
            mine, theirs = self._root.parameters[index], replicas[owner].parameters[index]
            if mine.requires_grad == self._flags[index] != theirs.requires_grad:
                mine.requires_grad_(theirs.requires_grad)
            self._flags[index] = mine.requires_grad

    @torch.no_grad()
    def synchronize(self) -> None:
        """Before a forward: parameters, buffers and flags of the replicas become those of replica 0.

        Raises:
            ReplicationError: a parameter was added, removed or resized since the replicas were made.
        """
        self.synchronize_parameters()
        for replica in self._others:
            for source_module, target_module in zip(self._root.modules, replica.modules, strict=True):
                if target_module.training != source_module.training:
                    target_module.training = source_module.training
            for source, target in zip(self._root.buffers, replica.buffers, strict=True):
                target.copy_(source, non_blocking=True)

    @torch.no_grad()
    def synchronize_parameters(self) -> None:
        """Only the parameters, which may change in the middle of a step.

        Raises:
            ReplicationError: a parameter was added, removed or resized since the replicas were made.
        """
        self._take_flags_of_owners()
        owned = self._root.parameters
        versions = [parameter._version for parameter in owned]
        changed = self._changed or versions != self._versions or owned is not self._owned
        for replica in self._others:
            self._follow(replica, owned, changed)
        self._owned, self._versions, self._changed = owned, versions, False

    def _follow(self, replica: Replica, owned: list[nn.Parameter], changed: bool) -> None:
        mirrored = replica.parameters
        if len(mirrored) != len(owned):
            raise ReplicationError(
                f"The module has {len(owned)} parameters now, its replica {replica.index} has {len(mirrored)}: "
                "parameters were added or removed after setup. Change the module before fit (configure_model)."
            )
        for source, target in zip(owned, mirrored, strict=True):
            if source.shape != target.shape:
                raise ReplicationError(
                    f"Parameter {self._name_of(source)} was resized to {tuple(source.shape)} after setup; replica "
                    f"{replica.index} has {tuple(target.shape)}. Change the module before fit (configure_model)."
                )
            if replica.device == self._root.device:
                if target.data_ptr() != source.data_ptr():
                    target.data = source.detach()
            elif changed:
                target.copy_(source, non_blocking=True)
            if target.requires_grad != source.requires_grad:
                target.requires_grad_(source.requires_grad)

    @torch.no_grad()
    def collect_buffers(self, active: Sequence[Replica]) -> None:
        """After a step: replica 0's buffers become the first active replica's, or the mean over the active ones.

        Integer buffers (such as ``num_batches_tracked``) are never averaged.
        """
        columns = zip(*(replica.buffers for replica in active), strict=True)
        for owned, column in zip(self._root.buffers, columns, strict=True):
            if self._buffers == "mean" and owned.is_floating_point() and len(column) > 1:
                owned.copy_(torch.stack([buffer.to(owned.device) for buffer in column]).mean(0))
            elif column[0] is not owned:
                owned.copy_(column[0])

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next(name for name, other in self._root.module.named_parameters() if other is parameter)
