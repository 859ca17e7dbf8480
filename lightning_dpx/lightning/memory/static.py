"""What a training step holds on every device beside its activations."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_dpx.devices import allocated_and_peak, canonical_device, is_host
from lightning_dpx.lightning.memory.auto_shift import states_of
from lightning_dpx.lightning.memory.batch_shapes import arrays_in, bytes_of_tensors
from lightning_dpx.lightning.memory.kept_states import times_kept
from lightning_dpx.lightning.memory.shadow_optimizer import is_of_torch, trained_by
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.replicas import BatchSlice
from lightning_dpx.torch_compat import key_of, stored_parts, tree_leaves


@dataclass(frozen=True, slots=True)
class StaticMemory:
    """Bytes by device; parameters, buffers and gradients are counted on the spot.

    Attributes:
        slices: Of the replicas that take part.
        states: Of the optimizers, still to come.
        snapshot: Of buffers, which a step of several slices keeps as they were before it.
        shown: Of the batch where hooks find it while activations are there, beside what the step itself was given.
        moving: What the reduction of gradients takes beside them, at its peak.
        moves_in_backward: Whether that is while activations are still there.
        accumulates: Whether gradients are added to those of earlier batches, as activations a second time until then.
        keeps_earlier: Whether gradients of earlier batches lie aside while micro-batches add up their own.
        frees_gradients: Whether those of the step before are freed before the forward; then the new ones are counted
            where they come, among the activations.
        attributes: Of tensors on the host that modules hold in attributes, with those of copies.
        idle: Ids of parameters that no step has led a gradient to.
        callbacks: Of the run, which may hold tensors and modules, such as the averaged one.
    """

    slices: Sequence[BatchSlice]
    states: Mapping[torch.device, int] = field(default_factory=dict)
    snapshot: Mapping[torch.device, int] = field(default_factory=dict)
    shown: Mapping[torch.device, int] = field(default_factory=dict)
    moving: Mapping[torch.device, int] = field(default_factory=dict)
    moves_in_backward: bool = False
    accumulates: bool = False
    keeps_earlier: bool = False
    frees_gradients: bool = False
    attributes: int = 0
    idle: Collection[int] = ()
    callbacks: Sequence[Any] = ()

    def beside_activations(self, device: torch.device) -> int:
        """Bytes on ``device`` while a step has activations there."""
        held = self.between_steps(device) + self.passing(device) + self.shown.get(device, 0)
        return held - self.counted_gradients(device)

    def counted_gradients(self, device: torch.device) -> int:
        """Bytes of gradients that come within a step, and are counted with its activations."""
        if not self.frees_gradients:
            return 0
        # What is there now has not been freed, so nothing has shown that it will be. A profile counts those of idle
        # parameters as well, which do not come.
        return sum(p.nbytes for p in self._without_gradient(device))

    def passing(self, device: torch.device) -> int:
        """Bytes that come and go within a step.

        Sums overlap no backward while earlier gradients lie aside, so the larger of both counts.
        """
        return max(self.moving_in_backward(device), self.gradients(device) if self.keeps_earlier else 0)

    def moving_in_backward(self, device: torch.device) -> int:
        """Bytes that the reduction takes beside activations."""
        # A reduction after the backward finds the activations gone; see after_backward.
        return self.moving.get(device, 0) if self.moves_in_backward else 0

    def after_backward(self, device: torch.device) -> int:
        """Bytes on ``device`` at the peak of the reduction, with no activations."""
        return self.between_steps(device) + self.moving.get(device, 0)

    def between_steps(self, device: torch.device) -> int:
        """Bytes on ``device`` all the time: allocated now, or about to be."""
        # Lasting gradients and states are counted before they exist: the second step has
        # them beside its activations.
        coming = self.coming_gradients(device) + self.states.get(device, 0) + self.snapshot.get(device, 0)
        return self.present(device) + coming

    def present(self, device: torch.device) -> int:
        """Bytes on ``device`` now.

        On the host, where memory is not counted, parameters, gradients, buffers, the batch, and what callbacks and
        attributes of modules hold.
        """
        parameters = self._parameters(device)
        # The resident memory of the process holds much that is no tensor, and freed pages as well.
        if is_host(device):  # where memory is not counted
            tensors: list[torch.Tensor] = list(parameters)
            for batch_slice in self.slices:
                tensors += [
                    buffer for buffer in batch_slice.replica.buffers if is_host(canonical_device(buffer.device))
                ]
            # Those of an earlier batch are no coming ones; sparse ones have no storage.
            for parameter in parameters:
                if parameter.grad is not None and parameter.grad.layout is torch.strided:
                    tensors.append(parameter.grad)
            for callback in self.callbacks:
                tensors += _held_by(callback)
            # Replicas on the host share the storage of their parameters: each storage counts once.
            storages = {}
            for tensor in tensors:
                for part in stored_parts(tensor):
                    storage = part.untyped_storage()
                    storages[key_of(storage)] = storage.nbytes()
            return sum(storages.values()) + self._bytes_of_batch() + self.attributes
        return allocated_and_peak(device)[0]

    def gradients(self, device: torch.device) -> int:
        """Bytes of all gradients of the parameters there."""
        return sum(p.nbytes for p in self._parameters(device) if p.requires_grad and id(p) not in self.idle)

    def coming_gradients(self, device: torch.device) -> int:
        """Bytes of the gradients that are not there yet, and are to come."""
        return sum(p.nbytes for p in self._without_gradient(device) if id(p) not in self.idle)

    def _without_gradient(self, device: torch.device) -> list[nn.Parameter]:
        return [p for p in self._parameters(device) if p.requires_grad and p.grad is None]

    def _bytes_of_batch(self) -> int:
        """Of the batch on the host; that of a step on a device is copied there within the step, and counted with it."""
        sizes: dict[tuple[int, int, int], int] = {}
        for batch_slice in self.slices:
            for array in arrays_in(batch_slice.batch):
                # Arrays of NumPy are not the allocator's.
                if not isinstance(array, torch.Tensor) or array.layout is not torch.strided:
                    continue
                # A part of a larger storage: the rest may be the whole data set, which is no part of a step.
                if is_host(array.device):
                    key = key_of(array.untyped_storage()), int(array.storage_offset()), array.nbytes
                    sizes[key] = array.nbytes
        return sum(sizes.values())

    def _parameters(self, device: torch.device) -> list[nn.Parameter]:
        found: dict[int, nn.Parameter] = {}  # each once: micro-batches share theirs
        for batch_slice in self.slices:
            for parameter in batch_slice.replica.parameters:
                if canonical_device(parameter.device) == device:
                    found[id(parameter)] = parameter
        return list(found.values())


def _held_by(holder: Any) -> list[torch.Tensor]:
    """The tensors on the host in attributes of an object, in containers and modules there."""
    # Not in other objects, which may lead anywhere, as to the Trainer and from there to the data.
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # what was met, which is held so that its id stays its own
    waiting = list((own_attributes(holder) or {}).values())
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.Tensor):
            # Others have no storage, or one of another device, or none yet.
            if not is_lazy(node) and node.layout is torch.strided and is_host(node.device):
                found.append(node)
        elif isinstance(node, nn.Module):
            waiting += [*node.parameters(), *node.buffers()]
        elif isinstance(node, dict | list | tuple | deque) and id(node) not in seen:
            seen[id(node)] = node
            waiting += node.values() if isinstance(node, dict) else node
    return found


def bytes_of_states(parameters: Sequence[nn.Parameter], optimizers: Sequence[Any]) -> dict[torch.device, int]:
    """Optimizer state that the owners of ``parameters`` will hold, and that is not counted yet."""
    missing = _missing_states(optimizers)
    # Before there are any optimizers, as many as Adam keeps; what none of them has gets no state.
    default = 0.0 if optimizers else 2.0
    bytes_by_device: dict[torch.device, int] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            device = canonical_device(parameter.device)
            coming = int(missing.get(id(parameter), default) * parameter.nbytes)
            bytes_by_device[device] = bytes_by_device.get(device, 0) + coming
    # State that exists is among what an accelerator's allocator counts; on the host nothing counts it.
    for device in filter(is_host, list(bytes_by_device)):
        bytes_by_device[device] += sum(map(_bytes_of_states_on_host, optimizers))
    return bytes_by_device


def _bytes_of_states_on_host(optimizer: Any) -> int:
    tensors: list[torch.Tensor] = []
    for state in optimizer.state.values():
        tensors += [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor) and is_host(leaf.device)]
    # Sparse ones, such as the momentum of sparse gradients, do not tell, and come to have ever more of their rows.
    present = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if is_of_torch(optimizer):
        return present
    # One of the user's may hold another one, with states of its own: no less than was guessed for it.
    known = [one for one in trained_by(optimizer) if one in optimizer.state and is_host(canonical_device(one.device))]
    return max(present, states_of(optimizer) * sum(parameter.nbytes for parameter in known))


def _missing_states(optimizers: Sequence[Any]) -> dict[int, float]:
    """By its id, how many times a parameter's size its optimizer will keep for it, where it keeps nothing yet.

    Those of a network that is trained in other steps, or that was frozen until now.
    """
    missing: dict[int, float] = {}
    for optimizer in optimizers:
        # L-BFGS keeps what it knows of all parameters with the first, and more of it in every step.
        if optimizer.state and "history_size" in optimizer.defaults:
            parameters = trained_by(optimizer)
            present = sum(bytes_of_tensors(state) for state in optimizer.state.values())
            known = present // max(1, sum(parameter.nbytes for parameter in parameters))
            missing.update({id(parameter): max(0, states_of(optimizer) - known) for parameter in parameters})
            continue
        without = [one for group in optimizer.param_groups for one in group["params"] if one not in optimizer.state]
        if without:
            missing.update(dict.fromkeys(map(id, without), times_kept(optimizer)))
    return missing
