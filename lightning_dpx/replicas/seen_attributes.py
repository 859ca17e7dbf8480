"""The attributes of the user's module as its replicas have last got them: what was set or deleted since, and by whom.

before a step   take_changes()   what hooks and the last step have set: replicas get it
after a step    note_rebound()   what the step itself has set
                put_back()       instead, where the step will run again
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_dpx.python_objects.object_contents import OF_EVERY_MODULE
from lightning_dpx.replicas.attribute_watch import AttributeWatch
from lightning_dpx.replicas.seen_values import SeenTensor, is_still, remembered
from lightning_dpx.replicas.tensors_before import TensorsBefore

_NO_TENSORS = TensorsBefore(())


@dataclass(frozen=True, slots=True)
class AttributeChanges:
    """What has become of the attributes of one submodule.

    Attributes:
        index: Of the submodule.
        new: Attributes that were set, with their values.
        deleted: Names of those that are gone.
    """

    index: int
    new: dict[str, Any]
    deleted: set[str]


class SeenAttributes:
    """What the submodules of the user's module held when the replicas last got it.

    Args:
        modules: The submodules.
        private: Names of attributes that belong to the framework.
    """

    def __init__(self, modules: Sequence[nn.Module], private: frozenset[str]) -> None:
        self._private = private
        self._modules = modules
        self._watch = _watch(modules)
        self._seen = [remembered(self.of(index)) for index in range(len(modules))]
        self._have_tensors = {index for index, seen in enumerate(self._seen) if _has_tensor(seen)}
        self._rebound: set[tuple[int, str]] = set()  # by the step that has just ended
        self._tensors = _NO_TENSORS  # of the step that is under way, where it may run again

    def follow(self, modules: Sequence[nn.Module]) -> None:
        """The module has other submodules of the same kinds from here on."""
        self._modules = modules
        self._watch = _watch(modules)

    def of(self, index: int) -> dict[str, Any]:
        """The attributes of a submodule, as they are now."""
        return {key: value for key, value in vars(self._modules[index]).items() if key not in self._private}

    def begin(self) -> None:
        """A step begins: what an earlier one began with, and could have been given back, is no longer held."""
        self._tensors = _NO_TENSORS

    def take_changes(self) -> Iterator[AttributeChanges]:
        """What was set or deleted since the last time: once given out, it has been seen."""
        for index in self._watch.suspects():
            seen = self._seen[index]
            now = self.of(index)
            self._watch.note(index)
            # A module with a tensor is looked at in every step, and mostly is as it was.
            if len(seen) == len(now) and all(map(is_still, seen.values(), now.values())) and seen.keys() == now.keys():
                continue
            yield AttributeChanges(index, _changed(seen, now), seen.keys() - now.keys())
            # Only now: where the replicas could not get it, they have not got it.
            self._seen[index] = remembered(now)
            self._have_tensors.discard(index)
            if _has_tensor(self._seen[index]):
                self._have_tensors.add(index)

    def note_rebound(self) -> None:
        """A step has ended: what is set now and was not before, it has set itself."""
        for index in self._watch.suspects():
            self._rebound.update((index, key) for key in _changed(self._seen[index], self.of(index)))

    def is_rebound(self, index: int, key: str) -> bool:
        """Whether the last step has set this attribute."""
        return (index, key) in self._rebound

    def forget_rebound(self) -> None:
        """The replicas have what the last step has set."""
        self._rebound.clear()

    def hold_tensors(self) -> None:
        """A step begins that may run again: :meth:`put_back` gives attributes their tensors."""
        # Most modules have none outside of parameters and buffers, and then nothing is done in every step.
        self._tensors = TensorsBefore((vars(self._modules[index]), self._seen[index]) for index in self._have_tensors)

    @property
    def tensors_are_lost(self) -> bool:
        """Whether one of the held tensors has changed that cannot be put back."""
        return self._tensors.are_lost

    def put_back(self) -> None:
        """What a step has set is what it was before; of tensors, those that were held."""
        for index in self._watch.suspects():
            seen = self._seen[index]
            state = vars(self._modules[index])
            # What was deleted stays so: a step that runs again deletes it again.
            for key in _changed(seen, self.of(index)):
                if key not in seen:
                    del state[key]
                elif not isinstance(seen[key], SeenTensor):
                    state[key] = seen[key]
        self._tensors.put_back()


def _watch(modules: Sequence[nn.Module]) -> AttributeWatch:
    # What a step leaves on the user's own module may have a graph, which is not kept alive.
    return AttributeWatch(modules, private=OF_EVERY_MODULE)


def _changed(seen: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in now.items() if key not in seen or not is_still(seen[key], value)}


def _has_tensor(seen: dict[str, Any]) -> bool:
    return any(isinstance(value, SeenTensor) for value in seen.values())
