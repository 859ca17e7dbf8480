"""Names for what a step saves: the module call that is running, and a number."""

import threading
from typing import Any

import torch
from torch import nn


class CallNames:
    """Which module call is running: hooks that stay on the modules and cost two list operations a call.

    Args:
        module: The root; its own name is empty.
    """

    def __init__(self, module: nn.Module) -> None:
        self._local = threading.local()
        self._handles = []
        for path, child in module.named_modules():
            if child is not module and not isinstance(child, torch.jit.ScriptModule):
                enter = _Enter(self, path)
                self._handles.append(child.register_forward_pre_hook(enter, prepend=True))
                self._handles.append(child.register_forward_hook(enter.leave, always_call=True))

    def begin(self) -> None:
        """A new step of this thread."""
        self._local.stack, self._local.calls = [["", 0]], {}

    @property
    def stack(self) -> list[list[Any]] | None:
        """Name and number of values so far of the running calls, innermost last; ``None`` outside of a step."""
        stack: list[list[Any]] | None = getattr(self._local, "stack", None)
        return stack

    @property
    def calls(self) -> dict[str, int]:
        """Calls so far, by path."""
        calls: dict[str, int] = self._local.calls
        return calls

    def end(self) -> None:
        """The step is over."""
        self._local.stack = None

    def next_name(self) -> str:
        """The next value of the running call."""
        stack = self.stack
        assert stack is not None, "begin() comes first"
        call = stack[-1]
        call[1] += 1
        return f"{call[0]}:{call[1]}"

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()


class _Enter:
    """The hooks of one module; copies of the module, by deepcopy or pickle, get some that do nothing."""

    def __init__(self, names: CallNames | None, path: str) -> None:
        self._names, self._path = names, path

    def __reduce__(self) -> tuple[Any, ...]:
        return _Enter, (None, self._path)

    def __call__(self, _module: nn.Module, _inputs: Any) -> None:
        stack = self._names.stack if self._names is not None else None
        if self._names is not None and stack is not None:
            calls = self._names.calls
            calls[self._path] = number = calls.get(self._path, 0) + 1
            stack.append([self._path if number == 1 else f"{self._path}#{number}", 0])

    def leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        stack = self._names.stack if self._names is not None else None
        if stack is not None and len(stack) > 1:
            stack.pop()
