"""Where in a forward the values of a plan are saved, so that hooks are on there and nowhere else.

A hook costs time for every tensor that autograd saves, and most of them are kept. Steps repeat themselves: so the first
forward is followed call by call, with hooks on every module and for every tensor, and what it saves is noted. From then
on hooks on a few modules switch the saved-tensor hooks on where a stretch begins in which something is saved that the
plan drops, and they go off with the last such tensor.

    modules entered    a       b    c         d    e          of these, b and e get a hook
    tensors saved        k k k   k   D k D       k   D        D: dropped, or what a dropped one is made from
    hooks are on               |---------|         |-|

Which tensor a decision is about is told by its place; whether it can be dropped, and how it is made again, is found in
the graph of this very step. So a step of another structure may take more time or memory, and is never wrong. A tensor
with another producer than the one that was noted, a stretch that is not over where the next one begins, or a call that
was never seen ends the routine. For the rest of that forward everything is dropped that the plan's own operators make;
the next forwards are followed call by call, the more of them the more often this happens.

A step that runs a backward of its own within the forward is followed call by call for good.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_dpx.memory.execute.calls import repeating, select_output
from lightning_dpx.memory.execute.distributed_tensors import DistributedValue
from lightning_dpx.memory.execute.module_anatomy import Passive
from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.saved_tensor_hooks import Pack, Rematerialisation, ValueActions
from lightning_dpx.memory.execute.transforms import STEP_ASIDE
from lightning_dpx.memory.execute.twins import LARGER, Twins
from lightning_dpx.memory.execute.untracked_inputs import UntrackedInputs
from lightning_dpx.memory.execute.values import Value, View, keep
from lightning_dpx.torch_compat import (
    current_graph_task_id,
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
_WORTH_A_BREAK = 2  # tensors that are kept: a hook on a module costs as much as two of them
_MOST_PATIENCE = 1024  # forwards
_LOOKED_AT_AGAIN = 16  # the first forward that is followed call by call again; then the 32nd, the 64th, ...
_OF_ANOTHER = "another step:"


class Entered(NamedTuple):
    """A call of a module that began: which module, and which of its calls, from 0."""

    path: str
    number: int


class Saved(NamedTuple):
    """A tensor that was saved.

    Attributes:
        name: Of its value; empty where it has none.
        node: The operator that produced the tensor; empty for a leaf.
        call: The module call that is made again for it: it knows the tensor by its number among those that it saves.
    """

    name: str
    node: str
    call: Entered | None = None


class Noted(NamedTuple):
    """An operator whose operands were noted, see untracked_inputs.py, and its number among these."""

    number: int


_ROOT = Entered("", 0)
_TAG = "lightning_dpx.routine"
Event = Saved | Entered | Noted


@dataclass(frozen=True, slots=True)
class Routine:
    """What a forward does.

    Attributes:
        stretches: What is saved from a call on, up to the last tensor that matters. ``None`` for a
            tensor that does not.
        calls: How often each module was called.
        unseen: Calls that the plan is about and that were not made.
        passed: Calls that begin within a stretch.
        noting: Calls at whose beginning operands begin to be noted, or no longer are.
    """

    stretches: dict[Entered, tuple[Saved | None, ...]]
    calls: dict[str, int]
    unseen: frozenset[Entered]
    passed: frozenset[Entered]
    noting: dict[Entered, bool]

    def joined(self, newer: "Routine") -> "Routine":
        """What both of them know; where they differ, what the newer one says."""
        calls = dict(self.calls)
        for path, num_calls in newer.calls.items():
            calls[path] = max(calls.get(path, 0), num_calls)

        # The newer forward tells nothing of calls that it did not make: there the older one holds.
        def is_missing(call: Entered) -> bool:
            return call.number >= newer.calls.get(call.path, 0)

        stretches = {call: stretch for call, stretch in self.stretches.items() if is_missing(call)}
        passed = {call for call in self.passed if is_missing(call)}
        noting = {call: on for call, on in self.noting.items() if is_missing(call)}
        unseen = frozenset(call for call in newer.unseen if call.number >= calls.get(call.path, 0))
        stretches |= newer.stretches
        noting |= newer.noting
        return Routine(stretches, calls, unseen, newer.passed | passed, noting)


def make_routine(
    events: Sequence[Event],
    calls: dict[str, int],
    wanted: Collection[str],
    containers: Collection[str],
    unpacked: Collection[int] = (),
) -> Routine:
    """The routine of a forward.

    Args:
        events: Of the forward, in order.
        calls: How often each module was called.
        wanted: The names of the values that matter.
        containers: The modules that have modules in them. A stretch does not go on across the call of one, because such
            a call may be missing in another step.
        unpacked: The operators whose operands were unpacked.
    """
    # A call that is made again knows its tensors by their numbers, so from its beginning up to the
    # last one that matters nothing may go unheard: there a stretch begins, and none ends.
    counted = _where_to_count(events, wanted)
    stretches = _Stretches(containers)
    for at, event in enumerate(events):
        if isinstance(event, Entered):
            stretches.enter(at, event, counted.get(at, -1))
        elif isinstance(event, Saved):
            stretches.save(at, event, matters=event.name in wanted)
    stretches.end()
    unseen = frozenset(_unseen_calls(calls, wanted))
    return Routine(stretches.found, calls, unseen, frozenset(stretches.passed), _where_to_note(events, unpacked))


class _Stretches:
    """Cuts what a forward saves into stretches, each from a call on to the last tensor that matters.

    Args:
        containers: The modules that have modules in them.

    Attributes:
        found: What is saved in each, by the call with which it begins; ``None`` for what does not matter.
        passed: Calls across which a stretch goes on.
    """

    def __init__(self, containers: Collection[str]) -> None:
        self._containers = containers
        self.found: dict[Entered, tuple[Saved | None, ...]] = {}
        self.passed = set[Entered]()
        self._start = _ROOT
        self._entries = list[Saved | None]()
        self._quiet = list[Saved | None]()  # tensors that do not matter, since the last that does
        self._counted_until = -1
        self._last_call: Entered | None = None
        self._quiet_before = 0  # tensors that do not matter, before that call
        self._crossed = False  # into a container
        self._passing = list[Entered]()

    def enter(self, at: int, call: Entered, counted_until: int) -> None:
        """A call begins.

        Args:
            at: The number of the event.
            call: Which.
            counted_until: The number of the last event that has to be heard for this call, if it is made again.
        """
        if counted_until >= 0 and at > self._counted_until:  # from here on everything is heard
            self._begin(call)
            self._quiet = []
            self._forget_calls()
        else:
            # Whether the stretch ends here shows with the next tensor that matters.
            self._last_call = call
            self._quiet_before = len(self._quiet)
            self._crossed = self._crossed or call.path in self._containers
            self._passing.append(call)
        self._counted_until = max(self._counted_until, counted_until)

    def save(self, at: int, tensor: Saved, *, matters: bool) -> None:
        """Autograd saves a tensor; ``at`` is the number of the event."""
        if not matters:
            self._quiet.append(None)
            return
        # The stretch ends and another begins with the last call, if enough tensors lie between them
        # to be worth a hook on that module, or the call of a container does.
        is_worth_it = not self._entries or self._crossed or self._quiet_before >= _WORTH_A_BREAK
        if self._last_call is not None and at > self._counted_until and is_worth_it:
            self._begin(self._last_call)
            self._quiet = self._quiet[self._quiet_before :]
        else:
            # The stretch goes on across these calls; that they are made then is no news.
            self.passed.update(self._passing)
        self._entries += [*self._quiet, tensor]
        self._quiet = []
        self._forget_calls()

    def end(self) -> None:
        """The forward is over."""
        if self._entries:
            self.found[self._start] = tuple(self._entries)

    def _begin(self, call: Entered) -> None:
        self.end()
        self._start = call
        self._entries = []

    def _forget_calls(self) -> None:
        """No call has begun since the last tensor that matters."""
        self._last_call = None
        self._quiet_before = 0
        self._crossed = False
        self._passing = []


def _unseen_calls(calls: dict[str, int], wanted: Collection[str]) -> Iterator[Entered]:
    """Calls that the plan may be about and that this forward has left out.

    One that comes after all ends the routine, which knows nothing of what is saved in it.
    """
    for name in wanted:
        call = name.rpartition(":")[0]
        path, _, number = call.partition("#")
        which = Entered(path, int(number or 1) - 1)
        if path and which.number >= calls.get(path, 0):
            yield which


def _where_to_count(events: Sequence[Event], wanted: Collection[str]) -> dict[int, int]:
    """Where calls begin that are made again for a tensor that they save, and where the last such tensor is saved."""
    begun = dict[Entered, int]()
    found = dict[int, int]()
    for at, event in enumerate(events):
        if isinstance(event, Entered):
            begun[event] = at
        elif isinstance(event, Saved) and event.call in begun and event.name in wanted:
            found[begun[event.call]] = at
    return found


def _where_to_note(events: Sequence[Event], unpacked: Collection[int]) -> dict[Entered, bool]:
    """Calls at which noting begins (``True``), for an operator before the next call, or ends."""
    found: dict[Entered, bool] = {}
    last = _ROOT
    is_on = False
    for event in events:
        if isinstance(event, Entered):
            if is_on:
                found[event] = False
            last = event
            is_on = False
        elif isinstance(event, Noted) and event.number in unpacked:
            found[last] = is_on = True
    return found


class _Sizes:
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


class _Followed(_Forward):
    """A forward that is followed call by call, with hooks on every module."""

    def __init__(self, pack: Pack, wrap: Callable[[Pack], Pack], unpack: Callable[[Any], Any], sizes: "_Sizes") -> None:
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


class _Routinely(_Forward):
    """A forward that follows a routine, with hooks where that has something to drop."""

    def __init__(
        self,
        pack: Pack,
        unpack: Callable[[Any], Any],
        names: CallNames,
        routine: Routine,
        sizes: "_Sizes",
    ) -> None:
        super().__init__(pack, _as_it_is, unpack)
        self._sizes = sizes
        self._names = names
        self._routine = routine
        self._calls: dict[str, int] = {}
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
        self._begin(_ROOT)
        self._note_from(_ROOT)

    def enter(self, path: str) -> None:
        """A module with a hook is called."""
        number = self._calls.get(path, 0)
        self._calls[path] = number + 1
        if self.changed:
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
        self._names.give(f"{_OF_ANOTHER}{self._at}")
        return self._pack(tensor)

    @property
    def is_over(self) -> bool:
        """Whether the last stretch is."""
        return not self._is_on


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _as_it_is(pack: Pack) -> Pack:
    return pack


def _call_for(value: Value | None) -> Entered | None:
    """The call that is made again for it, and that it is saved in."""
    if value is None or not value.dropped or value.make is not select_output or value.inputs[1].kind != "saved":
        return None
    path, _, number = value.inputs[0].make.call.name.partition("#")
    return Entered(path, int(number or 1) - 1)


def _node_of(tensor: torch.Tensor) -> str:
    node = tensor.grad_fn
    return "" if node is None else node.name()


class Practised(Rematerialisation):
    """Saved-tensor hooks that learn where they are needed.

    Args:
        names: Tells which module call is running; its hooks are on the modules while a forward is followed.
        trusted: Operators that the plan repeats.
        actions: As of :class:`Rematerialisation`.
        twins: Likewise.
        watched: The least number of forwards that are followed call by call: the first ones, and as many again after
            one that did not follow the routine.

    Attributes:
        num_losses: Forwards so far that did not follow the routine that they began with.
    """

    def __init__(
        self,
        names: CallNames,
        trusted: Collection[str],
        actions: ValueActions,
        twins: Twins | None = None,
        *,
        watched: int = 1,
    ) -> None:
        super().__init__(names, actions, twins)
        self._containers = {path.rpartition(".")[0] for path in names.parts}
        again = names.again if isinstance(names.again, Collection) else ()
        self._called_again = {name.partition("#")[0] for name in again}
        self._trusted = trusted
        self._current = threading.local()
        self._learnt: Routine | None = None
        self._routine: Routine | None = None  # that forwards follow now, and that the hooks are for
        self._watched = watched
        self._patience = watched  # forwards that are still to be followed call by call
        self.num_losses: int = 0
        self._runs_backwards = False  # within a forward: what is saved there depends on what is unpacked for
        # Several threads may run forwards of the module at the same time.
        self._guard = threading.Lock()
        self._running = 0
        self._handles: list[Any] = []
        self._refused_before: set[str] = set()
        self._sizes = _Sizes()
        self._num_forwards = 0
        self._follows_growth = watched == 1  # who watches plans for larger batches

    @property
    def is_routine(self) -> bool:
        """Whether forwards follow a routine now, and hooks are only where it needs them."""
        return self._routine is not None

    @property
    def is_followed_for_good(self) -> bool:
        """Whether a forward has run a backward of its own, and all of them are followed call by call."""
        return self._runs_backwards

    @contextmanager
    def hooks(self, pack: Pack, wrap: Callable[[Pack], Pack], *, noting: bool) -> Iterator[None]:
        """Around a forward."""
        forward = self._begun(pack, wrap)
        self._current.forward = forward
        operands = forward.operands if isinstance(forward, _Followed) else nullcontext()
        try:
            if isinstance(forward, _Followed):
                self.names.watch(forward.enter)
                self.reached = []
            with STEP_ASIDE.standing_in(), operands:
                try:
                    forward.start()
                    yield
                    # Tensors that its last stretch waits for have not come.
                    if isinstance(forward, _Routinely) and not forward.is_over:
                        forward.changed = True
                finally:
                    forward.off()
            if isinstance(forward, _Followed):
                self._learn(forward)
        finally:
            self._current.forward = None
            if isinstance(forward, _Routinely):
                forward.stop_noting()
            with self._guard:
                self._running -= 1
                # Each loss doubles the forwards that are followed, so that steps of a changing
                # structure end up being followed nearly always.
                if forward.changed or (forward.grew and self._follows_growth):
                    self.num_losses += 1
                    self._patience = max(self._watched, min(2**self.num_losses, _MOST_PATIENCE))

    def _begun(self, pack: Pack, wrap: Callable[[Pack], Pack]) -> _Followed | _Routinely:
        with self._guard:
            self._num_forwards += 1
            # What is kept outside of the stretches may have grown without a sign of it.
            if self._follows_growth and self._num_forwards >= _LOOKED_AT_AGAIN and _is_power_of_two(self._num_forwards):
                self._patience = max(self._patience, 1)
            routine = None if self._patience > 0 or self._runs_backwards else self._learnt
            if (routine is None) == self.is_routine and not self._running:  # others may need the hooks as they are
                self._routine = routine
                self._set_hooks()
            self._running += 1
            if self._routine is not None:
                return _Routinely(pack, self.unpack, self.names, self._routine, self._sizes)
        return _Followed(pack, wrap, self.unpack, self._sizes)

    def _set_hooks(self) -> None:
        """Puts hooks on all modules, or only where the routine needs them."""
        self.names.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        routine = self._routine
        if routine is None:
            self.names.install()
            return
        self.names.install(self._called_again)  # before ours, which are prepended: a call is noted with the hooks on
        paths = {call.path for call in (*routine.stretches, *routine.unseen, *routine.noting)} - {""}
        for path in sorted(paths & self.names.parts.keys()):
            enter = _Enter(self, path)
            self._handles.append(self.names.parts[path].register_forward_pre_hook(enter, prepend=True))

    def _learn(self, forward: _Followed) -> None:
        wanted = forward.dropped | self._unmet(forward)
        for reference in self.reached or ():
            value = reference()
            if value is not None and value.name:
                wanted.add(value.name)
        self.reached = None
        routine = make_routine(forward.events, forward.calls, wanted, self._containers, forward.unpacked)
        routine = replace(routine, unseen=routine.unseen | self._uncalled(forward))
        with self._guard:
            # What was refused in a forward that was followed is no news in a routine.
            self._refused_before |= self.refused.keys()
            self._learnt = routine if self._learnt is None else self._learnt.joined(routine)
            if STEP_ASIDE.count == forward.transforms:  # else hooks come and go on their own account
                self._patience -= 1

    def _uncalled(self, forward: _Followed) -> set[Entered]:
        """First calls of modules that this forward has not called: nothing is known of what is saved in them."""
        uncalled = [path for path in self.names.parts if path not in forward.calls]
        # Lists of modules have no forward that could be called.
        return {Entered(path, 0) for path in uncalled if type(self.names.parts[path]).forward is not nn.Module.forward}

    def _unmet(self, forward: _Followed) -> set[str]:
        """What the plan drops and this forward has not saved."""
        # Their calls go into the routine as unseen ones.
        met = {event.name for event in forward.events if isinstance(event, Saved)}
        return set(self.actions.dropped) - met

    def consider(self, value: Value, node: Any | None, output: int) -> bool:
        """As the plan says; in a forward that it does not know, by what makes the value."""
        # Names say nothing in a forward that has lost the routine. Rather too much is dropped then,
        # of what the plan's own operators make, than the budget exceeded.
        forward = getattr(self._current, "forward", None)
        is_trusted = node is not None and node.name() in self._trusted
        if forward is not None and forward.changed and is_trusted and self.can_make(value, node, output, self.twins):
            return True
        is_dropped = super().consider(value, node, output)
        if isinstance(forward, _Routinely) and not is_dropped and self._is_news(value.name):
            forward.changed = True  # what a recipe needs was not noted, maybe
        return is_dropped

    def _is_news(self, name: str) -> bool:
        """Whether a value is not dropped that the plan drops, and that was dropped before."""
        return name in self.actions.dropped and name not in self._refused_before

    def widen(self) -> None:
        """The next forwards show what that is."""
        super().widen()
        with self._guard:
            self._patience = max(self._patience, self._watched)

    def want_operands(self, node: Any) -> None:
        """A recipe asks for the operands of ``node``."""
        super().want_operands(node)
        forward = getattr(self._current, "forward", None)
        if isinstance(forward, _Followed):
            forward.ask(node)

    def is_unknown(self, name: str) -> bool:
        """Whether nothing was decided about that name; those of a lost routine do not count.

        The forwards after it are followed, and tell what is unknown.
        """
        return super().is_unknown(name) and not name.startswith(_OF_ANOTHER)

    def unpack(self, saved: Any) -> torch.Tensor:
        """Gives the tensor; notes steps with backwards of their own, to follow them for good."""
        # Code that looks at an attribute of a node, such as ``grad_fn._saved_input``, unpacks it as well.
        if self._running and current_graph_task_id() != -1:
            self._runs_backwards = True
        return super().unpack(saved)

    def enter(self, path: str) -> None:
        """A module is called."""
        forward = getattr(self._current, "forward", None)
        if forward is not None and not repeating():
            forward.enter(path)

    def put_on(self) -> None:
        """Puts the hooks on again, after :meth:`remove`."""
        self._set_hooks()

    def remove(self) -> None:
        """Takes all hooks off."""
        self.names.remove()
        for handle in self._handles:
            handle.remove()


class _Enter(Passive):
    """The hook of one module; copies of the module, by deepcopy or pickle, get one that does nothing."""

    def __init__(self, values: Practised | None, path: str) -> None:
        self._values = values
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return _Enter, (None, self._path)

    def __call__(self, _module: nn.Module, _args: Any) -> None:
        if self._values is not None:
            self._values.enter(self._path)
