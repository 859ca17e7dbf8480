"""Hooks of parameters that step an optimizer as soon as a gradient is there, to hold one gradient at a time.

Every replica would step, with the gradient of its slice. So a training step of such a module gets its batches whole.
The recipe: PyTorch tutorials, "How to save memory by fusing the optimizer step into the backward pass".
"""

from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dpx.lightning.lightning_api import Strategy, Trainer
from lightning_dpx.python_objects.module_hooks import is_ours
from lightning_dpx.python_objects.object_graph import ObjectGraph
from lightning_dpx.torch_compat import post_accumulate_hooks_of


class SteppingHooks:
    """Looks for them whenever a hook was registered since, which is usually never."""

    def __init__(self) -> None:
        self._next = -1
        self._found: nn.Parameter | None = None

    def find(self, parameters: Iterable[nn.Parameter]) -> nn.Parameter | None:
        """The first of these with such a hook; ``None`` if none has one."""
        if RemovableHandle.next_id != self._next:  # torch numbers all hooks of the process
            self._next = RemovableHandle.next_id
            self._found = next((one for one in parameters if any(map(_steps, _hooks_of(one)))), None)
        return self._found


def reason_and_advice(parameter: nn.Parameter, module: nn.Module) -> tuple[str, str]:
    """Why a training step of a module with such a parameter gets its batches whole, and what to do about it."""
    name = next(name for name, one in module.named_parameters() if one is parameter)
    return (
        f"A hook of parameter {name} leads to an optimizer, which would step once for every slice.",
        "For all devices to take part, step in configure_optimizers' own optimizers.",
    )


def _hooks_of(parameter: nn.Parameter) -> Iterator[Any]:
    held: dict[int, Any] = post_accumulate_hooks_of(parameter) or {}
    return (hook for hook in held.values() if not is_ours(hook))


def _steps(hook: Any) -> bool:
    # Not through a Trainer or a strategy: every module leads to its optimizers by those.
    graph = ObjectGraph(lambda value: isinstance(value, Optimizer), lambda value: isinstance(value, Trainer | Strategy))
    graph.walk([hook, *_named_by(hook)])
    return bool(graph.leading())


def _named_by(hook: Any) -> Iterable[Any]:
    """What a function names of its file's globals."""
    function = hook.__func__ if isinstance(hook, MethodType) else hook
    if not isinstance(function, FunctionType):
        return ()
    spaces = function.__globals__
    return [spaces[name] for name in function.__code__.co_names if name in spaces]
