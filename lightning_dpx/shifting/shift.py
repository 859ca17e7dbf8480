"""Chosen module calls, with their operators, parameters and what they keep for backward, run on another device.

Labels are propagated as in Caffe2's ShiftActivationDevices: what is chosen runs on the target, everything else where it
was, and an operator that gets tensors of both devices runs where its output belongs. In PyTorch the running module call
tells where that is, so the labels need no graph: a stack of chosen calls, and a function mode that brings the operands
of every operator to the device on top of the stack. A tensor is copied to a device once per step, however many
operators use it there; autograd brings its gradient back once.
"""

import sys
import threading
import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_dpx.devices import canonical_device, free_bytes
from lightning_dpx.errors import ConfigurationError, UnsupportedError
from lightning_dpx.shifting.choose import has_ancestor
from lightning_dpx.shifting.copies import Lent
from lightning_dpx.shifting.device_mode import DeviceMode, inside_step
from lightning_dpx.shifting.hooks import copied_part, remove_hooks_of
from lightning_dpx.torch_compat import buffers_of, current_function_mode, parameters_of

# Of all shifted modules. By identity: a metric has a hash of its own, of states that its copy does not have yet.
SHIFTS: "MutableMapping[nn.Module, Shift]" = WeakIdKeyDictionary()


def _shifted_elsewhere(module: nn.Module) -> set[int]:
    """The ids of what other shifted modules hold."""
    # What ``module`` shares with one of them, as replicas do a metric, is that one's: a copy of it would lead
    # both shifts to the same module, of which one would never come off.
    found: set[int] = set()
    for other in list(SHIFTS):
        if other is not module:
            found.update(map(id, other.modules()))
    return found


class _ThreadState(threading.local):
    """Of a shift in one thread: function modes belong to a thread, and what backward recomputes runs in autograd's.

    Attributes:
        mode: Of the step that runs.
        entered: The context that holds ``mode``, where the call of a module has entered it by itself.
        depth: Calls of hooked modules that run.
    """

    mode: DeviceMode | None = None
    entered: AbstractContextManager[DeviceMode] | None = None
    depth = 0


class Shift:
    """Chosen submodules of one module, and where they run.

    Attributes:
        chosen: Their paths.
        source: Where the rest of the module runs.
        target: Where they run.
    """

    def __init__(self, module: nn.Module, chosen: list[str], source: torch.device, target: torch.device) -> None:
        self._module = weakref.ref(module)
        self.chosen = chosen
        self.source = source
        self.target = target
        self._thread = _ThreadState()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shift":
        """A copy of the module, or of a part of it, is shifted alike, by itself: this is called for its hooks."""
        name, copied = copied_part(self._module(), memo)
        if copied is None:
            # Only the hooks themselves are being copied.
            return self  # it is copied without any module
        prefix = f"{name}." if name else ""
        inside = [path for path in self.chosen if path == name or path.startswith(prefix)]
        shift = Shift(copied, [path[len(prefix) :] for path in inside], self.source, self.target)
        SHIFTS[copied] = shift
        return shift

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refused.

        Raises:
            UnsupportedError: always; where it would be loaded, the devices may be others, and the hooks would lie.
        """
        raise UnsupportedError(
            f"A module that is shifted, {self.entry}, cannot be pickled: call unshift_activations(module) first, or "
            "save its state_dict(). copy.deepcopy(module) works; the copy is shifted, too."
        )

    def install(self, module: nn.Module) -> None:
        """Moves what only the chosen submodules of ``module`` use, and hooks them."""
        own = self._own_tensors(module)
        moving = [tensor for tensor in own if canonical_device(tensor.device) != self.target]
        needed = sum(tensor.nbytes for tensor in moving)
        # Weighed before the first tensor moves, as a device that fills up half-way would leave the
        # module on both sides.
        free = free_bytes(self.target)
        if needed > free:
            raise ConfigurationError(
                f"{self.entry}: the parameters of {', '.join(self.chosen)} need "
                f"{needed} bytes, and {self.target} has {free} free; shift fewer parts, or to another device."
            )
        for tensor in moving:
            _relocate(tensor, self.target)
        # Hooks, and no wrapper: names, classes and state dict of the module stay. They are first on the way in and last
        # on the way out, so that hooks that are there already see tensors of the device that the part runs on.
        for name in self.chosen:
            child = module.get_submodule(name)
            child.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
            child.register_forward_hook(self._leave, always_call=True)
        # Modules around the chosen ones, and beside them, are entered as well: any of them may be
        # called first, where a step or a recomputation calls parts of the module by themselves.
        chosen = set(self.chosen)
        shared = _shifted_elsewhere(module)
        for name, child in module.named_modules():
            if id(child) not in shared and name not in chosen and not has_ancestor(name, chosen):
                child.register_forward_pre_hook(self._enter_home, with_kwargs=True, prepend=True)
                child.register_forward_hook(self._end, always_call=True)

    def remove(self, device: torch.device | None = None) -> None:
        """Takes the hooks off and moves everything back, or to ``device``."""
        self._clear_interrupted_call()
        module = self._module()
        if module is None:
            return
        remove_hooks_of(self, module)
        for tensor in self._own_tensors(module):
            _relocate(tensor, device or self.source)

    def _own_tensors(self, module: nn.Module) -> list[torch.Tensor]:
        """Parameters and buffers of the chosen submodules that no other submodule uses."""
        inside = [child for name in self.chosen for child in module.get_submodule(name).modules()]
        members = set(inside)
        # A tied weight stays where the rest of the module uses it; the shifted part gets a copy in every step.
        outside: set[int] = set()
        for child in module.modules():
            if child not in members:
                outside.update(map(id, _tensors(child)))
        own: dict[int, torch.Tensor] = {}
        for child in inside:
            for tensor in _tensors(child):
                if id(tensor) not in outside:
                    own[id(tensor)] = tensor
        return list(own.values())

    @contextmanager
    def active(self) -> Iterator[DeviceMode]:
        """For code that runs parts of the module outside of its ``forward``, such as a training step."""
        if self._thread.mode is not None:
            yield self._thread.mode
            return
        # A mode of its own for every step, so that no copy outlives the step that made it.
        mode = DeviceMode(self)
        self._thread.mode = mode
        try:
            with inside_step(), mode:
                yield mode
        finally:
            self._thread.mode = None

    @property
    def entry(self) -> str:
        """As it was given: ``shifts['cuda:0']='cuda:1'``."""
        return f"shifts[{str(self.source)!r}]={str(self.target)!r}"

    def describe(self, part: nn.Module | None) -> str:
        """A part of the module, for messages."""
        root = self._module()
        name = next((name for name, child in root.named_modules() if child is part), "") if root is not None else ""
        return name or f"{type(root).__name__}'s own code"

    def refuse_written(self, lent: Lent, read: torch.Tensor, reader: nn.Module | None) -> None:
        """A copy was written in place, and ``read``, of the original's memory, is used after that.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"{self.entry}: a tensor of shape {list(read.shape)} is used on {read.device}, by {self.describe(reader)}, "
            f"after its copy on {lent.device}, for {self.describe(lent.borrower)}, was written in place: an in-place "
            f"operator cannot cross the cut at {', '.join(self.chosen)}. Write it out of place, or choose another cut."
        )

    def _begin(self, module: nn.Module) -> tuple[DeviceMode, bool]:
        """A call of ``module`` begins.

        Returns:
            The mode that it runs in, and whether it is an outermost call: of the module, or of a part of it that
            backward recomputes.
        """
        self._clear_interrupted_call()
        mode = self._thread.mode
        outermost = mode is None
        if mode is None:
            entered = self.active()
            # One hook enters the mode and another one leaves it, so no `with` can hold it.
            self._thread.entered = entered
            self._thread.depth = 0
            mode = entered.__enter__()
            mode.caller = sys._getframe(2)  # of the module call that has called the hook that calls this
        self._thread.depth += 1
        mode.running.append(module)
        return mode, outermost

    def _clear_interrupted_call(self) -> None:
        """After Ctrl-C torch calls no hooks, not even those that it always calls; so the mode of that call is here."""
        mode = self._thread.mode
        entered = self._thread.entered
        if mode is None or entered is None or not mode.is_left_behind():
            return
        # Devices that were entered in that call are left, and with them their autocast.
        while len(mode.stack) > 1:
            mode.leave()
        self._thread.entered = None
        self._thread.mode = None
        # Modes are left from the top of the stack only. Under others this one stays, and does
        # nothing: it sees that its call is over.
        if current_function_mode() is mode:  # type: ignore[no-untyped-call]
            entered.__exit__(None, None, None)

    def _enter_home(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        mode, outermost = self._begin(module)
        if not outermost:
            return None
        return mode.brought(args, self.source), mode.brought(kwargs, self.source)

    def _end(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        self._thread.depth -= 1
        entered = self._thread.entered
        mode = self._thread.mode
        try:
            # Only the outermost call hands its output to code that knows nothing of the shift.
            if entered is None or mode is None or self._thread.depth:
                return output
            return mode.brought(output, self.source)
        finally:
            if mode is not None:
                mode.running.pop()
            if entered is not None and not self._thread.depth:
                self._thread.entered = None
                entered.__exit__(None, None, None)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        mode, _ = self._begin(module)
        mode.enter(self.target)
        return mode.brought(args, self.target), mode.brought(kwargs, self.target)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if self._thread.mode is not None:
            self._thread.mode.leave()
        return self._end(module, inputs, output)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    values = (*parameters_of(module).values(), *buffers_of(module).values())
    return [value for value in values if value is not None]


def _relocate(tensor: torch.Tensor, device: torch.device) -> None:
    """The same object, with its values and gradient on ``device``."""
    gradient = tensor.grad
    tensor.grad = None
    # Optimizers, tied modules and hooks hold this very tensor, so it gets new memory,
    # not a successor.
    tensor.data = tensor.data.to(device)
    if gradient is not None:
        tensor.grad = gradient.to(device)
