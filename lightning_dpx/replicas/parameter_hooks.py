"""Notices that the user's code has put hooks on parameters, or has taken them off, since replicas were made."""

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
Keys = list[tuple[int, ...]]


class ParameterHooks:
    """The hooks of the user's on some parameters, as they are now.

    Args:
        parameters: Those of the first replica; the others have copies of them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._keys = self._keys_now()
        self._hooks = self._hooks_now()

    def changed(self) -> int | None:
        """The place of the first parameter that has other hooks now; ``None`` if none has."""
        keys = self._keys_now()
        if keys == self._keys:  # torch numbers hooks, and never twice
            return None
        self._keys = keys
        now = self._hooks_now()
        different = [index for index in {**self._hooks, **now} if self._hooks.get(index) != now.get(index)]
        return min(different, default=None)

    def _keys_now(self) -> Keys:
        """Cheap, and with our own hooks among them, which come and go as well."""
        found: Keys = []
        for parameter in self._parameters:
            of_gradient, after_it = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            if of_gradient or after_it:
                found.append((*(of_gradient or ()), -1, *(after_it or ())))
            else:
                found.append(())
        return found

    def _hooks_now(self) -> dict[int, tuple[int, ...]]:
        """By place, the numbers of the user's hooks."""
        found: dict[int, tuple[int, ...]] = {}
        for index, parameter in enumerate(self._parameters):
            held = [getattr(parameter, kind) or {} for kind in _KINDS]
            own = tuple(number for hooks in held for number, hook in hooks.items() if not _is_ours(hook))
            if own:
                found[index] = own
        return found


def _is_ours(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    kind = hook if owner is None else type(owner)
    return (getattr(kind, "__module__", "") or "").startswith("lightning_dpx.")
