"""Values of the autograd graph, kept or computed again.

Every tensor that autograd saves passes a pack hook, with the graph node that produced it. The node keeps what it needs
for its own backward, and its edges lead to the nodes before it: so the graph is a tape, and most values can be computed
again from it. :class:`Rematerialisation` keeps some of them and drops the others. Nothing is wrapped, no module runs
twice, no random number is drawn again (a dropout's mask is a saved tensor like any other), and every operator is
repeated on the same bits, so the gradients are the same bits.

    forward    pack(tensor) -> Value (or View)  kept: the tensor       dropped: how to make it, and from which Values
    backward   unpack(Value) -> tensor          computed by need, shared until the last that needs it has had it

Values point upstream only, and never at nodes: a graph that never runs backward is freed like any other. A node knows
its values by weak references in its metadata.

All this runs for every saved tensor of every step, so it makes few objects and calls few functions.
"""

import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.recompute.call_names import CallNames
from lightning_dpx.recompute.garbage import COLLECTOR
from lightning_dpx.recompute.operands import Operands, Reference, operand_of
from lightning_dpx.recompute.parking import Parking
from lightning_dpx.recompute.recipes import VIEWS, NotRecomputable, recipe_for

Make = Callable[..., torch.Tensor]
Look = Callable[[torch.Tensor], torch.Tensor]
_TAG = "lightning_dpx.values"
_MOST_UNSAVED = 64  # operators in a row that save nothing; a longer chain would recurse too deeply
SMALL = 4096  # bytes that are not worth the bookkeeping


class Identity(NamedTuple):
    """Tensors that agree in this hold the same numbers, as long as the storage lives."""

    storage: int
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Value:
    """A tensor of the forward: kept, or made again from other values when it is needed.

    Attributes:
        name: The call of the module that first saved it, and a number; empty where autograd does not save it.
        tensor: The value itself, or ``None`` while it is dropped.
        identity: By which it is known again when it is saved again; ``None`` where autograd does not save it.
        version: Of the tensor when it was kept.
        make: Computes it from the tensors of ``inputs``; ``None`` where that is unknown.
        inputs: What ``make`` takes: values, views of values, or anything else as it is.
        sources: The values behind the inputs.
        dropped: Whether ``tensor`` may be forgotten.
        fleeting: Whether it is forgotten after every use, even if it will be asked for again.
        pending: How often it will still be asked for in this backward.
        wanted_by: How often it is asked for in a backward.
        operator: The name of the node that produced it.
    """

    __slots__ = (
        "__weakref__", "_storage", "dropped", "fleeting", "identity", "inputs", "make", "name", "operator", "pending",
        "sources", "tensor", "version", "wanted_by",
    )  # fmt: skip

    def __init__(self, name: str, operator: str) -> None:
        self.name, self.operator = name, operator
        self.identity: Identity | None = None
        self.tensor: torch.Tensor | None = None
        self.make: Make | None = None
        self.inputs: Sequence[Any] = ()
        self.sources: Sequence[Value] = ()
        self.dropped = self.fleeting = False
        self.version = -1
        self.pending = self.wanted_by = 0
        self._storage = 0  # a weak reference, once nothing here holds the storage

    def __del__(self, _free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref) -> None:
        if self._storage:
            _free(self._storage)

    def keep(self, tensor: torch.Tensor) -> None:
        """Holds ``tensor``, and notices if somebody writes into it."""
        self.tensor, self.version = tensor.detach(), tensor._version

    def let_go(self, tensor: torch.Tensor) -> None:
        """Forgets ``tensor``, which it is; while the value lives no other storage gets the same identity."""
        if not self._storage:
            self._storage = tensor.untyped_storage()._weak_ref()  # type: ignore[assignment]
        self.tensor = None

    def drop(self, tensor: torch.Tensor) -> None:
        """From now on ``tensor``, which it is, is computed when it is needed."""
        self.dropped = True
        self.let_go(tensor)

    def learn(self, make: Make | None, inputs: Sequence[Any]) -> None:
        """How it is made; ``None`` where that is unknown."""
        self.make, self.inputs = make, inputs
        for entry in inputs:
            if type(entry) is not Value:
                break
        else:
            self.sources = inputs
            return
        values = (entry.value if isinstance(entry, View) else entry for entry in inputs)
        self.sources = [value for value in values if type(value) is Value]

    def want(self) -> None:
        """One more will ask for it."""
        self.pending += 1
        self.wanted_by += 1


class View:
    """A value as an operator got it, or as autograd saved it, where that is not the whole value as it is."""

    __slots__ = ("__weakref__", "look", "value")

    def __init__(self, value: Value, look: Look) -> None:
        self.value, self.look = value, look

    def read(self) -> torch.Tensor:
        """The tensor; its value must be there."""
        base = self.value.tensor
        assert base is not None, "computed first"
        return self.look(base)


class _Strides:
    """Shows a value as autograd saved it: with other sizes and strides."""

    __slots__ = ("original", "view")

    def __init__(self, tensor: torch.Tensor, original: Identity) -> None:
        self.view, self.original = (tensor.size(), tensor.stride(), tensor.storage_offset()), original

    def __call__(self, base: torch.Tensor) -> torch.Tensor:
        original, (size, stride, offset) = self.original, self.view
        if base.stride() != original.stride:  # it was made anew, with strides of its own
            again = torch.empty_strided(original.size, original.stride, dtype=base.dtype, device=base.device)
            base = again.copy_(base)
        return base.as_strided(size, stride, offset - original.offset + base.storage_offset())


def _read(entry: Any) -> Any:
    """What an operator takes for ``entry``; its value must be there."""
    if type(entry) is Value:
        return entry.tensor
    return entry.read() if isinstance(entry, View) else entry


def compute(wanted: Value) -> torch.Tensor:
    """The tensor of ``wanted``, made from what is kept; leaves behind what others still wait for."""
    stack, made, later = [wanted], set[Value](), list[Value]()
    # A function mode of the step, such as a shift's, must not move what is repeated where it was.
    with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
        while stack:
            value = stack[-1]
            if value.tensor is not None:
                stack.pop()
                continue
            missing = [source for source in value.sources if source.tensor is None]
            if missing:
                stack += missing
                continue
            value.tensor = run_recipe(value)
            stack.pop()
            if later or (value in made and not value.fleeting):
                later.append(value)  # the counts are off, after a part of a backward: forget nothing before the end
            else:
                made.add(value)
                used(value)
    for value in later:
        used(value)
    tensor = wanted.tensor
    assert tensor is not None, "the loop ends with it"
    return tensor


def run_recipe(value: Value) -> torch.Tensor:
    """One operator, on inputs that are there."""
    assert value.make is not None, "a dropped value has a recipe"
    for source in value.sources:
        if not source.dropped and source.tensor is not None and source.tensor._version != source.version:
            _complain(source)
    return value.make(*[entry.tensor if type(entry) is Value else _read(entry) for entry in value.inputs])


def used(value: Value) -> None:
    """``value`` has been made: its inputs are asked for once less, unless it will be made again."""
    for source in value.sources:
        if not value.fleeting:
            asked(source)
        elif source.fleeting:
            source.tensor = None


def asked(value: Value) -> None:
    """One of those that need ``value`` has had it; after the last its tensor is forgotten."""
    value.pending -= 1
    if not value.dropped:
        return
    if value.fleeting or value.pending <= 0:
        value.tensor = None
    if value.pending <= 0:
        value.pending = value.wanted_by  # a second backward through the same graph starts anew
        if value.fleeting:
            for source in value.sources:
                asked(source)


def compress(value: Value) -> bool:
    """Keeps a tensor of zeros and one other number, such as the mask of a dropout, in a byte per element.

    Returns:
        Whether it is such a tensor; nothing is changed otherwise.
    """
    mask = value.tensor
    assert mask is not None, "asked when it is saved"
    if not mask.dtype.is_floating_point or not is_host(mask.device) or not mask.numel():
        return False  # devices have operators that save masks as bytes, and finding out would wait for them
    with torch.no_grad(), torch._C._DisableAutocast():
        other, small = mask.amax(), mask.ne(0)
        if not torch.equal(small.to(mask.dtype).mul_(other), mask):
            return False
    value.learn(_expand_mask, (small, other, mask.dtype))
    value.operator = "mask"
    value.drop(mask)
    return True


def park(value: Value, parking: Parking) -> None:
    """Keeps a tensor of a device in the host's memory until backward asks for it."""
    tensor = value.tensor
    assert tensor is not None, "asked when it is saved"
    fetch, slot = parking.park(tensor, value.version, value.name)
    value.learn(fetch, (slot,))
    value.drop(tensor)


def _expand_mask(small: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return small.to(dtype).mul_(other)


def forget_recipe(value: Value) -> None:
    """It is kept after all, and will not ask for its inputs; nor will those that only it would have asked for."""
    stack = [value]
    while stack:
        top = stack.pop()
        for source in top.sources:
            source.pending -= 1
            source.wanted_by -= 1
            if source.dropped and not source.name and not source.wanted_by:
                stack.append(source)
        top.learn(None, ())


def make_fleeting(value: Value) -> None:
    """``value`` is forgotten after every use, with those that nobody saves on the way to it.

    One fleeting value never rests on another one: the work would double at every step.
    """
    on_the_way, stack = [value], list(value.sources)
    while stack:
        source = stack.pop()
        if source.fleeting:
            return
        if not source.name and source.dropped:
            on_the_way.append(source)
            stack += source.sources
    for source in on_the_way:
        source.fleeting = True


def _complain(value: Value) -> NoReturn:
    tensor = value.tensor
    assert tensor is not None, "the caller has looked at it"
    raise RuntimeError(
        f"A tensor that backward needs was changed in place: {value.name or 'a parameter'} of shape "
        f"{list(tensor.shape)}, the output of {value.operator}, has version {tensor._version} instead of "
        f"{value.version}."
    )


class Rematerialisation:
    """Saved-tensor hooks that drop some values and compute them again in backward.

    Args:
        names: Tells which module call is running.
        dropped: Names of the values to drop, if a recipe for them is known.
        fleeting: Those among them to forget after every use, inputs first.
        compressed: Names of masks, which nothing in the graph can make again, to keep in a byte per element.
        parked: Names of values to keep in the host's memory.
        overlap: How many of them may be on their way at once, in each direction.

    Attributes:
        kinds: Types of tensors that it handles; others are kept.
    """

    kinds: tuple[type[torch.Tensor], ...] = (torch.Tensor,)

    def __init__(
        self,
        names: CallNames,
        dropped: Collection[str] = (),
        fleeting: Sequence[str] = (),
        compressed: Collection[str] = (),
        parked: Collection[str] = (),
        overlap: int = 0,
    ) -> None:
        self._names, self._dropped = names, dropped
        self._fleeting = {name: place for place, name in enumerate(fleeting)}
        self._undecided: list[weakref.ref[Value]] = []  # shall be fleeting, once it is known who saves what
        self._compressed, self._parked, self._parking = compressed, parked, Parking(overlap)
        self._values: dict[tuple[Any, ...], weakref.ref[Value]] = {}  # of the last forward
        self._operands, self._want_operands = Operands(), True  # as long as some recipe asks for them
        self._lock = threading.RLock()  # backward has a thread per device, and shifted modules have values on several
        self.refused: dict[str, str] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Forward passes in here drop what is wanted; their backward may come later."""
        self._names.begin()
        self._values.clear()
        pack, operands = (self._pack, self._operands) if self._want_operands else (self.pack, nullcontext())
        self._want_operands = False
        try:
            with COLLECTOR.resting(), torch.autograd.graph.saved_tensors_hooks(pack, self.unpack), operands:
                yield
        finally:
            self._names.end()
            self._parking.settle()
            self._decide_fleeting()

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Likewise, unseen by the mode that notes operands, which would see every attribute."""
        with torch._C.DisableTorchFunction():
            return self.pack(tensor)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called by autograd when it saves a tensor; what it returns is held in its place."""
        node = tensor.grad_fn
        if node is None and (tensor.requires_grad or tensor.nbytes < SMALL):
            return tensor  # a parameter, which lives anyway, or not worth the bookkeeping
        base = tensor._base
        if base is None or base.dtype != tensor.dtype:  # a complex number is not a strided view of its parts
            base = tensor
        elif base.is_leaf and base.requires_grad:
            return tensor
        if tensor.nbytes < SMALL or type(base) not in self.kinds or base.layout is not torch.strided:
            return tensor.detach()
        if tensor.is_conj() or tensor.is_neg():  # the numbers in memory are others
            return tensor.detach()
        value = self.value_of_tensor(base)
        value.pending += 1
        value.wanted_by += 1
        if base is tensor or same_geometry(tensor, base):
            return value
        assert value.identity is not None, "it has just been saved"
        return View(value, _Strides(tensor, value.identity))

    def value_of_tensor(self, base: torch.Tensor) -> Value:
        """The value behind ``base``; the second time the same one."""
        node, version, storage = base.grad_fn, base._version, base.untyped_storage()._cdata
        earlier = None if node is None else known_value(node, base.output_nr)
        if earlier is not None and (before := earlier.identity) is not None:
            if before.storage == storage and before.version == version and before in self._values:
                return earlier
            earlier = None  # of another forward, or written to since
        identity = Identity(storage, version, base.dtype, base.size(), base.stride(), int(base.storage_offset()))
        known = self._values.get(identity)
        value = known() if known is not None else None
        if value is None:
            value = earlier or Value("", "")  # others may be computed from it already, though it is only now saved
            value.name, value.identity, value.dropped = self._names.next_name(), identity, False
            self._values[identity] = weakref.ref(value)
            self._decide(value, base)
        elif node is not None and not value.operator:
            self._decide(value, base)
        return value

    def _decide(self, value: Value, tensor: torch.Tensor) -> None:
        """Keeps or drops ``value``, which is ``tensor`` and has its name, and maybe its producer, just now."""
        node, name = tensor.grad_fn, value.name
        if node is not None and not value.operator:
            value.operator = node.name()
            _register(node, tensor.output_nr, value)
        if node is not None and self.consider(value, node, tensor.output_nr):
            value.version = tensor._version
            value.drop(tensor)
        elif value.tensor is None and not value.dropped:
            value.keep(tensor)
            if name in self._compressed and not compress(value):
                self.refused[name] = "it is not a mask this time"
            elif name in self._parked and not is_host(tensor.device):
                park(value, self._parking)

    def consider(self, value: Value, node: Any, output: int) -> bool:
        """Whether to drop ``value``, now that its name and its producer are known; if so it knows how it is made."""
        if value.name in self._dropped and self.find_recipe(value, node, output):
            if value.name in self._fleeting:
                self._undecided.append(weakref.ref(value))
            return True
        if value.make is not None and not value.dropped:
            forget_recipe(value)
        return False

    def _decide_fleeting(self) -> None:
        """In the order of the plan: at the time of saving, what is on the way may still be saved itself later."""
        values = [value for reference in self._undecided if (value := reference()) is not None]
        self._undecided.clear()
        for value in sorted(values, key=lambda value: self._fleeting[value.name]):
            make_fleeting(value)

    def find_recipe(self, value: Value, node: Any, output: int) -> bool:
        """Whether ``value`` can be made again; if so it knows how."""
        if value.make is not None:
            return True
        try:
            value.learn(*self._recipe(node, output, 0))
        except NotRecomputable as error:
            self.refused[value.name] = str(error)
            return False
        for source in value.sources:
            source.want()
        return True

    def _recipe(self, node: Any, output: int, depth: int) -> tuple[Make, Sequence[Any]]:
        if depth > _MOST_UNSAVED:
            raise NotRecomputable(f"more than {_MOST_UNSAVED} operators in a row save nothing")
        return recipe_for(node.name())(_Node(self, node, output, depth))

    def flowing(self, node: Any, output: int, depth: int) -> Value | View:
        """What flows along an edge of the graph. A view of a value is no value of its own."""
        value = known_value(node, output)
        if value is not None:
            return value
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            value = Value("", "leaf")
            value.keep(node.variable)
        else:
            make, inputs = self._recipe(node, output, depth + 1)
            if name in VIEWS:
                (base,) = inputs
                return View(base, make) if type(base) is Value else View(base.value, _Both(base.look, make))
            value = Value("", name)
            value.learn(make, inputs)
            value.dropped = True
            for source in value.sources:
                source.want()
        _register(node, output, value)
        return value

    def constant(self, node: Any, index: int, most: int) -> Any:
        """An operand of ``node`` that is not part of the graph: a value, a view of one, or a number as it is."""
        self._want_operands = True
        found = operand_of(node, index)
        if not isinstance(found, Reference):
            return found
        value = self.keep_constant(found.base(most))
        return value if found.view is None else View(value, found.look)

    def keep_constant(self, tensor: torch.Tensor) -> Value:
        """The value of such a tensor; nobody may write to it before backward."""
        value = Value("", "constant")
        value.keep(tensor)
        return value

    def read_saved(self, node: Any, name: str) -> Any:
        """What ``node`` saved under ``name``: a value, a view of one, or anything else as it is; ``None`` without.

        Raises:
            NotRecomputable: it is in the hands of others, who would bring it back, or run a region again, right now.
        """
        saved = getattr(node, f"_raw_saved_{name}", None)
        if saved is None:
            return getattr(node, f"_saved_{name}")  # a number
        return self.packed(node, saved)

    def packed(self, node: Any, saved: Any) -> Any:
        """What a saved tensor of ``node`` holds, as :meth:`read_saved` gives it."""
        hook = saved.unpack_hook
        if hook is None or hook == self.unpack:
            return saved.data
        raise NotRecomputable(
            f"what {node.name()} saved is parked, or in a region of torch.utils.checkpoint, or has other hooks"
        )

    def unpack(self, saved: Any) -> torch.Tensor:
        """Called by autograd when backward needs a saved tensor."""
        if isinstance(saved, torch.Tensor):
            return saved
        value = saved if type(saved) is Value else saved.value
        with self._lock:
            if self._undecided:  # a backward inside of the forward's context
                self._decide_fleeting()
            if value.tensor is None:
                compute(value)
            elif not value.dropped and value.tensor._version != value.version:
                _complain(value)
            tensor: torch.Tensor = value.tensor if saved is value else saved.read()
            asked(value)
        return tensor


class _Both:
    """A view of a view."""

    __slots__ = ("first", "then")

    def __init__(self, first: Look, then: Look) -> None:
        self.first, self.then = first, then

    def __call__(self, base: torch.Tensor) -> torch.Tensor:
        return self.then(self.first(base))


def same_geometry(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a view shows its base as it is."""
    return (
        tensor.size() == base.size()
        and tensor.stride() == base.stride()
        and tensor.storage_offset() == base.storage_offset()
    )


def known_value(node: Any, output: int) -> Value | None:
    """The value of that output, if there is one already."""
    known = node.metadata.get((_TAG, output) if output else _TAG)
    return known() if known is not None else None


def _register(node: Any, output: int, value: Value) -> None:
    node.metadata[(_TAG, output) if output else _TAG] = weakref.ref(value)


class _Node:
    """A node of the graph, as a recipe sees it."""

    def __init__(self, owner: Rematerialisation, node: Any, output: int, depth: int) -> None:
        self._owner, self._node, self._depth = owner, node, depth
        self.output = output

    def __getattr__(self, name: str) -> Any:
        """An argument of the operator that is not a tensor."""
        return getattr(self._node, f"_saved_{name}")

    def edge(self, index: int) -> Value | View:
        """The input tensor number ``index``, found along the graph."""
        source, output = self._node.next_functions[index]
        if source is None:
            raise NotRecomputable(f"input {index} of {self._node.name()} is not part of the graph")
        return self._owner.flowing(source, output, self._depth)

    def operand(self, index: int) -> Any:
        """The input tensor number ``index`` along the graph; the operand in its place if there is no such edge."""
        return self.edge(index) if self.has_edge(index) else self.constant()

    def constant(self, index: int = 0) -> Any:
        """Operand number ``index`` of those that are not part of the graph."""
        return self._owner.constant(self._node, index, math.prod(self.shape) * self.dtype.itemsize // 2)

    def saved(self, name: str, edge: int | None = None) -> Any:
        """The input tensor that the operator saved under ``name``; if it did not, the one along ``edge``."""
        if edge is not None:
            source, output = self._node.next_functions[edge]
            known = None if source is None else known_value(source, output)
            if known is not None and known.identity is not None:
                return known  # saved, so nobody may have written to it
        found = self._owner.read_saved(self._node, name)
        if found is not None:
            return found
        if edge is None:
            raise NotRecomputable(f"{self._node.name()} did not save {name}")
        return self.edge(edge)

    def optional(self, name: str) -> Any:
        """Likewise, or ``None``."""
        return self._owner.read_saved(self._node, name)

    def saved_list(self, name: str) -> list[Any]:
        """The tensors that the operator saved under ``name``, where it is a list; ``None`` for those that are none."""
        return [self._owner.packed(self._node, saved) for saved in getattr(self._node, f"_raw_saved_{name}")]

    def leaf(self, index: int) -> torch.Tensor | None:
        """Input ``index`` itself, if it is a parameter."""
        source = self._node.next_functions[index][0]
        return getattr(source, "variable", None)

    @property
    def num_edges(self) -> int:
        """Input tensors."""
        return len(self._node.next_functions)

    def has_edge(self, index: int) -> bool:
        """Whether input ``index`` is part of the graph."""
        return self._node.next_functions[index][0] is not None

    @property
    def shape(self) -> list[int]:
        """Of the output."""
        return list(self._node._input_metadata[self.output].shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the output."""
        dtype: torch.dtype = self._node._input_metadata[self.output].dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Of the output."""
        device: torch.device = self._node._input_metadata[self.output].device
        return device
