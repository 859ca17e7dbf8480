"""Saved-tensor hooks that keep some values of the autograd graph and compute the others again.

Every tensor that autograd saves passes a pack hook, with the graph node that produced it. The node keeps what it needs
for its own backward, and its edges lead to the nodes before it: so the graph is a tape, and most values can be computed
again from it. :class:`Rematerialisation` keeps some of them and drops the others. Nothing is wrapped, no module runs
twice, no random number is drawn again (a dropout's mask is a saved tensor like any other), and every operator is
repeated on the same bits, so the gradients are the same bits.

    forward    pack(tensor) -> Value (or View)  kept: the tensor       dropped: how to make it, and from which Values
    backward   unpack(Value) -> tensor          computed by need, shared until the last that needs it has had it

A node knows its values by weak references in its metadata.

All this runs for every saved tensor of every step, so it makes few objects and calls few functions.
"""

import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.memory.execute.call_arguments import Argument
from lightning_dpx.memory.execute.calls import Call, OutputKey, Replay, base_of, returned_by, select_output
from lightning_dpx.memory.execute.distributed_tensors import DistributedValue, Origin, origin_of, part_of
from lightning_dpx.memory.execute.gc_pause import COLLECTOR
from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.offload import Offloader
from lightning_dpx.memory.execute.recipes import RECIPES, VIEWS, NotNoted, NotRecomputable, recipe_for
from lightning_dpx.memory.execute.transforms import STEP_ASIDE
from lightning_dpx.memory.execute.twins import Twins
from lightning_dpx.memory.execute.untracked_inputs import UntrackedInputs, WeakTensor, copy_of, operand_of
from lightning_dpx.memory.execute.values import (
    Both,
    Identity,
    Make,
    Strides,
    Unnamed,
    Value,
    View,
    compress,
    compute,
    forget_recipe,
    keep,
    make_uncached,
    offload,
    refuse_changed,
    release_use,
    same_geometry,
)
from lightning_dpx.torch_compat import (
    DisableTorchFunction,
    is_functorch_wrapped_tensor,
    key_of,
    output_metadata,
    tree_leaves,
    version_counter,
)

Pack = Callable[[torch.Tensor], Any]
_TAG = "lightning_dpx.values"
_GIVEN = "lightning_dpx.given"  # to calls: what is made from it otherwise cannot count on those calls being made again
_MOST_UNSAVED = 64  # operators in a row that save nothing; a longer chain would recurse too deeply
_WORTH_A_CALL = 16  # arguments of a call may be so many times larger: the statistics of a norm are not worth it
SMALL = 4096  # bytes that are not worth the bookkeeping


class Rematerialisation:
    """Saved-tensor hooks that drop some values and compute them again in backward.

    Args:
        names: Tells which module call is running.
        dropped: Names of the values to drop, if a recipe for them is known.
        uncached: Those among them to forget after every use, inputs first.
        compressed: Names of masks, which nothing in the graph can make again, to keep in a byte per element.
        offloaded: Names of values to keep in the host's memory.
        prefetch_depth: How many of them may be on their way at once, in each direction.
        known: Names of all values that something was decided about; nothing, if nobody looks at what is ``unknown``.
        twins: Decides about values that nothing was decided about.

    Attributes:
        names: Likewise.
        twins: Likewise.
        unknown: Bytes of values that a backward has asked for and that are not ``known``, by name.
        kinds: Types of tensors that it handles; others are kept.
    """

    kinds: tuple[type[torch.Tensor], ...] = (torch.Tensor,)

    def __init__(
        self,
        names: CallNames,
        dropped: Collection[str] = (),
        uncached: Sequence[str] = (),
        compressed: Collection[str] = (),
        offloaded: Collection[str] = (),
        prefetch_depth: int = 0,
        known: Collection[str] = (),
        twins: Twins | None = None,
    ) -> None:
        self._forward = _Forward(0.0)
        self.twins: Twins | None = twins
        self._known = known
        self.unknown: dict[str, int] = dict[str, int]()
        self.names = names
        if names.again:
            names.listener = _HoldsArguments()
        self._dropped = dropped
        self._uncached = {name: number for number, name in enumerate(uncached)}
        self._undecided: list[weakref.ref[Value]] = []  # shall be uncached, once it is known who saves what
        self._compressed = compressed
        self._offloaded = offloaded
        self._offloading = Offloader(prefetch_depth)
        self._values: dict[Identity, weakref.ref[Value]] = {}  # of the last forward
        self._again: dict[Identity, tuple[Any, Any]] = {}  # of what was made again, with its storage; both weakly
        self._operands = UntrackedInputs()
        self._want_operands = True  # as long as some recipe asks for them
        self._lock = threading.RLock()  # backward has a thread per device, and shifted modules have values on several
        self.refused: dict[str, str] = {}
        self.reached: list[weakref.ref[Value]] | None = None  # that others are made from, found along the graph
        self._origins: dict[int, Origin] = {}  # by id, of the part of a distributed tensor that is being packed

    @contextmanager
    def active(self, inputs: Any = (), *, counts_waiting: bool = False) -> Iterator[None]:
        """Forward passes in here drop what is wanted; their backward may come later.

        Args:
            inputs: What the forward takes: no memory of the step, whoever has made it.
            counts_waiting: Whether :attr:`waiting` will be asked for, for which all values are looked at.
        """
        self.names.begin()
        if self.twins is not None:
            self.twins.given = _storages_in(inputs)
        waiting = self._share_waiting() * (self._forward.waiting + 1) if counts_waiting else 0.0
        self._forward = _Forward(waiting)
        self._values.clear()
        # Noting costs some us for every call of a torch function. So the first forward does it, and
        # later ones only if a recipe has asked for an operand in the forward before.
        noting = self._want_operands and not self.names.compiled  # code is compiled for the modes that are on
        self._want_operands = False
        pack: Pack = self._counted if self.names.again else self.pack
        if self.names.is_distributed:
            pack = partial(self._by_parts, pack)
        wrap: Callable[[Pack], Pack] = _unseen if noting else _as_it_is
        if self.names.compiled:
            wrap = torch.compiler.disable  # or it would be compiled as well
        try:
            with COLLECTOR.resting(), self.hooks(pack, wrap, noting=noting):
                yield
        finally:
            self.names.end()
            self._offloading.settle()
            self._decide_uncached()

    def present(self) -> list[Value]:
        """The values of the last forward that something still holds."""
        return [value for reference in self._values.values() if (value := reference()) is not None]

    @property
    def waiting(self) -> float:
        """How many forwards wait for their backward beside the last one; part of one counts as such."""
        return self._forward.waiting

    def _share_waiting(self) -> float:
        """Which share of what the last forward has saved waits for a backward."""
        waiting = total = 0
        for identity, reference in self._values.items():
            num_bytes = math.prod(identity.size) * identity.dtype.itemsize
            total += num_bytes
            if reference() is not None:
                waiting += num_bytes
        return waiting / total if total else 0.0

    def widen(self) -> None:
        """From the next forward on, what has a dropped twin is dropped."""
        if self.twins is not None:
            self.twins.of_all = True

    def peak_of_other_step(self) -> int:
        """About what a backward of the last forward will take; 0 if that forward was as planned for."""
        return self.twins.peak_of_backward(self.present()) if self._forward.differs and self.twins is not None else 0

    def remove(self) -> None:
        """Takes the hooks off the modules."""
        self.names.remove()

    @contextmanager
    def hooks(self, pack: Pack, wrap: Callable[[Pack], Pack], *, noting: bool) -> Iterator[None]:
        """The hooks of a forward: what calls ``pack``, as ``wrap`` makes it, and notes operands if wanted."""
        operands = self._operands if noting else nullcontext()
        with STEP_ASIDE.hooks(wrap(pack), self.unpack), operands:
            yield

    def _counted(self, tensor: torch.Tensor) -> Any:
        """:meth:`pack`, with a number for every tensor, by which a call that is made again knows it."""
        self.names.count()
        return self.pack(tensor)

    def _by_parts(self, pack: Pack, tensor: torch.Tensor) -> Any:
        """``pack``, of a distributed tensor for the part of it that is here."""
        part = part_of(tensor)
        origin = None if part is None else origin_of(tensor, part, known_value)
        if part is None or origin is None:
            return pack(tensor)
        # Hooks take a tensor and nothing else, and ``pack`` may be wrapped: so what was found out
        # about the part waits for :meth:`pack` under the part's id.
        self._origins[id(part)] = origin
        try:
            return DistributedValue(tensor, pack(part))
        finally:
            del self._origins[id(part)]

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called by autograd when it saves a tensor; what it returns is held in its place."""
        if self.names.in_compiled_code:
            return Unnamed(tensor.detach(), version_counter(tensor))  # made by no operator that is known
        # Sparse and jagged tensors, and those of a running transform of torch.func, have no single
        # block of memory to be known by.
        if tensor.layout is not torch.strided or is_functorch_wrapped_tensor(tensor):
            return Unnamed(tensor.detach(), version_counter(tensor))
        node = tensor.grad_fn
        if node is None and (tensor.requires_grad or tensor.nbytes < SMALL):
            return Unnamed(tensor, version_counter(tensor))  # it lives anyway, or is not worth the bookkeeping
        origin = self._origins.get(id(tensor)) if self._origins else None
        base = base_of(tensor) if origin is None else origin.base
        # The memory of a view of a parameter stays, whatever a plan does.
        if origin is None and base is not tensor and base.is_leaf and base.requires_grad:
            return Unnamed(tensor, version_counter(tensor))
        if tensor.nbytes < SMALL or type(tensor) not in self.kinds or type(base) not in self.kinds:
            return Unnamed(tensor.detach(), version_counter(tensor))
        if tensor.is_conj() or tensor.is_neg():  # the numbers in memory are others
            return Unnamed(tensor.detach(), version_counter(tensor))
        value = self.value_of_tensor(base, origin)
        value.want()
        if base is tensor or same_geometry(tensor, base):
            return value
        return View(value, Strides(tensor, value.identity or identity_of(base)))

    def value_of_tensor(self, base: torch.Tensor, origin: Origin | None = None) -> Value:
        """The value behind ``base``; the second time the same one."""
        node = base.grad_fn if origin is None else origin.node
        output = base.output_nr if origin is None else origin.output
        version = version_counter(base)
        storage = key_of(base.untyped_storage())
        earlier = None if node is None else known_value(node, output)
        # An argument that was kept for one call is saved by an operator now: from here on it has a
        # name, and may be decided about like any other value.
        if earlier is None and node is not None and self.names.again:
            earlier = known_value(node, output, _GIVEN)
        if earlier is not None and (before := earlier.identity) is not None:
            if before.storage == storage and before.version == version and before in self._values:
                return earlier
            earlier = None  # of another forward, or written to since
        identity = Identity(storage, version, base.dtype, base.size(), base.stride(), int(base.storage_offset()))
        known = self._values.get(identity)
        value = known() if known is not None else None
        if value is None and self._again:
            value = self._again.get(identity, _NOT_AGAIN)[0]()
        if value is None:
            value = earlier or Value("", "")  # others may be computed from it already, though it is only now saved
            value.name = self.names.next_name()
            value.identity = identity
            value.dropped = False
            self._values[identity] = weakref.ref(value)
            self._decide(value, base, node, output)
        elif node is not None and not value.operator:
            # It was saved first by a tensor without a producer, detached for instance. With the
            # producer there may be a recipe after all.
            self._decide(value, base, node, output)
        return value

    def know_again(self, value: Value, tensor: torch.Tensor) -> None:
        """As long as its memory lives, ``tensor`` is ``value``: a backward that records gradients saves it once more.

        Otherwise it would get a name of its own, and all values after it the names of others.
        """
        identity = identity_of(tensor)
        # An identity is good only while the memory lives: its address may be given out again then.
        storage = weakref.ref(tensor.untyped_storage(), lambda _: self._again.pop(identity, None))
        self._again[identity] = weakref.ref(value), storage

    def _decide(self, value: Value, tensor: torch.Tensor, node: Any | None, output: int) -> None:
        """Keeps or drops ``value``, which is ``tensor`` and has its name, and maybe its producer, just now."""
        name = value.name
        if node is not None and not value.operator:
            value.operator = node.name()
            _register(node, output, value)
        if (node is not None or self.names.again) and self.consider(value, node, output):
            value.drop(tensor)
        elif value.tensor is None and not value.dropped:
            value.keep(tensor)
            if self.twins is None or self.twins.is_of_step(value):
                self._forward.kept += tensor.nbytes
            if name in self._compressed:
                # It is expanded from no other value, so whether it stays is known at once.
                if compress(value):
                    value.uncached = name in self._uncached
                else:
                    self.refused[name] = "it is not a mask this time"
            # A plan that was made for a device can be followed on the host, but for this.
            elif name in self._offloaded and not is_host(tensor.device):
                offload(value, self._offloading)

    def consider(self, value: Value, node: Any | None, output: int) -> bool:
        """Whether to drop ``value``, now that its name and its producer are known; if so it knows how it is made."""
        twins = self.twins
        is_other = twins is not None and twins.is_other(value)
        self._forward.differs = self._forward.differs or is_other
        by_twins = twins if is_other or (twins is not None and twins.of_all) else None
        is_wanted = value.name in self._dropped or (by_twins is not None and by_twins.drop(value))
        if is_wanted and self.can_make(value, node, output, by_twins):
            if value.name in self._uncached:
                self._undecided.append(weakref.ref(value))
            return True
        # Others were made from it before it was saved itself, so it has a recipe. It is kept now
        # and will never run that: what the recipe takes must not wait for it.
        if value.make is not None and not value.dropped:
            forget_recipe(value)
        return False

    def can_make(self, value: Value, node: Any | None, output: int, twins: Twins | None) -> bool:
        """Whether it can be made again; as far as ``twins`` tell, also whether there is room for that."""
        if not self.find_recipe(value, node, output):
            return False
        if twins is None or twins.fits(value, self._forward.kept):
            return True
        self.refused[value.name] = "there is no room to make it again, with all that it is made from"
        return False

    def _decide_uncached(self) -> None:
        """In the order of the plan: at the time of saving, what is on the way may still be saved itself later."""
        values = [value for reference in self._undecided if (value := reference()) is not None]
        self._undecided.clear()
        for value in sorted(values, key=lambda value: self._uncached[value.name]):
            make_uncached(value)

    def find_recipe(self, value: Value, node: Any | None, output: int) -> bool:
        """Whether ``value``, which is being saved, can be made again; if so it knows how."""
        if value.make is not None:
            return True
        try:
            value.learn(*self._way_to(value, node, output))
        except NotRecomputable as error:
            self.refused[value.name] = str(error)
            return False
        for source in value.sources:
            source.want()
        return True

    def _way_to(self, value: Value, node: Any | None, output: int) -> tuple[Make, Sequence[Any]]:
        """Its recipe; where there is none, the call that makes it."""
        try:
            if node is None:
                raise NotRecomputable("it does not come from the graph")
            return self._recipe(node, output, 0, value.identity)
        except NotRecomputable:
            identity = value.identity
            if identity is None or not self.names.again:
                raise
            call = self.names.call_that_makes(identity.storage)
            # Until it is made again, the call keeps its arguments.
            if (
                call is None
                or _WORTH_A_CALL * math.prod(identity.size) * identity.dtype.itemsize < call.arguments.num_bytes
            ):
                raise
            # This tensor has been counted already, before it was packed.
            key = OutputKey("saved", self.names.saved - call.saved - 1)
            return select_output, self._picked(call, key, identity.size, identity.dtype)

    def _recipe(
        self, node: Any, output: int, depth: int, identity: Identity | None = None
    ) -> tuple[Make, Sequence[Any]]:
        if depth > _MOST_UNSAVED:
            raise NotRecomputable(f"more than {_MOST_UNSAVED} operators in a row save nothing")
        try:
            return recipe_for(node.name())(Node(self, node, output, depth, identity))
        except NotRecomputable:
            call_and_key = returned_by(node, output)
            if call_and_key is None:
                raise
            like = output_metadata(node)[output]
            return select_output, self._picked(*call_and_key, torch.Size(like.shape), like.dtype)

    def _picked(self, call: Call, key: OutputKey, size: torch.Size, dtype: torch.dtype) -> tuple[Value, OutputKey]:
        """The value that ``call`` becomes, and which output to select from it."""
        if call.obstacle:
            raise NotRecomputable(f"{call.name!r} cannot be called again: {call.obstacle}")
        outcome: Value | None = call.outcome() if call.outcome is not None else None
        if outcome is None:
            outcome = Value("", f"a call of {type(call.module).__name__}")
            outcome.learn(Replay(call), [self._argument(argument) for argument in call.arguments.tensors])
            outcome.dropped = True
            for source in outcome.sources:
                source.want()
            # Weakly: the value holds the call, and cycles would live until Python looks for them,
            # which it does not while a planned forward runs.
            call.outcome = weakref.ref(outcome)
        assert isinstance(outcome.make, Replay), "it is a call"
        outcome.make.want(key, size, dtype)
        return outcome, key

    def _argument(self, argument: Argument) -> Value | View:
        """The value of what a call takes."""
        tensor = argument.tensor()
        if argument.source is not None:
            try:
                return self.flowing(*argument.source, 0)
            except NotRecomputable:
                if tensor is None:
                    raise
        if tensor is None:
            raise NotRecomputable("an argument of the call is gone")
        if argument.source is None:
            return self.keep_argument(argument, tensor)
        # It is marked apart from the values of the graph: no recipe may find it there and count on
        # a tensor that is kept for calls only.
        value = known_value(*argument.source, _GIVEN)
        if value is None:
            value = self.keep_argument(argument, tensor)
            value.operator = argument.source[0].name()
            _register(*argument.source, value, _GIVEN)
        return value

    def keep_argument(self, argument: Argument, tensor: torch.Tensor) -> Value:
        """The value of ``tensor``, which is that argument of a call."""
        return self.keep_constant(tensor)

    def flowing(self, node: Any, output: int, depth: int) -> Value | View:
        """What flows along an edge of the graph. A view of a value is no value of its own."""
        value = known_value(node, output)
        if value is not None:
            if self.reached is not None:
                self.reached.append(weakref.ref(value))
            return value
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            # The node holds the parameter, which is there anyway.
            value = Value("", "leaf")
            value.keep(node.variable)
        else:
            make, inputs = self._recipe(node, output, depth + 1)
            if name in VIEWS and make is not select_output:  # a call that is made again gives the view itself
                (base,) = inputs
                return View(base, make) if type(base) is Value else View(base.value, Both(base.look, make))
            value = Value("", name)
            value.learn(make, inputs)
            value.dropped = True
            for source in value.sources:
                source.want()
        _register(node, output, value)
        if self.reached is not None:
            self.reached.append(weakref.ref(value))
        return value

    def constant(self, node: Any, index: int, most: int) -> Any:
        """An operand of ``node`` that is not part of the graph: a value, a view of one, or a number as it is."""
        self.want_operands(node)
        operand = operand_of(node, index)
        if not isinstance(operand, WeakTensor):
            return operand
        value = self.keep_constant(operand.base(most))
        return value if operand.view is None else View(value, operand.look)

    def want_operands(self, node: Any) -> None:
        """The next step notes operands, too: a recipe has asked for those of ``node``."""
        self._want_operands = True

    def keep_constant(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor outside of the graph; it may not be written to before backward."""
        value = Value("", "constant")
        value.keep(tensor)
        return value

    def read_saved(self, node: Any, name: str) -> Any:
        """What ``node`` saved under ``name``: a value, a view of one, or anything else as it is; ``None`` without.

        Raises:
            NotRecomputable: it is in the hands of others, who would bring it back, or run a region again, right now.
        """
        # ``_saved_{name}`` would call the unpack hook, ``_raw_saved_{name}`` does not; an argument
        # that is no tensor has only the former.
        saved = getattr(node, f"_raw_saved_{name}", None)
        if saved is None:
            return getattr(node, f"_saved_{name}")  # a number
        held = self.packed(node, saved)
        if held is None:
            _refuse_released(node, name)
        return held

    def packed(self, node: Any, saved: Any) -> Any:
        """What a saved tensor of ``node`` holds, as :meth:`read_saved` gives it."""
        hook = saved.unpack_hook
        if hook == self.unpack:  # a bound method is another object every time
            if type(saved.data) is DistributedValue:
                raise NotRecomputable(f"{node.name()} may talk to other processes")
            return saved.data
        if hook is None:  # saved where no hooks were on
            return _unnamed(saved.data)
        raise NotRecomputable(
            f"what {node.name()} saved is offloaded, or in a region of torch.utils.checkpoint, or has other hooks"
        )

    def is_unknown(self, name: str) -> bool:
        """Whether nothing was decided about the value of that name."""
        return name not in self._known

    def unpack(self, saved: Any) -> torch.Tensor:
        """Called by autograd when backward needs a saved tensor."""
        if type(saved) is Unnamed:
            return saved.read()
        if type(saved) is DistributedValue:
            return saved.read(self.unpack)
        value = saved if type(saved) is Value else saved.value
        with self._lock:
            if self._undecided:  # a backward inside of the forward's context
                self._decide_uncached()
            # Autograd checks versions of the tensors that it holds itself, and not behind hooks.
            if value.counter is not None and version_counter(value.counter) != value.version:
                refuse_changed(value)
            base = compute(value) if value.tensor is None else value.tensor
            if value.dropped:
                if torch.is_grad_enabled():
                    self.know_again(value, base)
            elif version_counter(base) != value.version:
                refuse_changed(value)
            if self._known and value.operator and self.is_unknown(value.name):
                self.unknown[value.name] = base.nbytes
            # A view is read before the use is released, which may forget the tensor.
            tensor: torch.Tensor = base if saved is value else saved.read()
            release_use(value)
        return tensor


def _storages_in(inputs: Any) -> set[Any]:
    """The memory of the tensors among ``inputs``."""
    found = set()
    for leaf in tree_leaves(inputs):
        # Others have several storages, or none.
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            found.add(key_of(leaf.untyped_storage()))
    return found


class _Forward:
    """What is known of the last forward, which may still run.

    Attributes:
        waiting: How many forwards before it wait for their backward.
        kept: Bytes that it keeps so far.
        differs: Whether it is another one than the planned one.
    """

    __slots__ = ("differs", "kept", "waiting")

    def __init__(self, waiting: float) -> None:
        self.waiting: float = waiting
        self.kept: int = 0
        self.differs: bool = False


class _HoldsArguments:
    """Keeps what a call takes and nothing can make again, until the values are saved that are made from the call.

    A profile keeps it from the first of these values on, which a plan may keep; when the others are saved, the argument
    may be gone. The forecast counts it.
    """

    def begins(self, call: Call) -> None:
        """The call takes its arguments."""
        for argument in call.arguments.tensors:
            # What a recipe makes again needs not be there when the last of the values is saved.
            if argument.source is None or argument.source[0].name() not in RECIPES:
                argument.hold()

    def ends(self, call: Call) -> None:
        """Nothing more is to be kept."""


_NOT_AGAIN: tuple[Any, Any] = (lambda: None), None


def identity_of(base: torch.Tensor) -> Identity:
    """The identity of ``base``, by which it is known again."""
    storage = key_of(base.untyped_storage())
    offset = int(base.storage_offset())
    return Identity(storage, version_counter(base), base.dtype, base.size(), base.stride(), offset)


def _unnamed(saved: Any) -> Any:
    """What autograd holds itself, without the graph that led to it."""
    if not isinstance(saved, torch.Tensor) or (saved.ndim == 0 and not saved.requires_grad):
        return saved  # a number, which may come as a tensor
    return keep(saved)


def _as_it_is(pack: Pack) -> Pack:
    return pack


def _unseen(pack: Pack) -> Pack:
    """``pack``, unseen by the mode that notes operands, which would see every attribute."""

    def unseen(tensor: torch.Tensor) -> Any:
        with DisableTorchFunction():
            return pack(tensor)

    return unseen


def known_value(node: Any, output: int, tag: str = _TAG) -> Value | None:
    """The value of that output, if there is one already."""
    # Most nodes have one output; for that one no tuple is made, here and in :func:`_register`.
    known = node.metadata.get((tag, output) if output else tag)
    return known() if known is not None else None


def _refuse_released(node: Any, name: str) -> None:
    """Where a node has nothing under ``name``, it may be because a backward of the step's own has used it up.

    Raises:
        NotRecomputable: that is so.
    """
    try:
        getattr(node, f"_saved_{name}")
    except RuntimeError as error:
        raise NotRecomputable(f"a backward of the step has used up what {node.name()} saved") from error


def _register(node: Any, output: int, value: Value, tag: str = _TAG) -> None:
    """Marks the output as ``value``, weakly, so that a node keeps no value alive."""
    node.metadata[(tag, output) if output else tag] = weakref.ref(value)


class Node:
    """A node of the graph, as a recipe sees it."""

    def __init__(
        self, owner: Rematerialisation, node: Any, output: int, depth: int, identity: Identity | None = None
    ) -> None:
        self._owner = owner
        self._node = node
        self._depth = depth
        self._identity = identity
        self.output = output

    def __getattr__(self, name: str) -> Any:
        """An argument of the operator that is not a tensor.

        Raises:
            NotNoted: the node has none of this name.
        """
        try:
            return getattr(self._node, f"_saved_{name}")
        except AttributeError as error:
            raise NotNoted(f"{self._node.name()} of torch {torch.__version__} notes no {name}") from error

    def saves(self, name: str) -> bool:
        """Whether the operator has saved a tensor under ``name``."""
        # To ask for ``_saved_{name}`` would unpack it: a use that is none, and that looks like a backward of a step.
        return hasattr(self._node, f"_raw_saved_{name}")

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
        # A tensor of the step that has to be kept for this must be worth it: no more than half of
        # what goes in exchange.
        most = math.prod(self.shape) * self.dtype.itemsize // 2
        return self._owner.constant(self._node, index, most)

    def copies(self, *names: str) -> list[torch.Tensor]:
        """What these inputs held when the operator ran, of those that are written to without a new version."""
        self._owner.want_operands(self._node)
        return [copy_of(self._node, name) for name in names]

    def saved(self, name: str, edge: int | None = None) -> Any:
        """The input tensor that the operator saved under ``name``; if it did not, the one along ``edge``."""
        if edge is not None:
            source, output = self._node.next_functions[edge]
            known = None if source is None else known_value(source, output)
            if known is not None and known.identity is not None:
                # The node's own saved tensor would be found in later steps as well. Where it has
                # none, this value has to be named in each of them: the routine is told of it.
                if self._owner.reached is not None and self._owner.read_saved(self._node, name) is None:
                    self._owner.reached.append(weakref.ref(known))
                return known  # saved, so it may not have been written to
        saved = self._owner.read_saved(self._node, name)
        if saved is not None:
            return saved
        if edge is None:
            raise NotRecomputable(f"{self._node.name()} did not save {name}")
        return self.edge(edge)

    def optional(self, name: str) -> Any:
        """The tensor that the operator saved under ``name``, or ``None``."""
        return self._owner.read_saved(self._node, name)

    def saved_list(self, name: str) -> list[Any]:
        """The tensors that the operator saved under ``name``, where it is a list; ``None`` for those that are none."""
        raw = getattr(self._node, f"_raw_saved_{name}")
        entries = [self._owner.packed(self._node, saved) for saved in raw]
        # ``None`` is an index that was left out, as in ``x[:, index]``, or all were used up.
        if any(entry is None for entry in entries):
            _refuse_released(self._node, name)
        return entries

    @property
    def saved_strides(self) -> tuple[int, ...] | None:
        """The strides of the output where it is saved; ``None`` elsewhere."""
        return None if self._identity is None else self._identity.stride

    @property
    def num_edges(self) -> int:
        """The number of input tensors, also of those without an edge."""
        return len(self._node.next_functions)

    def has_edge(self, index: int) -> bool:
        """Whether input ``index`` is part of the graph."""
        return self._node.next_functions[index][0] is not None

    @property
    def shape(self) -> list[int]:
        """The shape of the output."""
        return list(output_metadata(self._node)[self.output].shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the output."""
        if self._identity is not None:  # the metadata are made anew for every look, and for all outputs
            return self._identity.dtype
        dtype: torch.dtype = output_metadata(self._node)[self.output].dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """The device of the output."""
        device: torch.device = output_metadata(self._node)[self.output].device
        return device
