"""Inputs that autograd keeps no trace of: the 1 of ``1 - x``, a mask added to scores, the bias of a frozen layer.

The node of an operator has an edge for every operand that needs a gradient, and saves what gradients are computed from.
The others a recipe cannot find. While :class:`UntrackedInputs` is on, the functions below note them at their node:
numbers as they are, tensors by a weak reference with their version. So a note keeps nothing alive; a tensor that is
gone, or was written to, when a recipe asks for it is no longer known, and never taken for another one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from lightning_dpx.memory.execute.recipes import NotRecomputable
from lightning_dpx.torch_compat import (
    FakeTensor,
    free_weak_storage,
    key_of,
    version_counter,
    view_base,
    weak_storage,
)

_TAG = "lightning_dpx.operands"
_COPIES = "lightning_dpx.copies"
_PLAIN = (Tensor, nn.Parameter, FakeTensor)
_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward1")

# Where the operands in question stand among the arguments, and their names as keywords.
_SUM = ((0, "input"), (1, "other"))
_FIRST = ((0, "input"),)
_BIAS = ((2, "bias"),)
# Of these their nodes note nothing, though what is computed depends on them.
_EPS = ((4, "eps"),)
_TRAIN = ((2, "training"),)
_OPTIONAL = {"bias", "eps", "value", "nan", "posinf", "neginf", "training"}
_NOTED: dict[Callable[..., Any], Sequence[tuple[int, str]]] = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.add_, torch.sub, Tensor.sub, Tensor.sub_), _SUM),
    **dict.fromkeys((torch.rsub, Tensor.__rsub__), _SUM),
    **dict.fromkeys((torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_), ((2, "value"),)),
    torch.where: ((1, "input"), (2, "other")),
    Tensor.where: ((0, "self"), (2, "other")),
    **dict.fromkeys((torch.cat, torch.concat, torch.stack), ((0, "tensors"),)),
    **dict.fromkeys((torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm), _FIRST),
    **dict.fromkeys((torch.addcmul, Tensor.addcmul), _FIRST),
    **dict.fromkeys((F.linear, torch.conv1d, torch.conv2d, torch.conv3d), _BIAS),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _BIAS),
    F.batch_norm: ((4, "bias"),),
    **dict.fromkeys((F.group_norm, torch.group_norm), ((4, "eps"), (3, "bias"))),
    **dict.fromkeys((F.layer_norm, torch.layer_norm), _EPS),
    **dict.fromkeys((F.dropout, torch.dropout, torch.native_dropout), _TRAIN),
    **dict.fromkeys((torch.ops.aten.native_dropout, torch.ops.aten.native_dropout.default), _TRAIN),
    F.rms_norm: ((3, "eps"),),
    F.pad: ((3, "value"),),
    torch.constant_pad_nd: ((2, "value"),),
    **dict.fromkeys((torch.nan_to_num, Tensor.nan_to_num), ((1, "nan"), (2, "posinf"), (3, "neginf"))),
}  # fmt: skip


class UntrackedInputs(TorchFunctionMode):
    """Notes operands outside of the graph at the nodes of the calls in here, for a few us a call of any function.

    Args:
        watch: Told of every node with a note.
    """

    def __init__(self, watch: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # Every function of torch in the step comes here: most leave after one look into a dict.
        places = _NOTED.get(func)
        if places is None:
            if not kwargs:
                return func(*args)
            return func(*args, **kwargs)
        kwargs = kwargs or {}
        # Asked before the call, as a function in place gives its operand another node.
        given = [operand.grad_fn for operand in (*args, *kwargs.values()) if type(operand) in _PLAIN]
        result = func(*args, **kwargs)
        first = result[0] if type(result) is tuple else result
        if type(first) in _PLAIN and first.requires_grad:
            node = _made_by_call(first, given)
            if node is not None:
                _note(func, node, _outside(places, args, kwargs), args, kwargs)
                if self._watch is not None:
                    self._watch(node)
        return result


def _made_by_call(result: Tensor, given: list[Any]) -> Any:
    """The node of the operator behind ``result``, unless an earlier call made it.

    A dropout in evaluation hands out its input. To a recipe, a note at the input's node would be an operand of the
    operator that made the input, and gradients would be wrong without a word.

    Args:
        result: What the call gave.
        given: The nodes of its operands, from before the call.
    """
    node: Any = result.grad_fn
    if node is None or node in given:
        return None
    if node.name() in _VIEWS:  # several rows are one matrix for the operator itself
        node = node.next_functions[0][0]
    # Where two of these modes are on, the inner one has noted it.
    if node is None or node in given or _TAG in node.metadata:
        return None
    return node


def _note(func: Callable[..., Any], node: Any, outside: list[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Puts ``outside``, and copies of what may change, at ``node``."""
    notes: dict[str, Any] = node.metadata
    if outside:
        notes[_TAG] = [_noted(operand) for operand in outside]
    # A call in training mode writes into the statistics without counting up their version, so later
    # nothing tells whether they are those of this call.
    if func is F.batch_norm and not _given(args, kwargs, 5, "training"):
        mean = _given(args, kwargs, 1, "running_mean")
        variance = _given(args, kwargs, 2, "running_var")
        if isinstance(mean, Tensor) and isinstance(variance, Tensor):
            notes[_COPIES] = {"running_mean": mean.detach().clone(), "running_var": variance.detach().clone()}


def _given(args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str) -> Any:
    if place < len(args):
        return args[place]
    return kwargs.get(name)


def _outside(places: Sequence[tuple[int, str]], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The operands in these places that need no gradient."""
    if (places is _SUM and len(args) > 2) or (places is _FIRST and len(args) > 3):
        return []  # an older order of arguments, with factors among them
    given: list[Any] = []
    for place, name in places:
        missing = None if name in _OPTIONAL else _UNKNOWN
        operand = args[place] if place < len(args) else kwargs.get(name, missing)
        if isinstance(operand, list | tuple):
            given += operand
        else:
            given.append(operand)
    return [operand for operand in given if not (isinstance(operand, Tensor) and operand.requires_grad)]


def _noted(operand: Any) -> Any:
    """A number as it is, a tensor weakly, all else as unknown."""
    if not isinstance(operand, Tensor):
        if isinstance(operand, int | float | complex | None):
            return operand
        return _UNKNOWN
    # Tensors of inference mode count no writes, sparse and nested ones have no single block of memory.
    if type(operand) not in _PLAIN or operand.is_inference() or not has_one_block(operand):
        return _UNKNOWN
    return WeakTensor(operand)


class _Unknown:
    """Some other object, or none where there must be one."""


_UNKNOWN = _Unknown()


class WeakTensor:
    """A tensor as it was, weakly.

    Attributes:
        view: Size, stride and offset, if it is a view; of views only the base is there for longer.
        storage: The key of its memory, by which a value is known that it is a part of; 0 where it has none of its own.
        version: How often that was written to.
        dtype: Of its elements.
        geometry: Size, stride and offset, where it has such a key.
    """

    __slots__ = ("_empty", "_ref", "_storage", "_version", "dtype", "geometry", "storage", "version", "view")

    def __init__(self, tensor: Tensor) -> None:
        self._storage = 0
        self.storage: int = 0
        self.version: int = version_counter(tensor)
        self.dtype: torch.dtype = tensor.dtype
        self.geometry: tuple[torch.Size, tuple[int, ...], int | torch.SymInt] = (torch.Size(), (), 0)
        self.view: tuple[torch.Size, tuple[int, ...], int | torch.SymInt] | None = None
        # Without numbers nothing is kept and nothing changes: a cache that begins empty is replaced by the first keys.
        self._empty: Tensor | None = None if tensor.numel() else tensor.detach()
        if self._empty is not None:
            return
        # A parameter stays anyway. The memory of a conjugate, or of a negative, holds other numbers.
        if not (isinstance(tensor, nn.Parameter) or tensor.is_conj() or tensor.is_neg()):
            self.geometry = tensor.size(), tensor.stride(), tensor.storage_offset()
            # The address of a storage is not given out again while there is a weak reference, which keeps no memory.
            self.storage = key_of(tensor.untyped_storage())
            self._storage = weak_storage(tensor.untyped_storage())  # type: ignore[assignment]
        # The object of a view may go with the call, its base stays. A base of another dtype does
        # not show these numbers: a complex one is no view of its parts.
        base = view_base(tensor)
        if base is not None and base.dtype == tensor.dtype and type(base) in _PLAIN:
            self.view = tensor.size(), tensor.stride(), tensor.storage_offset()
            tensor = base
        self._ref = TensorWeakRef(tensor)
        self._version = version_counter(tensor)

    # A default is there even when the interpreter ends and has emptied the module.
    def __del__(self, _free: Callable[[int], None] = free_weak_storage) -> None:
        if self._storage:
            _free(self._storage)

    def base(self, most: int) -> Tensor:
        """The tensor, or what it is a view of, if it is still the same.

        Raises:
            NotRecomputable: it is not, or takes more than ``most`` bytes and would have to be kept for this.
        """
        if self._empty is not None:
            return self._empty
        tensor: Tensor | None = self._ref()
        if tensor is None:
            raise NotRecomputable("an operand outside of the graph is gone")
        if version_counter(tensor) != self._version:
            raise NotRecomputable("an operand outside of the graph was changed in place")
        # A parameter is there anyway, whatever its size.
        if not isinstance(tensor, nn.Parameter) and self._bytes(tensor) > most:
            raise NotRecomputable("an operand outside of the graph is as large as the result")
        return tensor

    def look(self, base: Tensor) -> Tensor:
        """The tensor, made of what it is a view of."""
        if self.view is None:
            return base
        return base.as_strided(*self.view)

    def _bytes(self, base: Tensor) -> int:
        """What is kept for it at the most."""
        # An expanded view has more elements than there is memory.
        size = base.size() if self.view is None else self.view[0]
        return min(size.numel() * base.itemsize, base.untyped_storage().nbytes())


def has_one_block(tensor: Tensor) -> bool:
    """Whether the numbers of ``tensor`` are in one block of memory, told by size and strides."""
    return tensor.layout is torch.strided and not tensor.is_nested


def operand_of(node: Any, index: int) -> Any:
    """Operand number ``index`` of those that ``node`` has no edge for: a number, ``None`` or a :class:`WeakTensor`.

    Raises:
        NotRecomputable: it was not noted.
    """
    note: Sequence[Any] = node.metadata.get(_TAG, ())
    if index >= len(note) or note[index] is _UNKNOWN:
        raise NotRecomputable(f"an operand of {node.name()} is not part of the graph")
    return note[index]


def copy_of(node: Any, name: str) -> Tensor:
    """What a tensor held when ``node`` was made, of those that are written to without a new version.

    Raises:
        NotRecomputable: no copy was made.
    """
    copies: dict[str, Tensor] = node.metadata.get(_COPIES, {})
    if name not in copies:
        raise NotRecomputable(f"{name} of {node.name()} may have changed since")
    return copies[name]
