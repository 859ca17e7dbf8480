"""Hooks that a run puts on modules and parameters, or takes off them, in its first forward for instance.

What notes that they are there, such as a flag of the module, is put back after a run that is to leave no trace: then
they have to go as well, or the next forward puts them on once more, and all that they do is done twice.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from lightning_dpx.torch_compat import (
    backward_hooks_of,
    backward_pre_hooks_of,
    forward_hooks_always_called,
    forward_hooks_of,
    forward_hooks_with_kwargs,
    forward_pre_hooks_of,
    forward_pre_hooks_with_kwargs,
    post_accumulate_hooks_of,
)

_Hooks = dict[int, Any]
# By attrgetters: asked for all modules in every step, without a Python frame for each.
OF_MODULES: Sequence[Callable[[nn.Module], _Hooks]] = (
    forward_pre_hooks_of,
    forward_hooks_of,
    backward_pre_hooks_of,
    backward_hooks_of,  # type: ignore[assignment]  # modules have a dict of them, tensors have none at first
)
FLAGS: Sequence[Callable[[nn.Module], dict[int, bool]]] = (
    forward_pre_hooks_with_kwargs,
    forward_hooks_with_kwargs,
    forward_hooks_always_called,
)
_OF_TENSORS = (backward_hooks_of, post_accumulate_hooks_of)


def is_ours(hook: Any) -> bool:
    """Whether this package has put ``hook`` there, and not the user's code."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    kind = hook if owner is None else type(owner)
    return (getattr(kind, "__module__", "") or "").startswith("lightning_dpx.")


def hooks_of_parameter(parameter: torch.Tensor) -> _Hooks:
    """The user's hooks on a parameter, of its gradient and after it, by number: torch numbers both kinds together."""
    found: _Hooks = {}
    for hooks_of in _OF_TENSORS:
        for number, hook in (hooks_of(parameter) or {}).items():
            if not is_ours(hook):
                found[number] = hook
    return found


class HooksOfOthers:
    """The hooks of modules and parameters as they are now, without those of this package, which come and go.

    Args:
        parts: The modules.
        parameters: The parameters.
    """

    def __init__(self, parts: Collection[nn.Module], parameters: Collection[torch.Tensor]) -> None:
        self._modules = []
        for part in parts:
            hooks = [dict(hooks_of(part)) for hooks_of in OF_MODULES]
            flags = [dict(flags_of(part)) for flags_of in FLAGS]
            self._modules.append((part, hooks, flags))
        self._parameters = []
        for parameter in parameters:
            self._parameters.append((parameter, [dict(hooks_of(parameter) or {}) for hooks_of in _OF_TENSORS]))

    def put_back(self, initialized: Collection[int] = ()) -> None:
        """Takes off what was put on since, and puts on what was taken off; but for modules with these ids."""
        for part, hooks, flags in self._modules:
            if id(part) in initialized:  # a lazy module takes its hook off when it has its tensors
                continue
            changed = [_put_back(hooks_of(part), before) for hooks_of, before in zip(OF_MODULES, hooks, strict=True)]
            if any(changed):
                there = {number for hooks_of in OF_MODULES for number in hooks_of(part)}
                for flags_of, noted in zip(FLAGS, flags, strict=True):
                    now = flags_of(part)
                    for number in now.keys() - there:
                        del now[number]
                    now.update(noted)
        for parameter, found in self._parameters:
            for of_tensor, before in zip(_OF_TENSORS, found, strict=True):
                held = of_tensor(parameter)
                if held is not None:
                    _put_back(held, before)


def _put_back(held: _Hooks, before: _Hooks) -> bool:
    """Makes ``held`` what it was before; whether it was anything else."""
    if held.keys() == before.keys():  # a hook that was taken off and put on again has another number
        return False
    wanted = [(number, hook) for number, hook in before.items() if not is_ours(hook)]
    ours = [(number, hook) for number, hook in held.items() if is_ours(hook)]
    if [number for number, _ in wanted] == [number for number, hook in held.items() if not is_ours(hook)]:
        return False
    # Those of this package that stand before all others stay there.
    numbers = list(held)
    first = [(number, hook) for at, (number, hook) in enumerate(ours) if numbers[at] == number]
    held.clear()
    held.update(first)
    held.update(wanted)
    held.update(ours)
    return True
