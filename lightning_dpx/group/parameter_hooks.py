"""The user's hooks on parameters, called as one device calls them: once in a backward, with the sum over all rows.

A replica has the gradient of its slice, and what a hook makes of a part (a bound, a norm) is not a part of what it
makes of the whole.

    held back --> backward of each replica --> sum --> a backward from the parameters alone, which calls the hooks
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_dpx.python_objects.module_hooks import hooks_of_parameter, is_ours
from lightning_dpx.replicas import Replica
from lightning_dpx.torch_compat import backward_hooks_of, post_accumulate_hooks_of

_Held = tuple[MutableMapping[int, Any], dict[int, Any]]  # a dict of hooks, and what was taken from it


class ParameterHookCalls:
    """The hooks of one backward.

    Args:
        replicas: All of them, the user's module first; the others have copies of its hooks.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        # One replica has all rows, and autograd calls its hooks at the right moment.
        self._replicas = replicas if len(replicas) > 1 else ()
        self._held: dict[int, _Held] = {}

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """A backward in which autograd calls none of them."""
        try:
            for replica in self._replicas:
                self.hold(replica)
            yield
        finally:
            _give_back(self._held)

    def hold(self, replica: Replica) -> None:
        """Once more before a replica's backward: its forward may have put hooks on its parameters since."""
        if self._replicas:
            _take(self._held, replica.parameters, _is_users)

    def are_on(self, parameter: nn.Parameter) -> bool:
        """Whether ``parameter`` of the user's module has hooks that are to be called with the sum."""
        return bool(self._replicas) and bool(hooks_of_parameter(parameter))

    def accumulate(self, sums: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Adds the sums to the gradients of these parameters, as autograd does it, with all of their hooks."""
        # Those of a plan or a shift have had the backward of each replica.
        ours: dict[int, _Held] = {}
        _take(ours, list(sums), is_ours)
        try:
            # In a backward, and in one for all, as hooks ask for that: a hook of several gradients, a final callback.
            torch.autograd.backward(list(sums), list(sums.values()))
        finally:
            _give_back(ours)


def _is_users(hook: Any) -> bool:
    return not is_ours(hook)


def _take(held: dict[int, _Held], parameters: Sequence[nn.Parameter], wanted: Callable[[Any], bool]) -> None:
    """Takes hooks off; what micro-batches of one device share is met again, without those that are taken."""
    for parameter in parameters:
        for hooks in (backward_hooks_of(parameter), post_accumulate_hooks_of(parameter)):
            if not hooks:
                continue
            _, taken = held.setdefault(id(hooks), (hooks, {}))
            for number in [number for number, hook in hooks.items() if wanted(hook)]:
                # In place, as autograd holds the dict itself.
                taken[number] = hooks.pop(number)


def _give_back(held: dict[int, _Held]) -> None:
    for hooks, taken in held.values():
        # Torch counts all hooks, so that by number they are in the order in which they were put on.
        in_order = sorted({**taken, **hooks}.items(), key=lambda item: item[0])
        hooks.clear()
        hooks.update(in_order)
    held.clear()
