"""In manual optimization every replica holds the gradients of the whole batch, as one device would.

User code between a backward and a step may read gradients, clip them or write them. So what a backward adds is summed
over the replicas at once and every replica gets the total: the code sees what it sees on one device, and does the same
on all replicas. What happens once for all (an optimizer's step, a hook) happens on the owners of the parameters, whose
gradients the replicas follow afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.weak import TensorWeakRef

from lightning_dpx.errors import WholeBatchError
from lightning_dpx.replicas import Replica, ReplicaSet
from lightning_dpx.step import TrainingStep
from lightning_dpx.torch_compat import version_counter

Gradient = torch.Tensor | None
_CHECKED_STEPS = 3  # of every hundred, in which edited gradients are compared


@dataclass(frozen=True, slots=True)
class Mark:
    """A gradient as it was left: another tensor, or another version of it, has been written since.

    The reference is weak, because a step that forgets a gradient frees its memory.
    """

    gradient: TensorWeakRef | None
    version: int

    @classmethod
    def of(cls, parameter: torch.Tensor) -> "Mark":
        """The gradient of ``parameter`` as it is now."""
        gradient = parameter.grad
        if gradient is None:
            return cls(None, 0)
        return cls(TensorWeakRef(gradient), version_counter(gradient))

    @classmethod
    def of_another(cls) -> "Mark":
        """The mark of a gradient that no parameter has, which is never current."""
        # That tensor is gone at once, and no gradient is what such a reference leads to.
        return cls(TensorWeakRef(torch.empty(0)), 0)

    def is_current(self, parameter: torch.Tensor) -> bool:
        """Whether nothing was written since."""
        gradient = parameter.grad
        if gradient is None or self.gradient is None:
            return gradient is None and self.gradient is None
        return self.gradient() is gradient and version_counter(gradient) == self.version


class SharedGradients:
    """Sums what backwards add and keeps the gradients of all replicas equal.

    Args:
        replicas: K replicas of N parameters.
        step: Sums gradients, and knows which replica owns which parameter.

    Attributes:
        before_adding: Called with a parameter before a sum is added to its gradient in place.
    """

    def __init__(self, replicas: ReplicaSet, step: TrainingStep) -> None:
        self._replicas = replicas.replicas
        self._root = replicas.root
        self._step = step
        self._stale: set[int] = set()  # replicas that had no rows in the last step
        self._of_root: list[Mark] = []
        self._of_owners: list[Mark] = []
        self._of_speaker: list[Mark] = []
        self._checks = 0
        self.before_adding: Callable[[torch.Tensor], None] | None = None

    def begin(self, active: Sequence[Replica]) -> None:
        """Before a step: replicas get what hooks wrote on the user's module, or on the owners, since the last one."""
        owners = self._step.owner_parameters
        for index, changed in enumerate(self.take_from_hooks()):
            owner = owners[index]
            for replica in active:
                target = replica.parameters[index]
                if target is not owner and (changed or replica.index in self._stale):
                    _give(target, owner.grad)
        self._stale -= {replica.index for replica in active}
        self._remember_edits(active[0])

    def take_from_hooks(self) -> list[bool]:
        """Between steps: owners get the gradients that hooks wrote on the user's module since the last one.

        Returns:
            By parameter, whether its owner's gradient is another one than after the last step.
        """
        owners = self._step.owner_parameters
        if not self._of_owners:
            # Before the first step all gradients that are there count as written since.
            self._of_owners = [Mark(None, 0)] * len(owners)
            self._of_root = self._of_owners
        found: list[bool] = []
        for index, (owner, root) in enumerate(zip(owners, self._root.parameters, strict=True)):
            changed = not self._of_owners[index].is_current(owner)
            # Hooks know the user's module, not the owners: what they wrote there counts
            # as the owner's.
            if not changed and owner is not root and not self._of_root[index].is_current(root):
                _give(owner, root.grad)
                changed = True
            found.append(changed)
        return found

    def end(self, active: Sequence[Replica]) -> None:
        """After a step: what is owned by replicas without rows follows; they themselves do when they get some."""
        self.to_owners(active)
        present = {replica.index for replica in active}
        owners = self._step.owner_parameters
        for replica in self._replicas:
            if replica.index not in present:
                # They get them when they have rows again; until then the memory is free.
                self._stale.add(replica.index)
                for parameter, owner in zip(replica.parameters, owners, strict=True):
                    if parameter is not owner and replica is not self._root:
                        parameter.grad = None
        # Hooks between steps look at the user's module, which may have had no rows in this one.
        if self._root.index not in present:
            for parameter, source in zip(self._root.parameters, active[0].parameters, strict=True):
                _give(parameter, source.grad)
        self._of_owners = [Mark.of(parameter) for parameter in owners]
        self._of_root = [Mark.of(parameter) for parameter in self._root.parameters]

    def leave(self) -> None:
        """Before a step that Lightning optimizes: only owners keep gradients, as it would sum those of all replicas."""
        for replica in self._replicas:
            self._stale.add(replica.index)  # they get them again before the next step by hand
            for parameter, owner in zip(replica.parameters, self._step.owner_parameters, strict=True):
                if parameter is not owner:
                    parameter.grad = None

    def add(self, active: Sequence[Replica], columns: Sequence[Sequence[Gradient] | None], rows: float) -> None:
        """Adds the sum of what a backward of every replica gave to the gradients of all active ones.

        Args:
            active: The replicas of this step.
            columns: By active replica, its N gradients of its part of the loss; ``None`` if it ran no backward.
            rows: Rows of this process's batch.
        """
        totals = self.totals(active, columns, rows)
        # Before the sum is written, which would count as an edit by hand itself.
        edited = self._edited(active[0])
        spent: set[int] = set()  # totals that one replica took as they are; the others copy them
        for replica in active:
            for index, (parameter, total) in enumerate(zip(replica.parameters, totals, strict=True)):
                if total is not None and self.before_adding is not None:
                    self.before_adding(parameter)
                if total is not None and _accumulate(parameter, total, may_take=index not in spent):
                    spent.add(index)
        if not edited:
            self._remember_edits(active[0])

    def totals(
        self, active: Sequence[Replica], columns: Sequence[Sequence[Gradient] | None], rows: float
    ) -> list[Gradient]:
        """By parameter, the sum of the active replicas' gradients, on the device of its owner; see :meth:`add`."""
        pairs = zip(active, columns, strict=True)
        by_replica = {replica.index: column for replica, column in pairs if column is not None}
        nothing: list[Gradient] = [None] * len(self._root.parameters)
        all_columns = [by_replica.get(replica.index, nothing) for replica in self._replicas]
        return self._step.total_gradients(all_columns, rows)

    def to_owners(self, active: Sequence[Replica]) -> None:
        """Owners without rows in this step get the gradients that those with rows have, which are equal."""
        present: set[int] = set()
        for replica in active:
            present.update(map(id, replica.parameters))
        for owner, source in zip(self._step.owner_parameters, active[0].parameters, strict=True):
            if id(owner) not in present and not (owner.grad is None and source.grad is None):
                _give(owner, source.grad)

    def marks(self) -> list[Mark]:
        """The owners' gradients as they are now, for :meth:`follow`."""
        return [Mark.of(parameter) for parameter in self._step.owner_parameters]

    def marks_of_root(self) -> list[Mark]:
        """The gradients of the user's module as they are now, for :meth:`follow_root`."""
        return [Mark.of(parameter) for parameter in self._root.parameters]

    def follow_all(self, active: Sequence[Replica]) -> None:
        """The active replicas get the owners' gradients."""
        # As if all had been written: their versions do not tell.
        written = Mark.of_another()
        self.follow(active, [written] * len(self._root.parameters))

    def follow(self, active: Sequence[Replica], before: Sequence[Mark]) -> None:
        """The active replicas get those of the owners' gradients that were written since ``before``."""
        for index, (mark, owner) in enumerate(zip(before, self._step.owner_parameters, strict=True)):
            if mark.is_current(owner):
                continue
            for replica in active:
                target = replica.parameters[index]
                if target is not owner:
                    _give(target, owner.grad)
        self._remember_edits(active[0])

    def follow_root(self, active: Sequence[Replica], before: Sequence[Mark]) -> None:
        """The active replicas get gradients that hooks wrote on the user's module."""
        owners = self._step.owner_parameters
        marks = self.marks()
        for mark, root, owner in zip(before, self._root.parameters, owners, strict=True):
            if root is not owner and not mark.is_current(root):
                _give(owner, root.grad)
        self.follow(active, marks)

    def check_edits(self, active: Sequence[Replica], names: Sequence[str]) -> None:
        """Gradients that the step wrote by hand must be the same on all replicas, for only one is used.

        Raises:
            WholeBatchError: they differ, so what the step wrote depends on its slice.
        """
        if len(active) < 2 or not self._edited(active[0]):
            return
        self._checks += 1
        # A comparison reads every gradient on every replica and waits for their devices.
        if self._checks % 100 > _CHECKED_STEPS:
            return
        pairs = [_summaries(replica.parameters) for replica in active]
        for name, *found in zip(names, *pairs, strict=True):
            if not all(_close(found[0], other) for other in found[1:]):
                raise WholeBatchError(f"It writes the gradient of {name} by hand, differently on every slice.")

    def _remember_edits(self, speaker: Replica) -> None:
        self._of_speaker = [Mark.of(parameter) for parameter in speaker.parameters]

    def _edited(self, speaker: Replica) -> bool:
        pairs = zip(self._of_speaker, speaker.parameters, strict=True)
        return any(parameter.grad is not None and not mark.is_current(parameter) for mark, parameter in pairs)


@torch.no_grad()
def _give(parameter: torch.Tensor, gradient: Gradient) -> None:
    """A gradient of its own, equal to ``gradient``."""
    parameter.grad = None if gradient is None else gradient.detach().to(parameter.device, copy=True)


@torch.no_grad()
def _accumulate(parameter: torch.Tensor, total: torch.Tensor, *, may_take: bool) -> bool:
    """As autograd does: in place where there is a dense gradient; whether ``total`` itself became the gradient."""
    kept = parameter.grad
    if kept is None:
        takes = may_take and total.device == parameter.device
        parameter.grad = total if takes else total.to(parameter.device, copy=True)
        return takes
    if kept.layout != torch.strided or total.layout != torch.strided:
        parameter.grad = kept + total.to(parameter.device)
    else:
        kept.add_(total.to(parameter.device))
    return False


def _summaries(parameters: Sequence[torch.Tensor]) -> list[tuple[float, float] | None]:
    """Two numbers of every gradient that would differ if it did, or ``None`` where there is none."""
    found: list[tuple[float, float] | None] = []
    for parameter in parameters:
        if parameter.grad is None:
            found.append(None)
            continue
        gradient = parameter.grad.detach()
        dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
        wide = torch.complex128 if dense.is_complex() else torch.float32
        values = dense.to(wide)
        # Of all entries, and of every other one: the first alone would not tell entries
        # that changed places.
        found.append((float(values.abs().sum()), float(values.flatten()[::2].abs().sum())))
    return found


def _close(first: tuple[float, float] | None, second: tuple[float, float] | None) -> bool:
    if first is None or second is None:
        return first is second
    room = 1e-3 * max(first[0], second[0])
    # The difference of two infinities is NaN, which is within no distance.
    finite = all(abs(value) < float("inf") for value in (*first, *second))
    return not finite or all(abs(one - other) <= room for one, other in zip(first, second, strict=True))
