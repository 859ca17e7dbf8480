"""One copy of a module, tried again until all that cannot be copied is shared, or is named."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_dpx.devices import device_beside
from lightning_dpx.errors import ReplicationError, describe_error
from lightning_dpx.python_objects.object_graph import ObjectGraph, is_module_or_parameter
from lightning_dpx.replicas.copying.copy_memo import prepare_memo
from lightning_dpx.replicas.copying.module_shells import can_be_a_shell
from lightning_dpx.replicas.copying.own_parameters import copied_values, like_parameter
from lightning_dpx.replicas.copying.shared_objects import Memo, is_shared, modules_without

_STRUCTURE = ("_parameters", "_buffers", "_modules")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class ModuleCopy:
    """One copy of ``module``.

    Args:
        module: What is copied.
        device: Where the copy's tensors live; ``None`` leaves every tensor on its device.
        keep: Objects that the copy holds by reference.
        parameters: The copy's parameters, by the id of the original.
        private: Types of submodules whose state is copied whole, and not only what leads to tensors and modules.
        staying: Those of the copy's parameters that stay where they are.

    Attributes:
        hidden: Pairs of tensors in containers, objects and what modules those hold: the original's, and the copy's.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | None,
        keep: Sequence[object],
        parameters: Mapping[int, nn.Parameter],
        private: tuple[type, ...] = (),
        staying: Iterable[nn.Parameter] = (),
    ) -> None:
        self._module = module
        self._device = device
        # The device of the original, which tells what the user has put on the host on purpose.
        self._home = next((tensor.device for tensor in chain(module.parameters(), module.buffers())), None)
        self._private = private
        self._staying = {id(parameter) for parameter in staying}
        self._kept: Memo = {id(kept): kept for kept in keep}
        self._tensors: Memo = dict(parameters)
        self.hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        for child in modules_without(module, self._kept):
            for buffer in child.buffers(recurse=False):
                self._tensors[id(buffer)] = copied_values(buffer, device)

    def make(self) -> nn.Module:
        """The copy.

        Raises:
            ReplicationError: something that must be copied cannot be; names the attribute.
        """
        # Each round finds one more object that cannot be copied, which a copy tells by failing only; in the next round
        # all replicas share it, unless it leads to the module.
        while True:
            try:
                # Also in an evaluation: what a class makes anew as it copies itself is written to later, and watched
                # for that, as inference tensors cannot be.
                with torch.inference_mode(False):
                    return self._attempt()
            except Exception as error:
                path, value = self._uncopyable()
                # A shadow must leave no trace, so it shares nothing that it cannot copy. What leads
                # to the module would lead every replica to the user's own.
                if nn.Module in self._private or id(value) in self._kept or self._holds_module(value):
                    where = "" if self._device is None else f" to {self._device}"
                    text = f"The module cannot be copied{where}: {_blamed(path, value is self._module, error)}"
                    raise ReplicationError(text) from error
                self._kept[id(value)] = value  # a file, an iterator, a C handle: there is one of it

    def _attempt(self) -> nn.Module:
        self.hidden = []
        # A new one in every round: what a failed attempt has made in its memo is half-finished.
        memo = {**self._kept, **self._tensors}
        shared: list[Any] = []
        private: list[Any] = []
        for child in modules_without(self._module, self._kept):
            # What is no shell is copied by its own __deepcopy__ or constructor, which knows of no
            # sharing.
            is_private = isinstance(child, self._private) or not can_be_a_shell(child)
            (private if is_private else shared).extend(attribute_values(child))
        # Those of subclasses were copied together with them.
        attributed = [parameter for parameter in self._module.parameters() if _has_attributes(parameter)]
        for parameter in attributed:
            (private if nn.Module in self._private else shared).extend(vars(parameter).values())
        placed = prepare_memo(
            memo, shared, private, place=self._placed, is_boundary=self._is_boundary, module=self._module
        )
        self.hidden = [(tensor, memo[id(tensor)]) for tensor in placed]
        made: nn.Module = copy.deepcopy(self._module, memo)
        for parameter in attributed:
            copied = memo.get(id(parameter))
            # Given ones are another replica's, which has seen to theirs.
            if copied is not None and copied is not parameter and id(copied) not in self._staying:
                vars(copied).update(copy.deepcopy(vars(parameter), memo))
        if self._device is None:
            _go_to_originals(self._module, made)
        else:
            given = [(parameter, parameter.data) for parameter in made.parameters() if id(parameter) in self._staying]
            # Given parameters may lie elsewhere, as those of a shifted part do, and stay there:
            # to() finds them empty, and gives them no other memory than that.
            for parameter, _ in given:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)
            made.to(self._device)  # states of metrics, and the device that a LightningModule remembers
            for parameter, values in given:
                parameter.data = values
        return made

    def _is_boundary(self, value: Any) -> bool:
        return is_shared(value, self._kept)

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        device = self._device
        if device is not None and self._home is not None:
            device = device_beside(tensor, self._home, device)
        copied = copied_values(tensor, device)
        if isinstance(tensor, nn.Parameter):
            return like_parameter(tensor, copied)
        return copied

    def _uncopyable(self) -> tuple[str, Any]:
        """The path and value of the first attribute that cannot be copied; the module itself if each alone can."""
        # By reference, so that an attribute that leads to the module fails for what it is itself.
        modules = {id(child): child for child in self._module.modules()}
        for path, child in self._module.named_modules():
            for key, value in list(vars(child).items()):
                if key in _STRUCTURE:
                    continue
                memo = {**self._kept, **self._tensors, **modules}
                whole = [value] if isinstance(child, self._private) else []
                try:
                    stops = self._is_boundary
                    prepare_memo(memo, [value], whole, place=self._placed, is_boundary=stops)
                    copy.deepcopy(value, memo)
                except Exception:  # noqa: BLE001  the probe asks which attribute fails, not why
                    return f"{path}.{key}".lstrip("."), value
        return type(self._module).__name__, self._module

    def _holds_module(self, value: Any) -> bool:
        graph = ObjectGraph(is_module_or_parameter, self._is_boundary)
        graph.walk([value])
        return id(value) in graph.leading()


def _go_to_originals(module: nn.Module, made: nn.Module) -> None:
    """Parameters of a copy go to the devices of the originals: classes that copy themselves make them on the host."""
    copies = dict(made.named_parameters())
    for name, parameter in module.named_parameters():
        copied = copies.get(name)
        if copied is not None and copied.device != parameter.device:
            copied.data = copied.data.to(parameter.device)


def _has_attributes(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and bool(vars(parameter))


def attribute_values(child: nn.Module) -> Iterator[Any]:
    """The plain attributes of a submodule, and what its hooks are; the dicts of hooks are each module's own."""
    for key, value in list(vars(child).items()):
        if key in _OF_EVERY_MODULE:
            # Hooks may capture the module. Parameters, buffers and submodules have their
            # counterparts.
            if key not in _STRUCTURE and isinstance(value, dict):
                yield from value.values()
        else:
            yield value


def _blamed(path: str, is_all: bool, error: Exception) -> str:
    """What fails and what to do about it, of an attribute or of a module as a whole."""
    if is_all:
        return f"{path} fails with {describe_error(error)}. copy.deepcopy has to work on it, and on all of its parts."
    return (
        f"attribute {path!r} fails with {describe_error(error)}. Remove the attribute before fit, or create it lazily "
        "inside the step."
    )
