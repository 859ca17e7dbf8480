"""Chosen module calls, with their operators, parameters and what they keep for backward, run on another device.

Labels are propagated as in Caffe2's ShiftActivationDevices: what is chosen runs on the target, everything else where it
was, and an operator that gets tensors of both devices runs where its output belongs. In PyTorch the running module call
tells where that is, so the labels need no graph: a stack of chosen calls, and a function mode that brings the operands
of every operator to the device on top of the stack. A tensor is copied to a device once per step, however many
operators use it there; autograd brings its gradient back once.
"""

import difflib
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.weak import WeakIdKeyDictionary

from lightning_dpx.activations import Activation, example_run, preserve_module_state, step_on
from lightning_dpx.arguments import check_is_module
from lightning_dpx.devices import canonical_device, free_bytes
from lightning_dpx.errors import ConfigurationError, UnsupportedError, some_of
from lightning_dpx.shifting.copies import Copies, Lent
from lightning_dpx.shifting.hooks import copied_part, remove_hooks_of
from lightning_dpx.torch_compat import (
    buffers_of,
    current_function_mode,
    parameters_of,
    top_saved_tensors_hooks,
    tree_map_only,
)

Names = str | Activation | Sequence[str | Activation]

_PAUSES = threading.local()
# By identity: a metric has a hash of its own, of states that its copy does not have yet.
_SHIFTS: "MutableMapping[nn.Module, Shift]" = WeakIdKeyDictionary()
# These ask about a tensor, say themselves where it goes, or want it and no copy of it (`grad` looks for it in a graph,
# and what is copied deeply stays where it is): bringing it elsewhere before would give wrong answers.
LOOKS = frozenset({"__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point", "element_size", "to",
                    "cpu", "cuda", "data_ptr", "requires_grad_", "register_hook", "backward", "detach", "__len__",
                    "untyped_storage", "storage_offset", "is_contiguous", "type", "item", "tolist", "grad",
                    "__deepcopy__"})  # fmt: skip
_READS = frozenset({"to", "cpu", "cuda", "type", "item", "tolist"})  # those of them that look at the values
_WRITES = frozenset({"__setitem__", "__iadd__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"})


def shift_activations(module: nn.Module, activations: Names, shifts: Mapping[Any, Any], *batch: Any) -> "Shift":
    """Runs parts of ``module`` on another device from now on.

    Args:
        module: The model; it keeps its class, its names and its state dict.
        activations: Names of submodules, or patterns as for file names (``"encoder.layers.[0-3]"``). A submodule's own
            submodules go with it. Activations from :func:`trace_activations`, and their names, stand for their modules.
        shifts: ``{from: to}``; parts of the model that live on ``from`` move to ``to``.
        batch: As for :func:`trace_activations`. What cannot be shifted shows when the model runs: with a batch, or
            where the module has an ``example_input_array``, it runs once now; otherwise it shows in the first step.

    Returns:
        The shift, which :func:`unshift_activations` takes back.

    Raises:
        ConfigurationError: a device is both source and target, a pattern matches nothing (with the nearest names), the
            target has no room for the parameters, or the module is shifted already.
        UnsupportedError: an in-place operator, or a checkpointed region, lies across the cut. Nothing is shifted then.

    Examples:
        >>> dpx.simulate(2)
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to("sim:0")
        >>> rows = torch.ones(4, 8, device="sim:0")
        >>> shift = dpx.shift_activations(net, "2", {"sim:0": "sim:1"}, rows)
        >>> net[2].weight.device
        device(type='sim', index=1)
        >>> net(rows).device  # copies are inserted, also back
        device(type='sim', index=0)
    """
    check_is_module(module)
    shift = apply_shift(module, activations, shifts)
    run = step_on(module, batch) if batch else example_run(module, shift.source)
    if run is not None:
        try:
            with preserve_module_state(module), shift.active():
                run()
        # Ctrl-C in the middle of the run takes the shift off again, too.
        except BaseException as error:
            unshift_activations(module)
            error.add_note(f"It happened in the run that checks {shift.entry} before training; nothing is shifted.")
            raise
    return shift


def apply_shift(module: nn.Module, activations: Names, shifts: Mapping[Any, Any]) -> "Shift":
    """:func:`shift_activations` without a run."""
    if module in _SHIFTS:
        raise ConfigurationError("The module is shifted already; call unshift_activations(module) first.")
    placed = check_shifts(shifts)
    chosen = choose_modules(module, activations)
    source = _source_of(module, placed)
    shift = Shift(module, chosen, source, placed[source])
    shift.install(module)
    _SHIFTS[module] = shift
    return shift


def unshift_activations(module: nn.Module, device: torch.device | str | None = None) -> None:
    """Takes :func:`shift_activations` back: everything runs, and lives, where it did before.

    Args:
        module: The model.
        device: Where the shifted parts go instead, for example ``"cpu"`` when the source is full.

    Raises:
        ConfigurationError: the module is not shifted.

    Examples:
        >>> dpx.simulate(2)
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)).to("sim:0")
        >>> shift = dpx.shift_activations(net, "1", {"sim:0": "sim:1"}, torch.ones(4, 8, device="sim:0"))
        >>> dpx.unshift_activations(net)
        >>> net[1].weight.device
        device(type='sim', index=0)
    """
    check_is_module(module)
    shift = _SHIFTS.pop(module, None)
    if shift is None:
        raise ConfigurationError("The module is not shifted.")
    shift.remove(None if device is None else canonical_device(device))


def applied_shift(module: nn.Module) -> "Shift | None":
    """The shift of ``module``, if there is one."""
    return _SHIFTS.get(module)


def has_shifts() -> bool:
    """Whether any module of this process is shifted."""
    return len(_SHIFTS) > 0


def shift_like(module: nn.Module, shift: "Shift") -> None:
    """Shifts ``module``, a copy of the one that ``shift`` is of, in the same way."""
    own = Shift(module, list(shift.chosen), shift.source, shift.target)
    own.install(module)
    _SHIFTS[module] = own


def forget_shift(module: nn.Module) -> None:
    """Takes a shift off ``module``, if it has one, and leaves every tensor where it is."""
    shift = _SHIFTS.pop(module, None)
    if shift is not None:
        remove_hooks_of(shift, module)


class unshifted:  # noqa: N801  a context manager, entered three times in every step: no generator
    """In this thread operators run where their tensors are, as those of an optimizer must inside a shifted step.

    Args:
        paused: ``False`` inside of such a stretch: shifted again, as in a closure that an optimizer calls.
    """

    __slots__ = ("_before", "_paused")

    def __init__(self, paused: bool = True) -> None:
        self._paused = paused

    def __enter__(self) -> None:
        self._before = getattr(_PAUSES, "paused", False)
        _PAUSES.paused = self._paused

    def __exit__(self, *_: object) -> None:
        _PAUSES.paused = self._before


def check_shifts(shifts: Mapping[Any, Any]) -> dict[torch.device, torch.device]:
    """``{from: to}`` with real devices.

    Raises:
        ConfigurationError: nothing to shift, an unknown device, one that is both source and target.
    """
    if not isinstance(shifts, Mapping) or not shifts:
        what = "empty" if not shifts else f"{shifts!r}, which is no mapping"
        raise ConfigurationError(f"shifts is {what}; give {{from: to}}, for example {{'cuda:0': 'cuda:1'}}.")
    placed = {}
    for source, target in shifts.items():
        try:
            placed[canonical_device(source)] = canonical_device(target)
            torch.empty(0, device=target)  # is it there?
        except torch.OutOfMemoryError:  # it is, and full; what moves there will be weighed
            continue
        # torch asserts that it was built for the type of device.
        except (RuntimeError, AssertionError, ConfigurationError) as error:
            raise ConfigurationError(f"shifts[{source!r}]={target!r} names an unknown device: {error}") from error
    for source, target in placed.items():
        if target in placed:
            what = "itself" if source == target else "a device that is shifted too"
            raise ConfigurationError(
                f"shifts[{str(source)!r}]={str(target)!r} shifts to {what}; sources and targets must differ."
            )
    return placed


def _source_of(module: nn.Module, shifts: Mapping[torch.device, torch.device]) -> torch.device:
    """The one device of the module that ``shifts`` names."""
    # One pair of devices is all that a shift knows; operands elsewhere are left alone.
    homes = {canonical_device(parameter.device) for parameter in module.parameters()}
    sources = [device for device in shifts if device in homes]
    if len(sources) != 1:
        lives = ", ".join(sorted(map(str, homes)))
        raise ConfigurationError(
            f"The module lives on {lives}; shifts must name exactly one of its devices, not "
            f"{', '.join(map(str, shifts))}."
        )
    return sources[0]


def choose_modules(module: nn.Module, activations: Names) -> list[str]:
    """Paths of the chosen submodules, without those inside of another chosen one.

    Raises:
        ConfigurationError: no patterns, or one that matches nothing; with the nearest names.
    """
    given = [activations] if isinstance(activations, str | Activation) else activations
    if not isinstance(given, Iterable):
        raise ConfigurationError(f"activations={given!r} is not allowed; give names of submodules, or activations.")
    if not given:
        raise ConfigurationError("activations is empty; name at least one submodule.")
    # Of an activation the module, and not the tensor, can run elsewhere.
    patterns = [one.module if isinstance(one, Activation) else one for one in given]
    names = [name for name, _ in module.named_modules() if name]
    chosen: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigurationError(f"activations holds {pattern!r}; give names of submodules, or activations.")
        path = pattern.partition("#")[0].partition(":")[0]
        if not path:
            raise ConfigurationError(
                f"activations names {pattern!r}, what {type(module).__name__}'s own code keeps; only submodules can be "
                f"chosen: {some_of(names, 10)}."
            )
        matching = [name for name in names if fnmatchcase(name, path)]
        if not matching:
            near = difflib.get_close_matches(path, names, n=3, cutoff=0.3)
            found = f"the nearest are: {', '.join(near)}" if near else f"there are: {some_of(names, 10)}"
            raise ConfigurationError(f"activations names {pattern!r}, which matches no submodule; {found}.")
        chosen.update(matching)
    return [name for name in names if name in chosen and not _has_ancestor(name, chosen)]


def _has_ancestor(name: str, chosen: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in chosen for length in range(1, len(parts)))


def _shifted_elsewhere(module: nn.Module) -> set[int]:
    """The ids of what other shifted modules hold."""
    # What ``module`` shares with one of them, as replicas do a metric, is that one's: a copy of it would lead
    # both shifts to the same module, of which one would never come off.
    found: set[int] = set()
    for other in list(_SHIFTS):
        if other is not module:
            found.update(map(id, other.modules()))
    return found


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
        # Function modes belong to a thread, and a part that backward recomputes runs in autograd's.
        self._local = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shift":
        """A copy of the module, or of a part of it, is shifted alike, by itself: this is called for its hooks."""
        name, copied = copied_part(self._module(), memo)
        if copied is None:
            # Only the hooks themselves are being copied.
            return self  # it is copied without any module
        prefix = f"{name}." if name else ""
        inside = [path for path in self.chosen if path == name or path.startswith(prefix)]
        shift = Shift(copied, [path[len(prefix) :] for path in inside], self.source, self.target)
        _SHIFTS[copied] = shift
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
            if id(child) not in shared and name not in chosen and not _has_ancestor(name, chosen):
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
    def active(self) -> Iterator["_OnDevice"]:
        """For code that runs parts of the module outside of its ``forward``, such as a training step."""
        if self._mode is not None:
            yield self._mode
            return
        # A mode of its own for every step, so that no copy outlives the step that made it.
        self._local.mode = mode = _OnDevice(self)
        _PAUSES.steps = getattr(_PAUSES, "steps", 0) + 1
        try:
            with mode:
                yield mode
        finally:
            self._local.mode = None
            _PAUSES.steps -= 1

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

    @property
    def _mode(self) -> "_OnDevice | None":
        mode: _OnDevice | None = getattr(self._local, "mode", None)
        return mode

    def _begin(self, module: nn.Module) -> tuple["_OnDevice", bool]:
        """A call of ``module`` begins.

        Returns:
            The mode that it runs in, and whether it is an outermost call: of the module, or of a part of it that
            backward recomputes.
        """
        self._clear_interrupted_call()
        mode = self._mode
        outermost = mode is None
        if mode is None:
            entered = self.active()
            # One hook enters the mode and another one leaves it, so no `with` can hold it.
            self._local.entered = entered
            self._local.depth = 0
            mode = entered.__enter__()
            mode.caller = sys._getframe(2)  # of the module call that has called the hook that calls this
        self._local.depth = getattr(self._local, "depth", 0) + 1
        mode.running.append(module)
        return mode, outermost

    def _clear_interrupted_call(self) -> None:
        """After Ctrl-C torch calls no hooks, not even those that it always calls; so the mode of that call is here."""
        mode = self._mode
        entered = getattr(self._local, "entered", None)
        if mode is None or entered is None or not mode.is_left_behind():
            return
        # Devices that were entered in that call are left, and with them their autocast.
        while len(mode.stack) > 1:
            mode.leave()
        self._local.entered = None
        self._local.mode = None
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
        self._local.depth -= 1
        entered = getattr(self._local, "entered", None)
        mode = self._mode
        try:
            # Only the outermost call hands its output to code that knows nothing of the shift.
            if entered is None or mode is None or self._local.depth:
                return output
            return mode.brought(output, self.source)
        finally:
            if mode is not None:
                mode.running.pop()
            if entered is not None and not self._local.depth:
                self._local.entered = None
                entered.__exit__(None, None, None)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        mode, _ = self._begin(module)
        mode.enter(self.target)
        return mode.brought(args, self.target), mode.brought(kwargs, self.target)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if self._mode is not None:
            self._mode.leave()
        return self._end(module, inputs, output)


class _OnDevice(TorchFunctionMode):
    """Brings the operands of every operator to the device on top of the stack."""

    def __init__(self, shift: Shift) -> None:
        super().__init__()
        self.shift = shift
        # Operators outside of the chosen parts run where the module lives.
        self.stack = [shift.source]
        self._pair = (shift.source, shift.target)
        self._thread = threading.get_ident()
        self._casts: list[AbstractContextManager[object]] = []
        self._regions: MutableMapping[Any, torch.device] = weakref.WeakKeyDictionary()  # by their saving hooks
        self.running: list[nn.Module | None] = [None]  # calls of hooked modules; at first the step itself
        self._copies = Copies(self.running, shift.refuse_written)
        self.caller: FrameType | None = None  # the module call that this mode is for, if it is for one

    def is_left_behind(self) -> bool:
        """Whether the module call that this mode is for has ended without telling."""
        frame: FrameType | None = sys._getframe()
        # The frame of a call that is still running is among the callers of this one.
        while frame is not None and frame is not self.caller:
            frame = frame.f_back
        return self.caller is not None and frame is None

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
        if getattr(_PAUSES, "paused", False) or threading.get_ident() != self._thread:
            return func(*args, **kwargs)  # autograd's threads get this mode too, if backward runs inside of the step
        if self.caller is not None and self.is_left_behind():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in LOOKS:
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
                f"{self.shift.entry}: {resolve_name(func) or name} writes into a tensor on {foreign[0].device} from "
                f"{self.shift.describe(self.running[-1])}, which runs on {here}: an in-place operator cannot cross the "
                f"cut at {', '.join(self.shift.chosen)}. Write it without the underscore, or choose another cut."
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
                f"one side of the cut at {', '.join(self.shift.chosen)}. Checkpoint the two sides one by one."
            )

    def brought(self, value: Any, device: torch.device) -> Any:
        """A nested value with its tensors on ``device``."""

        def bring(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device != device and tensor.device in self._pair:
                return self._copies.copy(tensor, device)
            self._copies.check(tensor)
            return tensor

        return tree_map_only(torch.Tensor, bring, value)


def in_shifted_step() -> bool:
    """Whether the calling thread is inside :meth:`Shift.active`, of whatever module."""
    return getattr(_PAUSES, "steps", 0) > 0


def writes_in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator of this name writes its first operand, or ``out``."""
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITES or "out" in kwargs


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
