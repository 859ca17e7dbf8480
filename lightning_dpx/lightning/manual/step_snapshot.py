"""Everything that a step by hand may change, so that the first one of a fit can be taken again in another way.

Whether replicas can share a manual step shows when they take it: some of it cannot be done on slices. Then the step
must never have happened: parameters, buffers, gradients, optimizers, schedulers, random generators and the plain Python
state of the module are put back, in place, before one replica takes it with the whole batch.
"""

import types
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_dpx.devices import is_host
from lightning_dpx.lightning.lightning_api import Logger, Strategy, pl
from lightning_dpx.lightning.manual.shared_gradients import Mark
from lightning_dpx.python_objects.object_contents import (
    bytes_of_array,
    fields_of,
    refill,
    slot_contents,
    slots_of,
    write_bytes,
    write_fields,
)
from lightning_dpx.python_objects.object_graph import MUTABLE, items_of, pairs_of
from lightning_dpx.python_objects.origin import is_library
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.python_objects.preserve import is_generator, put_back, state_of
from lightning_dpx.replicas import GeneratorStates
from lightning_dpx.replicas.shared_iterators import IteratorProxy
from lightning_dpx.torch_compat import buffers_of, version_counter, write_tensor

_OF_FRAMEWORK = frozenset(vars(pl.LightningModule())) | frozenset(vars(nn.Module()))
# These lead to the whole run and to data sets, and none of them is state of a step.
_STOPS = (
    nn.Module, pl.Trainer, Strategy, Logger, DataLoader, Dataset, type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, torch.Generator, IteratorProxy,  # which rewinds itself
)  # fmt: skip


class StepSnapshot:
    """The state before a step.

    Args:
        module: The user's module, with its parameters and buffers.
        others: Objects whose attributes a step changes beside: optimizers, schedulers, a scaler, progress.
        generators: The states of random generators, as they are now.
        parameters: Whether to keep them and their gradients, too.
    """

    def __init__(
        self, module: nn.Module, others: Sequence[Any], generators: GeneratorStates, *, parameters: bool = True
    ) -> None:
        self._generators = generators
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._contents: list[tuple[Any, list[Any]]] = []
        self._arrays: list[tuple[np.ndarray, tuple[Any, ...]]] = []
        self._buffers: list[tuple[nn.Module, list[Any]]] = []
        self._slots: list[tuple[Any, tuple[Any, ...]]] = []
        self._held: list[tuple[Any, Any]] = []  # generators of optimizers and other objects, and their states
        self._seen: dict[int, Any] = {}
        self._modes = _Modes(module, list(module.parameters()))
        for parameter in module.parameters():
            if not parameters:
                # So that an attribute or an optimizer that holds it does not bring it in again.
                self._seen[id(parameter)] = parameter
                continue
            self._keep_tensor(parameter)
            gradient = parameter.grad
            self._gradients.append((parameter, None if gradient is None else gradient.detach().clone()))
        for buffer in module.buffers():
            self._keep_tensor(buffer)
        for child in module.modules():
            self._buffers.append((child, list(buffers_of(child).items())))
            own = {key: value for key, value in vars(child).items() if key not in _OF_FRAMEWORK}
            self._attributes.append((child, own))
            self._keep(own.values())
        self._keep(others)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back, in place: other references to one of the objects see it as it was."""
        # First what a module has registered in a step goes, and what it has put another tensor in place of comes back.
        for child, buffers in self._buffers:
            refill(buffers_of(child), buffers)
        for tensor, value in self._tensors:
            if tensor.shape == value.shape:
                write_tensor(tensor, value)
        self._modes.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for child, own in self._attributes:
            # An attribute that the failed step has added must go, or its second run would find it.
            for key in [key for key in vars(child) if key not in _OF_FRAMEWORK and key not in own]:
                del vars(child)[key]
            vars(child).update(own)
        for array, values in self._arrays:
            write_bytes(array, values)
        for value, fields in self._slots:
            write_fields(value, fields)
        for container, content in self._contents:
            refill(container, content)
        self._generators.restore()
        for generator, state in self._held:
            put_back(generator, state)

    def _keep(self, values: Iterable[Any]) -> None:
        """Notes what can be changed in place, and in everything that it holds."""
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if id(value) in self._seen:
                continue
            if is_generator(value):
                self._seen[id(value)] = value
                self._held.append((value, state_of(value)))
            elif isinstance(value, _STOPS):
                continue
            elif isinstance(value, torch.Tensor):
                self._keep_tensor(value)
            elif isinstance(value, np.ndarray):
                self._seen[id(value)] = value
                self._arrays.append((value, bytes_of_array(value)))
            elif isinstance(value, (tuple, *MUTABLE)):
                self._keep_content(value)
                waiting.extend(items_of(value))
                waiting.extend([key for key, _ in pairs_of(value)] if isinstance(value, dict) else ())
                waiting.extend(self._kept_fields(value))
            else:
                waiting.extend(self._kept_fields(value))

    def _kept_fields(self, value: Any) -> list[Any]:
        """What an object holds beside items: in slots, and in its attributes, which a class of containers may have."""
        found: list[Any] = []
        # Members of classes that are written in C look the same, and some of them cannot be set.
        has_slots = any("__slots__" in vars(kind) for kind in type(value).__mro__)
        slots = slots_of(value) if has_slots else ()
        own = own_attributes(value)
        if slots or own is not None:
            self._seen[id(value)] = value
        if slots:
            self._slots.append((value, fields_of(value)))
            found += [content for _, content in slot_contents(value)]
        if own is not None:
            # They are a dict, which is kept and refilled like any other.
            found.append(own)
        return found

    def _keep_content(self, container: Any) -> None:
        self._seen[id(container)] = container
        if not isinstance(container, tuple):
            content = pairs_of(container) if isinstance(container, dict) else items_of(container)
            self._contents.append((container, content))

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        """A copy on the host, where there is room beside what the step takes."""
        # One without numbers, of the meta device, has nothing to copy.
        if id(tensor) in self._seen or tensor.is_meta:
            return
        self._seen[id(tensor)] = tensor
        value = tensor.detach()
        copied = value.clone() if is_host(value.device) else value.to("cpu")
        self._tensors.append((tensor, copied))


class _Modes:
    """Which parameters are trained, and which modules are in training."""

    def __init__(self, module: nn.Module, parameters: Sequence[torch.Tensor]) -> None:
        self._trained = [(parameter, parameter.requires_grad) for parameter in parameters]
        self._training = [(child, child.training) for child in module.modules()]

    def restore(self) -> None:
        # A step that ends between toggle_optimizer and untoggle_optimizer leaves parameters of the others frozen.
        for parameter, is_trained in self._trained:
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)
        for child, is_training in self._training:
            child.training = is_training


class StepStart:
    """What can be noted of every step at next to no cost: enough to begin it anew before an optimizer has acted.

    Gradients are noted weakly: one that the step forgets (``zero_grad``) is gone, and is forgotten by the step that is
    begun anew as well. One that a backward adds to is copied before, if :meth:`before_adding` is called; else the step
    cannot be begun anew.

    Args:
        module: The user's module.
        parameters: Those whose gradients count.
        generators: The states of random generators, as they are now.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[torch.Tensor], generators: GeneratorStates) -> None:
        self._generators = generators
        self._parameters = parameters
        self._modes = _Modes(module, parameters)
        self._marks = {id(parameter): Mark.of(parameter) for parameter in parameters}
        self._copies: dict[int, torch.Tensor] = {}  # by parameter
        # What libraries keep in their modules no step of the user's counts.
        own = [child for child in module.modules() if not is_library(type(child))]
        self._attributes = [(child, _attributes_of(child)) for child in own]

    def before_adding(self, parameter: torch.Tensor) -> None:
        """A backward is about to add to the gradient of ``parameter`` in place."""
        gradient = parameter.grad
        mark = self._marks.get(id(parameter))
        # Another tensor, or another version, is what the step itself has made of it.
        if gradient is not None and mark is not None and mark.is_current(parameter):
            self._copies.setdefault(id(parameter), gradient.detach().clone())

    @torch.no_grad()
    def restore(self) -> bool:
        """Puts back what was noted; says whether that is all that the step can have changed."""
        noted: list[torch.Tensor | None] = []
        written: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in self._parameters:
            mark = self._marks[id(parameter)]
            gradient = None if mark.gradient is None else mark.gradient()
            noted.append(gradient)
            if gradient is not None and version_counter(gradient) != mark.version:
                copied = self._copies.get(id(parameter))
                # Nothing is written before all were looked at: a step that cannot be put back whole is left as it is.
                if copied is None:
                    return False
                written.append((gradient, copied))
        self._modes.restore()
        for gradient, copied in written:
            gradient.copy_(copied)
        for parameter, gradient in zip(self._parameters, noted, strict=True):
            parameter.grad = gradient
        for child, before in self._attributes:
            attributes = vars(child)
            for key in _attributes_of(child).keys() - before.keys():
                del attributes[key]
            attributes.update(before)
        self._generators.restore()
        return True


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _OF_FRAMEWORK}
