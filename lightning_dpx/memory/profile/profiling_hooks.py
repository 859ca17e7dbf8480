"""Saved-tensor hooks that keep everything, note who asks for it, and make each value once more to see how."""

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_dpx.devices import synchronize
from lightning_dpx.memory.execute.call_arguments import Argument
from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.recipes.registry import NotRecomputable, Recipe
from lightning_dpx.memory.execute.recorded_collectives import AnswersCollectives
from lightning_dpx.memory.execute.saved_tensor_hooks import Pack, Rematerialization
from lightning_dpx.memory.execute.sharded_units import ShardedUnits
from lightning_dpx.memory.execute.tensor_identity import identity_of
from lightning_dpx.memory.execute.values import Unnamed, Value, View
from lightning_dpx.memory.profile.autograd_log import AutogradLog
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.data import Hold, SavedCall
from lightning_dpx.memory.profile.noted_calls import NotedCalls, SmallPart
from lightning_dpx.memory.profile.trials import try_values
from lightning_dpx.memory.profile.value_table import DeadValue, FoundValues, saved_sources
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.memory.tracing.storage_ledger import Allocation
from lightning_dpx.torch_compat import disable_current_modes, version_counter, view_base

_IN_CODE = "compiled code saves it, too"
_WRITTEN = -1  # no tensor has this version


class _Held:
    """What autograd holds in place of a value: tells when it lets go of it."""

    __slots__ = ("entry", "hooks", "index")

    def __init__(self, entry: Value | View, index: int, hooks: "ProfilingHooks") -> None:
        self.entry = entry
        self.index = index
        self.hooks = hooks

    def __del__(self) -> None:
        self.hooks.released(self.index, self.entry)


class ProfilingHooks(Rematerialization):
    """Keep everything, and try how it can be made again.

    Args:
        names: Tells which module call is running.
        trace: Tells of the memory.
        costs: Tries values.
        units: What may be made again where parameters are sharded.

    Attributes:
        found: What was found out about values.
        log: When autograd has asked for them.
        calls: Of modules, which may be replayed as a whole.
        is_over: Whether the backward that comes is the step's last one.
    """

    def __init__(self, names: CallNames, trace: MemoryTrace, costs: CostModel, units: ShardedUnits) -> None:
        super().__init__(names)
        self.kinds = costs.kinds
        self._trace = trace
        self._costs = costs
        self.found: FoundValues = FoundValues()
        self.log: AutogradLog = AutogradLog(trace)
        self.calls: NotedCalls = NotedCalls(names, trace, self._saved_as, units)
        self.is_over = False
        self._has_tried_calls = False
        # Weak, because the step lets go of values as it would without anybody watching.
        self._new: weakref.WeakKeyDictionary[Value, Allocation | None] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()  # of what was tried
        self._unnumbered: list[tuple[int, weakref.ref[Value]]] = []  # of what autograd holds
        # Of constants that are kept apart: what counts the writes to them, and how many there were.
        self._copied: weakref.WeakKeyDictionary[Value, tuple[torch.Tensor, int]] = weakref.WeakKeyDictionary()
        self._holders: dict[str, int] = {}  # how often autograd holds a value
        self._distributed: torch.Tensor | None = None  # what is being saved, of which ``pack`` may get a part

    def _saved_as(self, tensor: torch.Tensor) -> Value | None:
        """The value that is that tensor, if autograd has saved it."""
        return self.known.saved(identity_of(tensor))

    def _by_parts(self, pack: Pack, tensor: torch.Tensor) -> Any:
        self._distributed = tensor
        try:
            return super()._by_parts(pack, tensor)
        finally:
            self._distributed = None

    def bytes_of(self, tensor: torch.Tensor) -> int:
        return self._costs.bytes_in_step(tensor)

    def pack(self, tensor: torch.Tensor) -> Any:
        packed = self._packed(tensor)
        elements = tensor.numel() if self._distributed is None else self._distributed.numel()
        if self.names.in_compiled_code and tensor.layout is torch.strided:
            self._note_in_code(tensor)
        if isinstance(packed, _Held):
            value = packed.entry if isinstance(packed.entry, Value) else packed.entry.value
            self.calls.packed(tensor, elements, packed.entry, packed.index, value.name)
            return packed
        held = self.calls.part(tensor, packed)
        self.calls.packed(tensor, elements, packed, -1, "")
        return held

    def _packed(self, tensor: torch.Tensor) -> "Unnamed | _Held":
        base = view_base(tensor)
        if isinstance(tensor if base is None else base, nn.Parameter):  # a fake one has no type, a frozen one no name
            return Unnamed(tensor.detach(), version_counter(tensor))
        packed = super().pack(tensor)
        if isinstance(packed, Unnamed):
            return packed
        value = packed if isinstance(packed, Value) else packed.value
        if value.name not in self.found.saved:
            self._new[value] = self._trace.allocation_of(tensor.untyped_storage())
            self.found.saved[value.name] = self._trace.now
        self._holders[value.name] = self._holders.get(value.name, 0) + 1
        index = self.log.note_saved()
        self._unnumbered.append((index, weakref.ref(value)))
        return _Held(packed, index, self)

    def _note_in_code(self, tensor: torch.Tensor) -> None:
        """Compiled code saves it: to drop it elsewhere would make no room."""
        base = view_base(tensor)
        identity = identity_of(tensor if base is None else base)
        self.calls.in_code.add(identity)
        value = self.known.saved(identity)
        if value is not None and value.make is not None:
            value.forget_recipe()
            self.refused[value.name] = _IN_CODE

    def consider(self, value: Value, node: Any | None, output: int) -> bool:
        """Keeps the value, and looks for its recipe."""
        if value.identity in self.calls.in_code:
            self.refused[value.name] = _IN_CODE
        elif value not in self._numbers:
            self.find_recipe(value, node, output)
            units = self.calls.units
            if units.paths and value.make is not None and not units.allows(value, value.name.rpartition(":")[0]):
                value.forget_recipe()
                self.refused[value.name] = "it is made from parameters of another sharded unit"
        return False

    def _recipe_of_node(self, node: Any) -> Recipe:
        # This step runs uncompiled. In one that is compiled the node is another one, which no recipe knows.
        if self.calls.is_of_code(node):
            raise NotRecomputable("compiled code makes it")
        return super()._recipe_of_node(node)

    def keep_constant(self, tensor: torch.Tensor) -> Value:
        span = self._trace.allocation_of(tensor.untyped_storage())
        if span is not None and type(tensor) in self.kinds and _is_whole(tensor):
            value = self._kept_apart(tensor)
        else:
            value = super().keep_constant(tensor)
        # As long as a plan makes something from it, it stays: the forecast counts that.
        self._new[value] = span
        return value

    def _kept_apart(self, tensor: torch.Tensor) -> Value:
        """The value of a copy that is not counted, so that the tensor itself goes when it would go without a plan."""
        # Outside of the trace, which would count the copy as memory of the step.
        with disable_current_modes(), torch.no_grad():
            value = super().keep_constant(copy_as_it_lies(tensor))
            # A detached tensor shares the count of writes, also after its data were exchanged.
            counter = tensor.detach()
            counter.data = tensor.new_empty(0)
            self._copied[value] = counter, version_counter(tensor)
        return value

    def _refuse_written(self) -> None:
        """What was written to after it was copied is another tensor: a step would find that, and refuse to use it."""
        for value, (counter, version) in self._copied.items():
            if version_counter(counter) != version:
                value.version = _WRITTEN

    def keep_argument(self, argument: Argument, tensor: torch.Tensor) -> Value:
        """A copy of it that is not counted, so that the tensor itself goes when it would go without a plan."""
        # Outside of the trace, which would count the copy as memory of the step.
        with disable_current_modes(), torch.no_grad():
            argument.watch(tensor)
            value = super().keep_argument(argument, copy_as_it_lies(tensor))
        self._new[value] = self._trace.allocation_of(tensor.untyped_storage())
        return value

    def unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, SmallPart):
            saved.asked()
            return super().unpack(saved.entry)
        if not isinstance(saved, _Held):
            return super().unpack(saved)
        self.try_new_values()
        event = self.log.note_asked(saved.index)
        tensor = super().unpack(saved.entry)
        # Another backward may ask for it again: then only the end of a copy of its own tells how
        # long this one has used it.
        if self.is_over:
            return tensor
        return self._copy_for(event, saved.entry, tensor)

    def _copy_for(self, event: int, entry: Value | View, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that is not counted, for a backward that may not be the last one.

        Args:
            event: Of the request.
            entry: What was asked for.
            tensor: It.
        """
        value = entry if isinstance(entry, Value) else entry.value
        if value.tensor is None:
            return tensor
        with disable_current_modes(), torch.no_grad():
            copied = value.tensor.clone()
            given = copied if isinstance(entry, Value) else entry.look(copied)
        # A backward that records gradients (create_graph) saves what it was given once more.
        if torch.is_grad_enabled():
            self.known.know_again(value, copied)
        self.log.watch_use(event, copied)
        return given

    def packed(self, node: Any, saved: Any) -> Any:
        held = super().packed(node, saved)
        if isinstance(held, _Held | SmallPart):
            return held.entry
        return held

    def released(self, index: int, entry: Value | View) -> None:
        """Autograd lets go of what it held."""
        self.log.note_released(index)
        value = entry if isinstance(entry, Value) else entry.value
        if value in self._new:  # which no backward has begun to need
            self._let_die(value)

    def _let_die(self, value: Value) -> None:
        """A part of the graph goes while forward still runs: nothing leads from it to the loss.

        What only that part has saved goes as well, unless others are made from it.
        """
        self._holders[value.name] -= 1
        value.num_uses -= 1
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if one not in self._new or self._holders[one.name] or one.num_uses:
                continue
            span = self._new.pop(one)
            if span is not None:
                self.found.dead.append(DeadValue(one, span, self.refused.get(one.name, "")))
            # It will never be made again, so what it would have been made from has one use less, and may be dead as
            # well: a chain of layers dies from its end.
            waiting += saved_sources(one)
            one.forget_recipe()

    def try_new_values(self) -> None:
        """A backward begins: makes again what was saved since the last one; from now on only autograd holds it."""
        # Where all that a step saves is too small for a decision of its own, its calls may be worth one.
        # Once: a backward may begin at several places before it asks for anything.
        is_news = bool(self._unnumbered) or not self._has_tried_calls
        tries_calls = self.is_over and not self.log.asks and is_news
        if not self._unnumbered and not tries_calls:
            return
        self._holders.clear()
        self._refuse_written()
        synchronize(self._costs.device)
        try:
            with disable_current_modes(), self._costs.trying(), self._asking_nobody():
                numbered = try_values(dict(self._new), self.refused, self._numbers, self.found, self._costs)
                if self.is_over:
                    # Whether what has gone in a step with backwards of its own is needed in another one, who knows.
                    self.found.add_dead({**self._numbers})
                if tries_calls:
                    self._has_tried_calls = True
                    self.calls.try_all(self._costs)
        finally:
            self._new.clear()  # also where memory runs out: then all that is held goes
        for index, reference in self._unnumbered:
            value = reference()
            if value is not None and value in self._numbers:
                self.log.values[index] = self._numbers[value]
        self._unnumbered.clear()
        for value in numbered:
            value.learn(None, ())  # they would keep each other longer than autograd does

    def _asking_nobody(self) -> AbstractContextManager[Any]:
        """A context in which what would ask other processes fails at once: they may have nothing of it to try."""
        if self._trace.communicates:
            return AnswersCollectives("What is tried")
        return nullcontext()

    def calls_of(self, end: int) -> tuple[tuple[SavedCall, ...], tuple[Hold, ...]]:
        """What can be replayed as a whole in a step of ``end`` events, and what autograd holds."""
        asked, ends = self.log.held(end)
        calls = self.calls.calls(ends, self.found.storages, end)
        return calls, self.calls.holds(asked, ends) if calls else ()


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether it has its memory for itself, so that each view of it is one of a copy as well."""
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


def copy_as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of ``tensor``: what a call makes of its arguments may depend on them."""
    whole = tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dim) > 1:
            # An expanded dim shows one row many times: that row is copied, and expanded again
            # below.
            whole = whole.narrow(dim, 0, 1)
    # Where windows overlap, each place is written several times with the same number.
    copied = tensor.new_empty_strided(whole.size(), whole.stride())  # of a fake a fake one
    return copied.copy_(whole).expand(tensor.size())
