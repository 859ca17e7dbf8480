"""Forwards, one by one: followed call by call, or with hooks only where the routine has them.

A :class:`FollowedForward` sees every module call and every saved tensor, and notes them for :func:`make_routine`. A
:class:`RoutineForward` switches the saved-tensor hooks on where a stretch of the routine begins, and off with the last
tensor of it that matters; what it did not expect ends the routine.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch

from lightning_dpx.memory.call_names import numbered
from lightning_dpx.memory.execute.calls import select_output
from lightning_dpx.memory.execute.distributed_tensors import DistributedValue
from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.routine import ROOT, Entered, Event, Noted, Routine, Saved
from lightning_dpx.memory.execute.saved_tensor_hooks import Pack
from lightning_dpx.memory.execute.similar_values import LARGER
from lightning_dpx.memory.execute.transforms import STEP_ASIDE
from lightning_dpx.memory.execute.untracked_inputs import UntrackedInputs
from lightning_dpx.memory.execute.values import Value, View, keep
from lightning_dpx.torch_compat import (
    len_torch_function_stack,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks_enabled,
    top_saved_tensors_hooks,
)

# Asked with ``True``, it also tells of hooks while torch traces.
_top = top_saved_tensors_hooks
_push = push_saved_tensors_hooks
_pop = pop_saved_tensors_hooks
_TAG = "lightning_dpx.routine"
OF_ANOTHER_STEP = "another step:"


class SavedSizes:
    """The largest that dropped tensors were in forwards that were followed."""

    def __init__(self) -> None:
        self._largest: dict[str, int] = {}

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor of the value of that name is dropped."""
        self._largest[name] = max(self._largest.get(name, 0), tensor.nbytes)

    def has_grown(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether it never was so large: what is kept beside it may have grown as well."""
        return tensor.nbytes > LARGER * self._largest.get(name, tensor.nbytes)


class _Forward:
    """A forward of this thread."""

    def __init__(self, pack: Pack, wrap: Callable[[Pack], Pack], unpack: Callable[[Any], Any]) -> None:
        self._pack = pack
        self._wrap = wrap
        self._unpack = unpack
        self._outer = _top(True)
        self._is_on = False
        self._hook: Pack | None = None
        self.changed = False
        self.grew = False

    def on(self, hook: Pack) -> bool:
        """Switches the hooks on, unless others are at work here."""
        # Regions of others, such as torch.utils.checkpoint's, keep the hooks that they have put on.
        top = _top(True)
        if top is not self._outer and (top is None or self._outer is None or top[0] is not self._outer[0]):
            return False
        # A transform of torch.func is running, which forbids hooks.
        if not saved_tensors_hooks_enabled():  # type: ignore[attr-defined]
            return False
        hooks = self._wrap(hook), self._unpack
        self._hook = hooks[0]
        _push(*hooks)
        STEP_ASIDE.are(hooks)
        self._is_on = True
        return True

    def off(self) -> None:
        """Switches them off, if they are on."""
        if self._is_on:
            self._is_on = False
            STEP_ASIDE.are(None)
            top = _top(True)
            if top is not None and top[0] is self._hook:  # else they have stepped aside
                _pop()


class FollowedForward(_Forward):
    """A forward that is followed call by call, with hooks on every module."""

    def __init__(
        self, pack: Pack, wrap: Callable[[Pack], Pack], unpack: Callable[[Any], Any], sizes: "SavedSizes"
    ) -> None:
        super().__init__(pack, wrap, unpack)
        self._sizes = sizes
        self.events: list[Event] = []
        self.calls: dict[str, int] = {}
        self.dropped: set[str] = set()
        self.unpacked: set[int] = set()
        self.transforms = STEP_ASIDE.count
        self.operands = UntrackedInputs(self._note)
        self._noted = 0

    def _note(self, node: Any) -> None:
        self._noted += 1
        node.metadata[_TAG] = self._noted
        self.events.append(Noted(self._noted))

    def ask(self, node: Any) -> None:
        """A recipe asks for the operands of ``node``."""
        self.unpacked.add(node.metadata.get(_TAG, 0))

    def start(self) -> None:
        self.on(self._save)
        self._ours = _top(True)[0]

    def enter(self, path: str, number: int) -> None:
        self.calls[path] = number
        top = _top(True)
        if top is not None and top[0] is self._ours:  # else a region of others, from which we hear nothing
            self.events.append(Entered(path, number - 1))  # names of calls count from 1

    def _save(self, tensor: torch.Tensor) -> Any:
        packed = self._pack(tensor)
        held = packed.held if type(packed) is DistributedValue else packed
        value: Value | None = held.value if isinstance(held, View) else held
        if type(value) is not Value:  # it is a tensor that no plan decides about
            value = None
        self.events.append(Saved("" if value is None else value.name, _node_of(tensor), _call_for(value)))
        if value is not None and value.dropped:
            self.dropped.add(value.name)
            self._sizes.note(value.name, tensor)
        return packed


class RoutineForward(_Forward):
    """A forward that follows a routine, with hooks where that has something to drop.

    Args:
        pack: The hook.
        unpack: Its counterpart.
        names: Tells which module call is running.
        routine: Which.
        sizes: Of what was dropped so far.
        counted: Modules whose calls are counted, and with which no stretch begins.

    Attributes:
        calls: How often the modules with hooks were called.
    """

    def __init__(
        self,
        pack: Pack,
        unpack: Callable[[Any], Any],
        names: CallNames,
        routine: Routine,
        sizes: "SavedSizes",
        counted: Collection[str] = (),
    ) -> None:
        super().__init__(pack, _as_it_is, unpack)
        self._sizes = sizes
        self._names = names
        self._routine = routine
        self._counted = counted
        self.calls: dict[str, int] = {}
        self._entries: tuple[Saved | None, ...] = ()
        self._at = 0
        self._operands = UntrackedInputs()
        self._modes = len_torch_function_stack()
        self._is_noting = False
        self._counts = bool(names.again)

    def start(self) -> None:
        # What is saved while no hooks are on is not counted: until then, and in calls that are
        # running when they go off, no call knows the numbers of its tensors.
        if self._counts:
            self._names.hear(hears=False)
        self._begin(ROOT)
        self._note_from(ROOT)

    def enter(self, path: str) -> None:
        """A module with a hook is called."""
        number = self.calls.get(path, 0)
        self.calls[path] = number + 1
        if self.changed or path in self._counted:
            return
        call = Entered(path, number)
        routine = self._routine
        if call in routine.unseen or number >= routine.calls.get(path, 0):
            self._lose()
        # An earlier stretch is not over: it may go on across calls, if it did when it was noted.
        elif self._is_on:
            if call not in routine.passed:
                self._lose()
        else:
            self._begin(call)
        self._note_from(call)

    def _note_from(self, call: Entered) -> None:
        """Notes operands from here on, or no longer."""
        wanted = self._routine.noting.get(call)
        if wanted is None or wanted == self._is_noting:
            return
        # Function modes are a stack, from which only the last one can be taken.
        if len_torch_function_stack() != self._modes + self._is_noting:
            self.changed = self.changed or wanted  # modes of others lie on it: it goes when they have gone
        elif wanted:
            self._operands.__enter__()  # type: ignore[no-untyped-call]
            self._is_noting = True
        else:
            self.stop_noting()

    def on(self, hook: Pack) -> bool:
        """Switches the hooks on; from here on tensors are counted, for the calls that begin now."""
        is_on = super().on(hook)
        if is_on and self._counts:
            self._names.hear(hears=True)
        return is_on

    def off(self) -> None:
        """Switches them off; in calls that are under way numbers are no longer known."""
        super().off()
        if self._counts:
            self._names.hear(hears=False)

    def stop_noting(self) -> None:
        """Untracked inputs are no longer noted."""
        if self._is_noting:
            self._is_noting = False
            self._operands.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _begin(self, call: Entered) -> None:
        """Switches the hooks on, if a stretch begins with this call."""
        entries = self._routine.stretches.get(call)
        if entries is not None:
            self._entries = entries
            self._at = 0
            if not self.on(self._save):
                self._lose()

    def _save(self, tensor: torch.Tensor) -> Any:
        entries = self._entries
        at = self._at
        if at >= len(entries):
            self.changed = True
            return self._kept(tensor)
        entry = entries[at]
        self._at = at = at + 1
        if entry is None:
            return self._kept(tensor)
        # The place alone could be another tensor's by now; with the same producer a mistake costs
        # memory or time, and no correctness, because the recipe is looked for in this step's graph.
        if entry.node != _node_of(tensor):
            self._lose()
            return self._lost(tensor)
        self._names.give(entry.name)
        self.grew = self.grew or self._sizes.has_grown(entry.name, tensor)
        packed = self._pack(tensor)
        if at == len(entries):
            self.off()
        return packed

    def _kept(self, tensor: torch.Tensor) -> Any:
        """What autograd holds for a tensor that does not matter: itself, and no name."""
        if self._counts:
            self._names.count()
        return keep(tensor)

    def _lose(self) -> None:
        """It is another forward than the one that was noted."""
        self.changed = True
        self.off()
        self.on(self._lost)

    def _lost(self, tensor: torch.Tensor) -> Any:
        """Packs a tensor of a forward that is not known, under a name that is in no plan."""
        self._at += 1
        self._names.give(f"{OF_ANOTHER_STEP}{self._at}")
        return self._pack(tensor)

    @property
    def is_over(self) -> bool:
        """Whether the last stretch is."""
        return not self._is_on


def _as_it_is(pack: Pack) -> Pack:
    return pack


def _call_for(value: Value | None) -> Entered | None:
    """The call that is made again for it, and that it is saved in."""
    if value is None or not value.dropped or value.make is not select_output or value.inputs[1].kind != "saved":
        return None
    path, number = numbered(value.inputs[0].make.call.name)
    return Entered(path, number - 1)


def _node_of(tensor: torch.Tensor) -> str:
    node = tensor.grad_fn
    if node is None:
        return ""
    return node.name()
