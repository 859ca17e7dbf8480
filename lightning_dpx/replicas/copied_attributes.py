"""The attributes of a replica other than the first: what a step rebinds there is undone, the first replica's counts."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from lightning_dpx.python_objects.object_contents import OF_EVERY_MODULE
from lightning_dpx.replicas.attribute_watch import AttributeWatch

_MISSING = object()


class TellNumbers(Protocol):
    """Is told of attributes that a step has rebound, before they are overwritten."""

    def __call__(self, index: int, expected: Mapping[str, Any], now: Mapping[str, Any], /) -> None:
        """Attributes of a submodule as they are meant to be, and as they are."""


class CopiedAttributes:
    """What the submodules of one replica are meant to hold.

    Args:
        modules: The submodules; they hold it now.
        private: Names of attributes that belong to the framework.
        tell: Is told of what is overwritten.
    """

    def __init__(self, modules: Sequence[nn.Module], private: frozenset[str], tell: TellNumbers) -> None:
        self._modules = modules
        self._private = private
        self._tell = tell
        # A graph that hangs here ends with the step, when the attribute is restored.
        self._watch = AttributeWatch(modules, keeps_tensors=True, private=OF_EVERY_MODULE)
        self._expected: list[dict[str, Any]] = []
        for child in modules:
            self._expected.append({key: value for key, value in vars(child).items() if key not in private})

    def set(self, index: int, key: str, value: Any) -> None:
        """A submodule gets an attribute, and is meant to hold it."""
        state = vars(self._modules[index])
        expected = self._expected[index]
        # A number that the replica has made of it in the last step would be overwritten unseen.
        if key in state:
            self._tell(index, expected, {key: state[key]})
        state[key] = value
        expected[key] = value

    def delete(self, index: int, key: str) -> None:
        """A submodule is to have no such attribute any more."""
        vars(self._modules[index]).pop(key, None)
        self._expected[index].pop(key, None)

    def restore(self) -> None:
        """Undoes what a step has rebound."""
        for index in self._watch.suspects():
            child = self._modules[index]
            expected = self._expected[index]
            state = vars(child)
            # All that was expected is there, and by its number nothing else beside what is private.
            is_as_expected = all(state.get(key, _MISSING) is value for key, value in expected.items())
            if is_as_expected and len(state) - len(expected) == self._num_private(child):
                self._watch.note(index)
                continue
            self._tell(index, expected, {key: state.get(key) for key in expected})
            for key in [key for key in state if key not in self._private and key not in expected]:
                del state[key]
            state.update(expected)

    def _num_private(self, child: nn.Module) -> int:
        return len(self._private & vars(child).keys())
