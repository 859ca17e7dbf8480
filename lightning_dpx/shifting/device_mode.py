"""The function mode of a shifted step: it brings the operands of every operator to the device that it runs on."""

import threading
import weakref
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from lightning_dpx.errors import UnsupportedError
from lightning_dpx.python_objects.interrupted_calls import is_on_stack
from lightning_dpx.shifting.copies import Copies, Lent
from lightning_dpx.torch_compat import top_saved_tensors_hooks, tree_map_only

# These ask about a tensor, say themselves where it goes, or want it and no copy of it (`grad` looks for it in a graph,
# and what is copied deeply stays where it is): bringing it elsewhere before would give wrong answers.
LEFT_WHERE_THEY_ARE = frozenset({
    "__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point", "element_size", "to", "cpu", "cuda",
    "data_ptr", "requires_grad_", "register_hook", "backward", "detach", "__len__", "untyped_storage", "storage_offset",
    "is_contiguous", "type", "item", "tolist", "grad", "__deepcopy__",
})  # fmt: skip
_READS = frozenset({"to", "cpu", "cuda", "type", "item", "tolist"})  # those of them that look at the values
_WRITES = frozenset({"__setitem__", "__iadd__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"})


class Cut(Protocol):
    """Where a module is cut in two, and what messages say of it; a shift is one.

    Attributes:
        chosen: Paths of the submodules that run on ``target``.
        source: Where the rest of the module runs.
        target: Another device.
    """

    chosen: list[str]
    source: torch.device
    target: torch.device

    @property
    def entry(self) -> str:
        """As it was given: ``shifts['cuda:0']='cuda:1'``."""

    def describe(self, part: nn.Module | None) -> str:
        """A part of the module, for messages."""

    def refuse_written(self, lent: Lent, read: torch.Tensor, reader: nn.Module | None) -> None:
        """A copy was written in place, and ``read``, of the original's memory, is used after that."""


class _ThreadState(threading.local):
    """What each thread has of its own.

    Attributes:
        is_paused: Whether operators run where their tensors are.
        num_steps: Shifted steps, of whatever module, that it is inside of.
    """

    is_paused = False
    num_steps = 0


_THREAD = _ThreadState()


class unshifted:  # noqa: N801  a context manager, entered three times in every step: no generator
    """In this thread operators run where their tensors are, as those of an optimizer must inside a shifted step.

    Args:
        paused: ``False`` inside of such a stretch: shifted again, as in a closure that an optimizer calls.
    """

    __slots__ = ("_before", "_paused")

    def __init__(self, paused: bool = True) -> None:
        self._paused = paused

    def __enter__(self) -> None:
        self._before = _THREAD.is_paused
        _THREAD.is_paused = self._paused

    def __exit__(self, *_: object) -> None:
        _THREAD.is_paused = self._before


class inside_step:  # noqa: N801  a context manager, entered in every step: no generator
    """In this thread a shifted step runs."""

    __slots__ = ()

    def __enter__(self) -> None:
        _THREAD.num_steps += 1

    def __exit__(self, *_: object) -> None:
        _THREAD.num_steps -= 1


def in_shifted_step() -> bool:
    """Whether the calling thread is inside a shifted step, of whatever module."""
    return _THREAD.num_steps > 0


class DeviceMode(TorchFunctionMode):
    """Brings the operands of every operator to the device on top of the stack.

    Args:
        cut: The parts that were shifted, and the two devices.

    Attributes:
        stack: The devices of the parts that are running, the innermost last.
        running: The calls of hooked modules that are running; at first the step itself, which has none.
        caller: The module call that this mode is for, if it is for one.
    """

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self._cut = cut
        # Operators outside of the chosen parts run where the module lives.
        self.stack: list[torch.device] = [cut.source]
        self._pair = (cut.source, cut.target)
        self._thread = threading.get_ident()
        self._casts: list[AbstractContextManager[object]] = []
        self._regions: MutableMapping[Any, torch.device] = weakref.WeakKeyDictionary()  # by their saving hooks
        self.running: list[nn.Module | None] = [None]
        self._copies = Copies(self.running, cut.refuse_written)
        self.caller: FrameType | None = None

    def is_left_behind(self) -> bool:
        """Whether the module call that this mode is for has ended without telling."""
        return self.caller is not None and not is_on_stack(self.caller)

    def enter(self, device: torch.device) -> None:
        """What follows runs on ``device``, under the autocast that was meant for the other one."""
        here = self.stack[-1].type
        cast: AbstractContextManager[object] = nullcontext()
        # Autocast is switched on for a type of devices: what was said of CUDA says nothing
        # of the host.
        if device.type != here and torch.is_autocast_enabled(here):
            dtype = torch.get_autocast_dtype(here)
            cached = torch.is_autocast_cache_enabled()
            cast = torch.autocast(device.type, dtype=dtype, cache_enabled=cached)
        cast.__enter__()
        self.stack.append(device)
        self._casts.append(cast)

    def leave(self) -> None:
        """What follows runs where it did before the last :meth:`enter`."""
        self.stack.pop()
        self._casts.pop().__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _THREAD.is_paused or threading.get_ident() != self._thread:
            return func(*args, **kwargs)  # autograd's threads get this mode too, if backward runs inside of the step
        if self.is_left_behind():
            return func(*args, **kwargs)
        # Modes see functions, and methods and attributes of tensors under the names that they have there.
        name = getattr(func, "__name__", "")
        if name in LEFT_WHERE_THEY_ARE:
            if name in _READS and args:
                self._copies.check(args[0])
            return func(*args, **kwargs)
        here = self.stack[-1]
        # Every operator is asked, as only operators show on which side a region lies.
        self._refuse_split_recomputation(here)
        foreign: list[torch.Tensor] = []

        def bring(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.ndim == 0 and tensor.device.type == "cpu":
                return tensor  # scalars mix with every device
            if tensor.device == here or tensor.device not in self._pair:
                self._copies.check(tensor)
                return tensor
            foreign.append(tensor)
            return self._copies.copy(tensor, here)

        brought_args, brought_kwargs = tree_map_only(torch.Tensor, bring, (args, kwargs))
        # The operator would write into the copy, and the original would silently keep its values.
        if foreign and writes_in_place(name, kwargs) and args and args[0] is not brought_args[0]:
            raise UnsupportedError(
                f"{self._cut.entry}: {resolve_name(func) or name} writes into a tensor on {foreign[0].device} from "
                f"{self._cut.describe(self.running[-1])}, which runs on {here}: an in-place operator cannot cross the "
                f"cut at {', '.join(self._cut.chosen)}. Write it without the underscore, or choose another cut."
            )
        return func(*brought_args, **brought_kwargs)

    def _refuse_split_recomputation(self, here: torch.device) -> None:
        """PyTorch recomputes a checkpointed region from whichever device's backward thread comes first, unguarded."""
        hooks = top_saved_tensors_hooks(False)
        # In a class of this name torch defines the saving hook of a region that it checkpoints
        # without reentry.
        if hooks is None or not hooks[0].__qualname__.startswith("_checkpoint_hook"):
            return
        if self._regions.setdefault(hooks[0], here) != here:
            raise UnsupportedError(
                f"A region of torch.utils.checkpoint runs on {self._regions[hooks[0]]} and on {here}: it must lie on "
                f"one side of the cut at {', '.join(self._cut.chosen)}. Checkpoint the two sides one by one."
            )

    def brought(self, value: Any, device: torch.device) -> Any:
        """A nested value with its tensors on ``device``."""

        def bring(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device != device and tensor.device in self._pair:
                return self._copies.copy(tensor, device)
            self._copies.check(tensor)
            return tensor

        return tree_map_only(torch.Tensor, bring, value)


def writes_in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator of this name writes its first operand, or ``out``."""
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITES or "out" in kwargs
