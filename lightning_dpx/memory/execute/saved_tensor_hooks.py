"""Saved-tensor hooks that keep some values of the autograd graph and compute the others again.

Every tensor that autograd saves passes a pack hook, with the graph node that produced it. :class:`Rematerialization`
keeps some of them and drops the others, which are computed again from the graph (``graph_tape.py``). Nothing is
wrapped, no module runs twice, no random number is drawn again (a dropout's mask is a saved tensor like any other), and
every operator is repeated on the same bits, so the gradients are the same bits.

    forward    pack(tensor) -> Value (or View)  kept: the tensor       dropped: how to make it, and from which Values
    backward   unpack(Value) -> tensor          computed by need, shared until the last that needs it has had it

All this runs for every saved tensor of every step, so it makes few objects and calls few functions.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_dpx.devices import is_host
from lightning_dpx.memory.execute.calls import Call, base_of
from lightning_dpx.memory.execute.distributed_tensors import DistributedValue, Origin, origin_of, part_of
from lightning_dpx.memory.execute.graph_tape import GIVEN, GraphTape, known_value, mark_output
from lightning_dpx.memory.execute.grown_values import GrownValues
from lightning_dpx.memory.execute.known_values import KnownValues
from lightning_dpx.memory.execute.largest_inputs import tensors_in
from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.offload import Offloader
from lightning_dpx.memory.execute.recipes import RECIPES
from lightning_dpx.memory.execute.recomputation import compute, release_use
from lightning_dpx.memory.execute.similar_values import SimilarValues
from lightning_dpx.memory.execute.stored_otherwise import compress, offload
from lightning_dpx.memory.execute.tensor_identity import Identity, identity_of
from lightning_dpx.memory.execute.transforms import STEP_ASIDE
from lightning_dpx.memory.execute.untracked_inputs import UntrackedInputs, WeakTensor, has_one_block
from lightning_dpx.memory.execute.values import Strides, Unnamed, Value, View, make_uncached, same_geometry
from lightning_dpx.memory.execute.write_checks import refuse_changed
from lightning_dpx.python_objects.gc_pause import COLLECTOR
from lightning_dpx.torch_compat import (
    DisableTorchFunction,
    is_functorch_wrapped_tensor,
    key_of,
    version_counter,
    view_base,
)

Pack = Callable[[torch.Tensor], Any]
SMALL = 4096  # bytes that are not worth the bookkeeping


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueActions:
    """What a plan says of values, by name.

    Attributes:
        dropped: Those to drop, if a recipe for them is known.
        uncached: Those among them to forget after every use, inputs first.
        compressed: Masks, which nothing in the graph can make again, to keep in a byte per element.
        offloaded: Those to keep in the host's memory.
        prefetch_depth: How many of these may be on their way at once, in each direction.
        known: All that something was decided about; nothing, if what is unknown is not looked at.
        sizes: Bytes of these in the planned step, by name; nothing, if no growth is looked for.
    """

    dropped: Collection[str] = ()
    uncached: Sequence[str] = ()
    compressed: Collection[str] = ()
    offloaded: Collection[str] = ()
    prefetch_depth: int = 0
    known: Collection[str] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)


class Rematerialization(GraphTape):
    """Saved-tensor hooks that drop some values and compute them again in backward.

    Args:
        names: Tells which module call is running.
        actions: What is done to which values.
        similar: Decides about values that nothing was decided about.

    Attributes:
        actions: As given.
        similar: As given.
        unknown: Bytes of values that a backward has asked for and that are not known, by name.
        known: The values of the last forward.
        growth: How much larger values are than the planned ones; ``None`` where nothing looks for that.
        kinds: Types of tensors that it handles; others are kept.
    """

    kinds: tuple[type[torch.Tensor], ...] = (torch.Tensor,)

    def __init__(
        self, names: CallNames, actions: ValueActions | None = None, similar: SimilarValues | None = None
    ) -> None:
        super().__init__(names)
        self.actions: ValueActions = ValueActions() if actions is None else actions
        self.similar: SimilarValues | None = similar
        self.unknown: dict[str, int] = dict[str, int]()
        self.known: KnownValues = KnownValues()
        self.growth: GrownValues | None = GrownValues(self.actions.sizes) if self.actions.sizes else None
        self._forward = _Forward(0.0)
        if names.again:
            names.listener = _HoldsArguments()
        self._uncached_order = {name: number for number, name in enumerate(self.actions.uncached)}
        self._undecided: list[weakref.ref[Value]] = []  # shall be uncached, once it is known who saves what
        self._offloading = Offloader(self.actions.prefetch_depth)
        self._operands = UntrackedInputs()
        self._lock = threading.RLock()  # backward has a thread per device, and shifted modules have values on several
        self._origins: dict[int, Origin] = {}  # by id, of the part of a distributed tensor that is being packed

    @contextmanager
    def active(self, inputs: Any = (), *, counts_waiting: bool = False) -> Iterator[None]:
        """Forward passes in here drop what is wanted; their backward may come later.

        Args:
            inputs: What the forward takes: no memory of the step, wherever it was made.
            counts_waiting: Whether :attr:`waiting` will be asked for, for which all values are looked at.
        """
        self.names.begin()
        if self.similar is not None:
            self.similar.given = _storages_in(inputs)
        waiting = self.known.share_waiting() * (self._forward.waiting + 1) if counts_waiting else 0.0
        self._forward = _Forward(waiting)
        self.known.begin()
        if self.growth is not None:
            self.growth.begin()
        # Noting costs some us for every call of a torch function. So the first forward does it, and
        # later ones only if a recipe has asked for an operand in the forward before.
        noting = self.needs_operands and not self.names.runs_code  # code is compiled for the modes that are on
        self.needs_operands = False
        pack: Pack = self._counted if self.names.again else self.pack
        if self.names.is_distributed:
            pack = partial(self._by_parts, pack)
        wrap: Callable[[Pack], Pack] = _unseen if noting else _as_it_is
        if self.names.runs_code:
            wrap = torch.compiler.disable  # or it would be compiled as well
        try:
            with COLLECTOR.resting(), self.hooks(pack, wrap, noting=noting):
                yield
        finally:
            self.names.end()
            if self.growth is not None:
                self.growth.end()
            self._offloading.settle()
            self._decide_uncached()

    def passes(self, inputs: Any) -> bool:
        """Whether a forward only has to be counted, and is by this; one that takes ``inputs``."""
        return False

    @property
    def can_tell(self) -> bool:
        """Whether steps are noticed that are other ones than the planned one."""
        return self.similar is not None

    @property
    def waiting(self) -> float:
        """How many forwards wait for their backward beside the last one; part of one counts as such."""
        return self._forward.waiting

    def widen(self) -> None:
        """From the next forward on, what is similar to a dropped value is dropped."""
        if self.similar is not None:
            self.similar.of_all = True

    def peak_of_other_step(self) -> int:
        """About what the last forward has taken, or a backward of it will; 0 if that forward was as planned for."""
        if self.similar is None or not self._forward.differs:
            return 0
        return max(self._forward.most, self.similar.peak_of_backward(self.known.present()))

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
        # Sparse and nested tensors, and those of a running transform of torch.func, have no single
        # block of memory to be known by.
        if not has_one_block(tensor) or is_functorch_wrapped_tensor(tensor):
            return Unnamed(tensor.detach(), version_counter(tensor))
        node = tensor.grad_fn
        is_small = self.bytes_of(tensor) < SMALL
        if node is None and (tensor.requires_grad or is_small):
            return Unnamed(tensor, version_counter(tensor))  # it lives anyway, or is not worth the bookkeeping
        origin = self._origins.get(id(tensor)) if self._origins else None
        base = base_of(tensor) if origin is None else origin.base
        # The memory of a view of a parameter stays, whatever a plan does. One of complex numbers is
        # seen as another tensor than its real parts.
        if origin is None and (seen := view_base(tensor)) is not None and _is_parameter(seen):
            return Unnamed(tensor if seen.requires_grad else tensor.detach(), version_counter(tensor))
        if is_small or type(tensor) not in self.kinds or type(base) not in self.kinds:
            return Unnamed(tensor.detach(), version_counter(tensor))
        if tensor.is_conj() or tensor.is_neg():  # the numbers in memory are others
            return Unnamed(tensor.detach(), version_counter(tensor))
        value = self.value_of_tensor(base, origin)
        value.add_use()
        if base is tensor or same_geometry(tensor, base):
            return value
        return View(value, Strides(identity_of(tensor), value.identity or identity_of(base)))

    def part_of_value(self, operand: WeakTensor) -> View | None:
        (size, stride, offset) = operand.geometry
        lies = Identity(operand.storage, operand.version, operand.dtype, size, stride, int(offset))
        value = self.known.around(lies)
        if value is None or value.identity is None:
            return None
        return View(value, Strides(lies, value.identity))

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """Of a tensor in the step that is planned: too small a one is no value, and has no number in its call."""
        return tensor.nbytes

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
            earlier = known_value(node, output, GIVEN)
        if earlier is not None and (before := earlier.identity) is not None:
            if before.storage == storage and before.version == version and before in self.known:
                return earlier
            earlier = None  # of another forward, or written to since
        identity = Identity(storage, version, base.dtype, base.size(), base.stride(), int(base.storage_offset()))
        value = self.known.find(identity)
        if value is None:
            value = earlier or Value("", "")  # others may be computed from it already, though it is only now saved
            value.name = self.names.next_name()
            if self.reached is not None:
                self.reached.named(value)
            value.identity = identity
            value.dropped = False
            self.known.add(identity, value)
            self._decide(value, base, node, output)
        elif node is not None and not value.operator:
            # It was saved first by a tensor without a producer, detached for instance. With the
            # producer there may be a recipe after all.
            self._decide(value, base, node, output)
        return value

    def _decide(self, value: Value, tensor: torch.Tensor, node: Any | None, output: int) -> None:
        """Keeps or drops ``value``, which is ``tensor`` and has its name, and maybe its producer, just now."""
        name = value.name
        if node is not None and not value.operator:
            value.operator = node.name()
            mark_output(node, output, value)
        if (node is not None or self.names.again) and self.consider(value, node, output):
            value.drop(tensor)
        elif value.tensor is None and not value.dropped:
            value.keep(tensor)
            if self.similar is None or self.similar.is_of_step(value):
                self._forward.kept += tensor.nbytes
                self._note_most()
            if self.is_like(value, self.actions.compressed):
                # It is expanded from no other value, so whether it stays is known at once.
                if compress(value):
                    value.uncached = name in self._uncached_order
                elif name in self.actions.compressed:
                    self.refused[name] = "it is not a mask this time"
            # A plan that was made for a device can be followed on the host, but for this.
            elif not is_host(tensor.device) and self.is_like(value, self.actions.offloaded):
                offload(value, self._offloading)
        if self.growth is not None:
            self.growth.add(name, tensor.nbytes, is_kept=not value.dropped)

    def _note_most(self) -> None:
        """Notes what another forward than the planned one has at a time, of what may be gone before its end."""
        forward = self._forward
        # With a tenth more it is looked at again: each look is at all values that are there.
        if self.similar is None or not forward.differs or forward.kept <= 1.1 * forward.looked_at:
            return
        forward.looked_at = forward.kept
        forward.most = max(forward.most, self.similar.bytes_kept(self.known.present()))

    def is_like(self, value: Value, names: Collection[str]) -> bool:
        """Whether the value is one of these of the plan, or similar to one of them where the plan does not know it."""
        if value.name in names:
            return True
        # Most plans compress and offload nothing, and this is asked of every value that is kept.
        if not names or self.similar is None or not self.similar.is_other(value):
            return False
        return any(name in names for name in self.similar.of(value))

    def consider(self, value: Value, node: Any | None, output: int) -> bool:
        """Whether to drop ``value``, now that its name and its producer are known; if so it knows how it is made."""
        similar = self.similar
        is_other = similar is not None and similar.is_other(value)
        self._forward.differs = self._forward.differs or is_other
        by_similar = similar if is_other or (similar is not None and similar.of_all) else None
        is_to_drop = value.name in self.actions.dropped or (by_similar is not None and by_similar.drop(value))
        if is_to_drop and similar is not None and similar.is_made_otherwise(value):
            self.refused[value.name] = f"{value.operator} makes it in this step, and the plan has not tried that"
        elif is_to_drop and self.can_make(value, node, output, by_similar):
            if value.name in self._uncached_order:
                self._undecided.append(weakref.ref(value))
            return True
        # What has to be kept although the plan drops it, as that of code which is compiled now, is not counted there.
        self._forward.differs = self._forward.differs or is_to_drop
        # Others were made from it before it was saved itself, so it has a recipe. It is kept now
        # and will never run that: what the recipe takes must not wait for it.
        if value.make is not None and not value.dropped:
            value.forget_recipe()
        return False

    def can_make(self, value: Value, node: Any | None, output: int, similar: SimilarValues | None) -> bool:
        """Whether it can be made again; as far as ``similar`` tells, also whether there is room for that."""
        if not self.find_recipe(value, node, output):
            return False
        if similar is None or similar.fits(value, self._forward.kept):
            return True
        self.refused[value.name] = "there is no room to make it again, with all that it is made from"
        return False

    def _decide_uncached(self) -> None:
        """In the order of the plan: at the time of saving, what is on the way may still be saved itself later."""
        values = [value for reference in self._undecided if (value := reference()) is not None]
        self._undecided.clear()
        for value in sorted(values, key=lambda value: self._uncached_order[value.name]):
            make_uncached(value)

    def is_unknown(self, name: str) -> bool:
        """Whether nothing was decided about the value of that name."""
        return name not in self.actions.known

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
                    self.known.know_again(value, base)
            elif version_counter(base) != value.version:
                refuse_changed(value)
            if self.actions.known and value.operator and self.is_unknown(value.name):
                self.unknown[value.name] = base.nbytes
            # A view is read before the use is released, which may forget the tensor.
            tensor: torch.Tensor = base if saved is value else saved.read()
            release_use(value)
        return tensor


def _is_parameter(base: torch.Tensor) -> bool:
    return base.is_leaf and (base.requires_grad or isinstance(base, nn.Parameter))


def _storages_in(inputs: Any) -> set[Any]:
    """The memory of the tensors among ``inputs``."""
    found = set()
    for tensor in tensors_in(inputs):
        # Others have several storages, or none.
        if tensor.layout is torch.strided:
            found.add(key_of(tensor.untyped_storage()))
    return found


class _Forward:
    """What is known of the last forward, which may still run.

    Attributes:
        waiting: How many forwards before it wait for their backward.
        kept: Bytes that it keeps so far.
        differs: Whether it is another one than the planned one.
        most: Bytes that it had at a time, where it is another one.
        looked_at: What it had kept when that was noted.
    """

    __slots__ = ("differs", "kept", "looked_at", "most", "waiting")

    def __init__(self, waiting: float) -> None:
        self.waiting: float = waiting
        self.kept: int = 0
        self.differs: bool = False
        self.most: int = 0
        self.looked_at: int = 0


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

    def code_begins(self) -> None:
        """Compiled functions are not made again alone."""

    def code_ends(self) -> None:
        """Likewise."""


def _as_it_is(pack: Pack) -> Pack:
    return pack


def _unseen(pack: Pack) -> Pack:
    """``pack``, unseen by the mode that notes operands, which would see every attribute."""

    def unseen(tensor: torch.Tensor) -> Any:
        with DisableTorchFunction():
            return pack(tensor)

    return unseen
