"""What can be seen of one run of a step: copies of it, which can be compared with another run's later."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from lightning_dpx.lightning.lightning_compat import states_of
from lightning_dpx.lightning.metrics.metrics import CallLog
from lightning_dpx.lightning.new_replicas import private_attributes
from lightning_dpx.lightning.rehearsal.hook_reads import HookReads
from lightning_dpx.python_objects.hook_state import kept_by_hooks
from lightning_dpx.python_objects.kept_values import kept_values
from lightning_dpx.python_objects.object_graph import CONTAINERS, items_of, pairs_of, size_of
from lightning_dpx.python_objects.origin import is_installed, package_of, runs_steps
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.replicas import ListPlace, StepDraws
from lightning_dpx.replicas.hidden_arrays import arrays_of_hidden
from lightning_dpx.torch_compat import OptimizedModule, TorchDispatchMode

OUTSIDE_TORCH = "a generator of Python or NumPy"  # among what drew numbers that could not be made equal
LEFT = "@left"  # ends the name of a gradient that a step by hand leaves to later ones
OUTSIDE = "@"  # begins the path of what is no attribute of the module
_OF_A_HOOK = "the hook's "  # comes next where a hook of a submodule is all that leads there
OF_HOOKS = OUTSIDE + _OF_A_HOOK


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A value as a step logged it, with the batch size that the step named."""

    value: Any
    reduce_fx: str
    batch_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenDraws:
    """The random numbers of one run of a step.

    Attributes:
        drew: Whether any were made equal for all rows.
        per_row: How many such numbers a row got, draw by draw, in every call of a replica's step.
        shapes: Of the same draws.
        places: Of the same draws, for how many rows each drew by its place in a slice; 0 where all rows drew alike.
        of_steps: What every call of a replica's step drew from generators of the host.
        left_alone: What else drew random numbers.
    """

    drew: bool = False
    per_row: Sequence[tuple[int, ...]] = ()
    shapes: Sequence[tuple[tuple[int, ...], ...]] = ()
    places: Sequence[tuple[int, ...]] = ()
    of_steps: Sequence[StepDraws] = ()
    left_alone: Sequence[str] = ()


@dataclass(slots=True, kw_only=True)
class Observation:
    """All that can be seen of one run of a step.

    Attributes:
        loss: After merging, and after the user's hook over the whole batch; on the host.
        output: What the step itself returned.
        gradients: Of the owners, by parameter; on the host. In manual optimization, of every optimizer step, and
            those that are left to later steps.
        keeps_graph: Whether gradients have a graph of their own after the backward (``create_graph=True``).
        weights: After a step of manual optimization, by parameter; on the host.
        magnified: How many times larger a rounding of an old weight is in the new one, where that was looked at.
        logged: By name.
        read_back: Names of what the step has read of that in the Trainer's metrics, as one device.
        state: Python state and buffers, by path.
        state_before: The same, before the first step of one device.
        kept_apart: What hooks of slices do not keep alike, by path.
        draws: Its random numbers.
        metric_calls: What metrics were given, by one device.
        appended: What lists got, by one device.
        numbers: Of attributes, after the step of one device.
        changed_numbers: Which of them it has changed.
        hook_reads: Attributes that hooks read.
        logger_calls: Methods of loggers that the step has called itself.
        set_on_parameters: Attributes of parameters that the step or its backward has set, on one device.
        trained_tensors: Names of attributes and buffers that have got a gradient, on one device.
        runs_backward: Whether the step has run a backward to parameters itself, on one device, and left gradients.
        drops_gradients: Whether it has run one, and left none.
        writes_batch: Whether it has written what the loader gave, on one device.
    """

    loss: torch.Tensor | None = None
    output: Any = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    keeps_graph: bool = False
    set_on_parameters: list[str] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    magnified: dict[str, float] = field(default_factory=dict)
    logged: dict[str, Logged] = field(default_factory=dict)
    read_back: set[str] = field(default_factory=set)
    state: dict[str, Any] = field(default_factory=dict)
    state_before: dict[str, Any] = field(default_factory=dict)
    kept_apart: set[str] = field(default_factory=set)
    draws: SeenDraws = field(default_factory=SeenDraws)
    metric_calls: CallLog | None = None
    appended: dict[ListPlace, list[Any]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    changed_numbers: set[str] = field(default_factory=set)
    hook_reads: HookReads = field(default_factory=HookReads)
    logger_calls: list[str] = field(default_factory=list)
    trained_tensors: set[str] = field(default_factory=set)
    runs_backward: bool = False
    drops_gradients: bool = False
    writes_batch: bool = False


_ADDRESS = " at 0x"  # in the text of an object that has no other
_LONGEST = 10_000  # items of a container beyond which only their number is compared
_DEEPEST = 6
_FEW = 2**16  # elements of a tensor outside of the module that is compared
_MOST_OUTSIDE = 20_000  # values there, shared by all names
_FEWEST_OUTSIDE = 500  # values under one name


def python_state(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Values that can be compared later, by path: numbers, text, copies of tensors, and containers and objects of them.

    Args:
        named: Attributes by path.
    """
    freezer = _Freezer()
    # One freezer for all attributes: many of them may lead to the same configuration.
    return {path: freezer.frozen(value, _DEEPEST) for path, value in named}


def state_outside(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The same of what is no attribute of the module, such as data sets, as far as that costs little.

    Args:
        named: Values by path.
    """
    values = list(named)
    most = max(_FEWEST_OUTSIDE, _MOST_OUTSIDE // max(1, len(values)))
    found: dict[str, Any] = {}
    for path, value in values:
        # The prefix keeps globals apart from attributes of the same name.
        found[f"{OUTSIDE}{path}"] = _OutsideFreezer(most).frozen(value, _DEEPEST)
    return found


def state_of_hooks(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and values of what hooks of submodules keep beside the module, for :func:`state_outside`.

    Args:
        module: A shadow, which has copies of it.
    """
    return ((f"{_OF_A_HOOK}{name}", value) for name, value in kept_by_hooks(module))


class _Freezer:
    """Copies of what values hold; of what several of them hold, one for all."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Any, Any]] = {}  # by id and depth; an id is its own while it is held

    def frozen(self, value: Any, depth: int) -> Any:
        """What ``value`` holds, through so many containers and objects."""
        if isinstance(value, torch.Tensor):
            # A copy, as the step goes on to write the tensor; on the host, where it
            # takes no room from the step.
            return host_copy(value)
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return value
        if hasattr(type(value), "dtype") and hasattr(type(value), "copy"):  # asked of the type: others answer slowly
            return value.copy()
        # Still compared by its class, so that an exchange for another kind of object is seen.
        if depth == 0:
            return type(value).__name__
        # By depth as well, as less of an object is seen from farther away.
        key = id(value), depth
        if key not in self._known:
            self._known[key] = value, self._content(value, depth - 1)
        return self._known[key][1]

    def _content(self, value: Any, depth: int) -> Any:
        content = self._items(value, depth)
        # A subclass of a container may have attributes beside its items.
        if isinstance(value, CONTAINERS):
            own = own_attributes(value)
            # A dict whose items are its attributes holds nothing else.
            if not own or own is value:
                return content
            return {"items": content, **self._named(own.items(), depth)}
        # Submodules are looked at by their own names.
        if isinstance(value, torch.nn.Module):
            return type(value).__name__
        # What they hold themselves are references, whose names are addresses.
        if isinstance(value, WeakKeyDictionary | WeakValueDictionary):
            return self._named(list(value.items()), depth)
        # Lightning and this package lead to all of a run, such as by a Trainer.
        if runs_steps(type(value)) or package_of(type(value).__module__) in ("torch", "torchmetrics"):
            return type(value).__name__
        # A mode that counts operators counts more of those of slices, and only the user reads what it notes.
        kept = None if isinstance(value, TorchFunctionMode | TorchDispatchMode) else kept_values(value)
        if kept is None:
            return type(value).__name__
        return self._named(kept.items(), depth)

    def _named(self, pairs: Iterable[tuple[Any, Any]], depth: int) -> dict[str, Any]:
        return {_name_of(key, place): self.frozen(item, depth) for place, (key, item) in enumerate(pairs)}

    def _items(self, value: Any, depth: int) -> Any:
        """What a container holds; its size where that is very much."""
        if isinstance(value, CONTAINERS) and size_of(value) > _LONGEST:
            return size_of(value)
        if isinstance(value, list | tuple | deque):
            return [self.frozen(item, depth) for item in items_of(value)]
        if isinstance(value, dict):
            return self._named(pairs_of(value), depth)
        if isinstance(value, set | frozenset):
            # The repr of other objects has their address, which differs from copy to copy.
            items = items_of(value)
            is_plain = all(isinstance(item, str | int | float | tuple) for item in items)
            if is_plain:
                return sorted(map(repr, items))
        return None


def _name_of(key: Any, place: int) -> str:
    """The name of a key; of an object that has none of its own, where it stands, as copies have other addresses."""
    # What modules and tensors call themselves is long, and the same for several of them.
    if not isinstance(key, torch.Tensor | torch.nn.Module):
        text = str(key)
        if _ADDRESS not in text:
            return text
    return f"{type(key).__name__} {place}"


class _OutsideFreezer(_Freezer):
    """Of large tensors and arrays, of objects of other packages, and of what comes after very many values, the class.

    What one step appends or counts is seen all the same: a container that was cut short still has its length.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._left = most

    def frozen(self, value: Any, depth: int) -> Any:
        """What ``value`` holds, through so many containers and objects."""
        self._left -= 1
        if _is_large(value) or _is_foreign(value):
            return type(value).__name__
        if self._left < 0 and not isinstance(value, str | int | float):
            if isinstance(value, CONTAINERS):
                return size_of(value)
            return type(value).__name__
        return super().frozen(value, depth)


def _is_large(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # Others hold several tensors, or none.
        return value.layout != torch.strided or value.is_meta or value.numel() > _FEW
    return isinstance(value, np.ndarray) and (value.size > _FEW or value.dtype.hasobject)


def _is_foreign(value: Any) -> bool:
    if isinstance(value, list | tuple | deque | dict | set | frozenset | torch.Tensor):
        return False
    return own_attributes(value) is not None and is_installed(type(value).__module__)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor as they are now, dense and on the CPU."""
    dense = tensor.detach()
    if dense.layout != torch.strided and not dense.is_nested:
        dense = dense.to_dense()
    # On the host already, it would be the very tensor that the step writes.
    return dense.to("cpu", copy=True)


def attributes_of(module: Any) -> Iterator[tuple[str, Any]]:
    """What a step may have changed: attributes of all submodules, states of metrics, and buffers."""
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(child, Metric):
            for key in states_of(child):
                value = getattr(child, key)
                yield prefix + key, dim_zero_cat(value) if isinstance(value, list) and value else value
    yield from own_attributes_of(module)
    yield from module.named_buffers()
    yield from arrays_of_hidden(module)


def own_attributes_of(module: Any) -> Iterator[tuple[str, Any]]:
    """The same, but for what metrics and torch look after: metrics' states, and buffers."""
    # All that every LightningModule has: Lightning and torch keep books of their own there.
    private = private_attributes()
    children = list(module.named_modules())
    inside_metrics = tuple(f"{path}." for path, child in children if path and isinstance(child, Metric))
    for path, child in children:
        # What torch.compile returns has torch's attributes only, and what it was given is a child.
        is_foreign = isinstance(child, Metric | OptimizedModule)
        if not is_foreign and not path.startswith(inside_metrics):
            prefix = f"{path}." if path else ""
            yield from ((prefix + key, value) for key, value in vars(child).items() if key not in private)
