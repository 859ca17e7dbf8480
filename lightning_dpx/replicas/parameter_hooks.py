"""Notices that the user's code has put hooks on parameters, or has taken them off, since replicas were made."""

from collections.abc import Sequence

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_dpx.python_objects.module_hooks import hooks_of_parameter


class ParameterHooks:
    """The hooks of the user's on some parameters, as they are now.

    Args:
        parameters: Those of the first replica; the others have copies of them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._next = RemovableHandle.next_id
        self._hooks = self._hooks_now()

    @property
    def are_there(self) -> bool:
        """Whether there were any then."""
        return bool(self._hooks)

    def changed(self) -> int | None:
        """The place of the first parameter that has other hooks now; ``None`` if none has."""
        if RemovableHandle.next_id == self._next and not self._hooks:  # torch numbers all hooks of the process
            return None
        now = self._hooks_now()
        different = [index for index in {**self._hooks, **now} if self._hooks.get(index) != now.get(index)]
        if not different:  # else the next caller must hear of it, too
            self._next = RemovableHandle.next_id
        return min(different, default=None)

    def added(self) -> int | None:
        """The place of the first parameter with a hook that it did not have then; ``None`` if none has one."""
        if RemovableHandle.next_id == self._next:  # torch numbers all hooks of the process, so none is new
            return None
        now = self._hooks_now()
        more = [index for index, numbers in now.items() if not set(numbers) <= set(self._hooks.get(index, ()))]
        if not more:
            self._next = RemovableHandle.next_id
        return min(more, default=None)

    def _hooks_now(self) -> dict[int, tuple[int, ...]]:
        """The numbers of the user's hooks, by the place of their parameter."""
        found: dict[int, tuple[int, ...]] = {}
        for index, parameter in enumerate(self._parameters):
            own = hooks_of_parameter(parameter)
            if own:
                found[index] = tuple(own)
        return found
