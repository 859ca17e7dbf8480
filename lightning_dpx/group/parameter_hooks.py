"""The user's hooks on parameters, called as one device calls them: once in a backward, with the sum over all rows.

A replica has the gradient of its slice, and what a hook makes of a part (a bound, a norm) is not a part of what it
makes of the whole.

    held back --> backward of each replica --> sum --> hooks of gradients --> accumulated --> hooks after that
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_dpx.python_objects.module_hooks import is_ours
from lightning_dpx.replicas import Replica
from lightning_dpx.torch_compat import backward_hooks_of, post_accumulate_hooks_of

_Hooks = dict[nn.Parameter, list[Callable[..., Any]]]


class ParameterHookCalls:
    """The hooks of one backward.

    Args:
        replicas: All of them, the user's module first; the others have copies of its hooks.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        # One replica has all rows, and autograd calls its hooks at the right moment.
        self._replicas = replicas if len(replicas) > 1 else ()
        self._of_gradients: _Hooks = {}
        self._after: _Hooks = {}
        for replica in self._replicas[:1]:
            for parameter in replica.parameters:
                self._of_gradients[parameter] = list(_users_own(backward_hooks_of(parameter)).values())
                self._after[parameter] = list(_users_own(post_accumulate_hooks_of(parameter)).values())

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """A backward in which autograd calls none of them."""
        taken: list[tuple[MutableMapping[int, Any], dict[int, Any]]] = []
        for replica in self._replicas:
            for parameter in replica.parameters:
                for hooks in (backward_hooks_of(parameter), post_accumulate_hooks_of(parameter)):
                    if hooks:
                        taken.append((hooks, dict(hooks)))
                        # In place, as autograd holds the dict itself.
                        for number in _users_own(hooks):
                            del hooks[number]
        try:
            yield
        finally:
            # Micro-batches of one device have the same parameters, of which the first look saw all hooks.
            for hooks, before in reversed(taken):
                hooks.clear()
                hooks.update(before)

    @torch.no_grad()
    def change_gradients(self) -> None:
        """Calls the hooks of gradients with the sums, which become what they return."""
        for parameter, hooks in self._of_gradients.items():
            for hook in hooks:
                # A parameter that no row has used gets no gradient, and its hooks are not called.
                if parameter.grad is not None:
                    changed = hook(parameter.grad)
                    parameter.grad = parameter.grad if changed is None else changed

    @torch.no_grad()
    def call_after(self) -> None:
        """Calls the hooks that follow once a gradient is accumulated."""
        for parameter, hooks in self._after.items():
            for hook in hooks:
                if parameter.grad is not None:
                    hook(parameter)


def _users_own(hooks: "MutableMapping[int, Any] | None") -> dict[int, Any]:
    """By number, without those of a plan or a shift."""
    return {number: hook for number, hook in (hooks or {}).items() if not is_ours(hook)}
