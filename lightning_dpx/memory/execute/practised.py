"""Saved-tensor hooks that learn where they are needed, and are on nowhere else: see ``routine.py``."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.execute.calls import repeating
from lightning_dpx.memory.execute.graph_tape import ReachedValues
from lightning_dpx.memory.execute.largest_inputs import tensors_in
from lightning_dpx.memory.execute.module_anatomy import Passive
from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.routine import Entered, Routine, Saved, make_routine
from lightning_dpx.memory.execute.routine_forwards import OF_ANOTHER_STEP, FollowedForward, RoutineForward, SavedSizes
from lightning_dpx.memory.execute.saved_tensor_hooks import Pack, Rematerialization, ValueActions
from lightning_dpx.memory.execute.similar_values import Twins
from lightning_dpx.memory.execute.step_peaks import StepPeaks
from lightning_dpx.memory.execute.transforms import STEP_ASIDE
from lightning_dpx.memory.execute.values import Value
from lightning_dpx.memory.plan.plan import module_of
from lightning_dpx.powers import is_power_of_two
from lightning_dpx.torch_compat import current_graph_task_id
from lightning_dpx.traced_hooks import AsideInOneGraph

_MOST_PATIENCE = 1024  # forwards
_MOST_UNTIL_ALL_IS_MET = 16  # forwards; some of a plan may be of no step at all
_LOOKED_AT_AGAIN = 16  # the first forward that is followed call by call again; then the 32nd, the 64th, ...


class _Patience:
    """How many forwards are still to be followed call by call.

    Args:
        watched: The first ones, and as many again after one that did not follow the routine.
        planned: What is to be seen first: the names of values that the plan drops, and the paths of modules like those
            that save them.

    Attributes:
        num_losses: Forwards so far that did not follow the routine that they began with.
        follows_growth: Whether larger steps are looked for; who watches plans for larger batches.
    """

    def __init__(self, watched: int, planned: Collection[str]) -> None:
        self.num_losses: int = 0
        self._unmet = set(planned)
        self._watched = watched
        self._left = watched
        self._num_forwards = 0
        self.follows_growth: bool = watched == 1

    def begin(self) -> bool:
        """Whether the forward that begins is to be followed."""
        self._num_forwards += 1
        if self._is_looked_at(self._num_forwards):
            self._left = max(self._left, 1)
        return self._left > 0

    @property
    def is_left(self) -> bool:
        """Whether there are any."""
        return self._left > 0

    def passes(self) -> bool:
        """Whether the forward that begins need not even be counted among those with hooks."""
        # The second one shows whether the first still waits for its backward.
        if self._left > 0 or self._num_forwards < 2 or self._is_looked_at(self._num_forwards + 1):
            return False
        self._num_forwards += 1
        return True

    def _is_looked_at(self, number: int) -> bool:
        # What is kept outside of the stretches may have grown without a sign of it.
        return self.follows_growth and number >= _LOOKED_AT_AGAIN and is_power_of_two(number)

    def spend(self, met: Collection[str]) -> None:
        """A forward was followed, and may be relied on; it has saved or called what is named in ``met``."""
        self._unmet -= set(met)
        # Steps that leave out parts of it, as with random layers, have to show all of it first: the
        # first call of a part that was never seen loses the routine, with all that comes after it.
        if not self._unmet or self._num_forwards >= _MOST_UNTIL_ALL_IS_MET:
            self._left -= 1

    def begin_anew(self) -> None:
        """The next forwards are followed as the first ones were."""
        self._left = max(self._left, self._watched)

    def end(self, *, changed: bool, grew: bool) -> None:
        """A forward is over, which may have lost its routine or met larger tensors."""
        # Each loss doubles the forwards that are followed, so that steps of a changing
        # structure end up being followed nearly always.
        if changed or (grew and self.follows_growth):
            self.num_losses += 1
            self._left = max(self._watched, min(2**self.num_losses, _MOST_PATIENCE))


class Practised(Rematerialization):
    """Saved-tensor hooks that learn where they are needed.

    Args:
        names: Tells which module call is running; its hooks are on the modules while a forward is followed.
        trusted: Operators that the plan repeats.
        actions: As of :class:`Rematerialization`.
        twins: As of :class:`Rematerialization`.
        watched: The least number of forwards that are followed call by call: the first ones, and as many again after
            one that did not follow the routine.
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
        self._is_lost = False  # the learnt one: that the next forward is another one is known then
        self._routine: Routine | None = None  # that forwards follow now, and that the hooks are for
        self._patience = _Patience(watched, {*self.actions.dropped, *_siblings_of(self.actions.dropped, names.parts)})
        self._drops = bool(self.actions.dropped or self.actions.compressed or self.actions.offloaded)
        self._runs_backwards = False  # within a forward: what is saved there depends on what is unpacked for
        # Several threads may run forwards of the module at the same time.
        self._guard = threading.Lock()
        self._running = 0
        self._handles: list[Any] = []
        self._refused_before: set[str] = set()
        self._sizes = SavedSizes()
        # Who watches asks for all that is unknown, and plans for that.
        self._peaks = StepPeaks(twins if self._patience.follows_growth else None)
        # Where steps are only looked at, no hook stays on after that: a compiler would have to leave them out.
        self._is_off = self._only_looks
        if self._is_off:
            self.names.remove()

    @property
    def _only_looks(self) -> bool:
        """Whether nothing is dropped, and steps are looked at for what they keep."""
        return not self._drops and self._patience.follows_growth

    @property
    def num_losses(self) -> int:
        """Forwards so far that did not follow the routine that they began with."""
        return self._patience.num_losses

    @property
    def is_routine(self) -> bool:
        """Whether forwards follow a routine now, and hooks are only where it needs them."""
        return self._routine is not None

    @property
    def is_followed_for_good(self) -> bool:
        """Whether a forward has run a backward of its own, and all of them are followed call by call."""
        return self._runs_backwards

    @contextmanager
    def active(self, inputs: Any = (), *, counts_waiting: bool = False) -> Iterator[None]:
        """As it says there; larger inputs are followed as the first ones were."""
        if self.passes(inputs):
            yield
            return
        # Searched once for both who ask.
        inputs = tensors_in(inputs)
        self._look_for_larger(inputs)
        with super().active(inputs, counts_waiting=counts_waiting):
            yield

    def passes(self, inputs: Any) -> bool:
        """As it says there; larger inputs are followed as the first ones were."""
        if not self._has_nothing_to_do:
            return False
        self._look_for_larger(inputs)
        return self._patience.passes()

    def _look_for_larger(self, inputs: Any) -> None:
        # What is kept outside of the stretches grows without a sign of it, and so do steps that drop nothing.
        if self._patience.follows_growth and self._peaks.have_grown(inputs):
            with self._guard:
                self._patience.begin_anew()

    @property
    def _has_nothing_to_do(self) -> bool:
        """Whether forwards only have to be looked at now and then."""
        # Hooks are on all modules where another thread has needed them so far; the next forward takes them off.
        if not self._only_looks or self._learnt is None or self._routine is None:
            return False
        # A module that no forward has called yet has a hook, which asks for the next one to be followed.
        return not self._peaks.varying

    @contextmanager
    def hooks(self, pack: Pack, wrap: Callable[[Pack], Pack], *, noting: bool) -> Iterator[None]:
        """Around a forward."""
        forward = self._begun(pack, wrap)
        self._current.forward = forward
        self._peaks.begin()
        # No recipe asks for any where nothing is dropped; and a compiler would have to trace what notes them.
        operands = forward.operands if isinstance(forward, FollowedForward) and self._drops else nullcontext()
        try:
            if isinstance(forward, FollowedForward):
                self.names.watch(forward.enter)
                self.reached = ReachedValues()
            with STEP_ASIDE.standing_in(), operands:
                try:
                    forward.start()
                    yield
                    # Tensors that its last stretch waits for have not come.
                    if isinstance(forward, RoutineForward) and not forward.is_over:
                        forward.changed = True
                finally:
                    forward.off()
            if isinstance(forward, FollowedForward):
                self._learn(forward)
                with self._guard:
                    self._peaks.note(forward.calls, self.known)
            elif self._peaks.look_at(forward.calls):
                with self._guard:
                    self._patience.begin_anew()
        finally:
            self._current.forward = None
            if isinstance(forward, RoutineForward):
                forward.stop_noting()
                self._is_lost = self._is_lost or forward.changed
            with self._guard:
                self._running -= 1
                self._patience.end(changed=forward.changed, grew=forward.grew)
                is_needed = self.is_routine or self._running or self._patience.is_left
                # Those that :meth:`remove` has taken off meanwhile stay off.
                if self._only_looks and self.names.are_on and not is_needed:
                    self._follow(self._learnt)

    def _begun(self, pack: Pack, wrap: Callable[[Pack], Pack]) -> FollowedForward | RoutineForward:
        with self._guard:
            # What a step without recipes unpacks changes nothing.
            is_followed = self._patience.begin() or (self._runs_backwards and self._drops)
            routine = None if is_followed else self._learnt
            is_news = self._is_off or (routine is None) == self.is_routine
            if is_news and not self._running:  # others may need the hooks as they are
                self._follow(routine)
            self._running += 1
            if self._routine is not None:
                # An entry tells a routine where it is; of these calls only the number matters.
                counted = self._peaks.varying - _paths_of(self._routine)
                return RoutineForward(pack, self.unpack, self.names, self._routine, self._sizes, counted)
        return FollowedForward(pack, wrap, self.unpack, self._sizes)

    def _follow(self, routine: Routine | None) -> None:
        """The next forwards follow ``routine``, or are followed call by call."""
        self._routine = routine
        self._set_hooks()

    def _set_hooks(self) -> None:
        """Puts hooks on all modules, or only where the routine needs them."""
        self._is_off = False
        self.names.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        routine = self._routine
        if routine is None:
            self.names.install()
            return
        self.names.install(self._called_again)  # before ours, which are prepended: a call is noted with the hooks on
        paths = _paths_of(routine) | self._peaks.varying
        for path in sorted(paths & self.names.parts.keys()):
            enter = _EnterOrAside(self, path, self.names.told) if self.names.told else _Enter(self, path)
            part = self.names.parts[path]
            self._handles.append(part.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))

    def _learn(self, forward: FollowedForward) -> None:
        wanted = forward.dropped | self._unmet(forward)
        if self.reached is not None:
            wanted |= self.reached.names
        self.reached = None
        routine = make_routine(forward.events, forward.calls, wanted, self._containers, forward.unpacked)
        routine = replace(routine, unseen=routine.unseen | self._uncalled(forward))
        with self._guard:
            # What was refused in a forward that was followed is no news in a routine.
            self._refused_before = set(self.refused)
            # Steps that take turns would lose the routine of the last kind time and again, and exceed the budget.
            if self._learnt is not None and not self._is_lost:
                forward.changed = self._learnt.contradicts(routine)
            self._is_lost = False
            self._learnt = routine if self._learnt is None else self._learnt.joined(routine)
            if STEP_ASIDE.count == forward.transforms:  # else hooks come and go on their own account
                saved = {event.name for event in forward.events if isinstance(event, Saved)}
                self._patience.spend(saved.union(forward.calls))

    def peak_of_other_step(self) -> int:
        """Also of a forward that keeps to the routine, but calls more together than others did."""
        return max(super().peak_of_other_step(), self._peaks.peak)

    def _uncalled(self, forward: FollowedForward) -> set[Entered]:
        """First calls of modules that this forward has not called: nothing is known of what is saved in them."""
        uncalled = [path for path in self.names.parts if path not in forward.calls]
        return {Entered(path, 0) for path in uncalled if type(self.names.parts[path]).forward is not nn.Module.forward}

    def _unmet(self, forward: FollowedForward) -> set[str]:
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
        if isinstance(forward, RoutineForward) and not is_dropped and self._is_news(value.name):
            forward.changed = True  # what a recipe needs was not noted, maybe
        return is_dropped

    def is_like(self, value: Value, names: Collection[str]) -> bool:
        """As the plan says; in a forward that it does not know, by what has made the value."""
        if super().is_like(value, names):
            return True
        forward = getattr(self._current, "forward", None)
        if not names or self.twins is None or forward is None or not forward.changed:
            return False
        # The numbers of a compressed or an offloaded value come back as they were, whatever it is.
        return self.twins.is_of_forward(value) and value.operator in self.twins.are_made_like(names)

    def _is_news(self, name: str) -> bool:
        """Whether a value is not dropped that the plan drops, and that was dropped before."""
        return name in self.actions.dropped and name not in self._refused_before

    def widen(self) -> None:
        """The next forwards show what that is."""
        super().widen()
        with self._guard:
            self._patience.begin_anew()

    def want_operands(self, node: Any) -> None:
        """A recipe asks for the operands of ``node``."""
        super().want_operands(node)
        forward = getattr(self._current, "forward", None)
        if isinstance(forward, FollowedForward):
            forward.ask(node)

    def is_unknown(self, name: str) -> bool:
        """Whether nothing was decided about that name; those of a lost routine do not count.

        The forwards after it are followed, and tell what is unknown.
        """
        return super().is_unknown(name) and not name.startswith(OF_ANOTHER_STEP)

    def unpack(self, saved: Any) -> torch.Tensor:
        """Gives the tensor; notes steps with backwards of their own, to follow them for good."""
        # Code that looks at an attribute of a node, such as ``grad_fn._saved_input``, unpacks it as well.
        if self._running and current_graph_task_id() != -1:
            self._runs_backwards = True
        return super().unpack(saved)

    def enter(self, path: str) -> None:
        """A module is called."""
        if repeating():
            return
        forward = getattr(self._current, "forward", None)
        if forward is not None:
            forward.enter(path)
        elif self._only_looks and torch.is_grad_enabled():
            # In a forward that is not looked at: of what it keeps now the next one will tell.
            with self._guard:
                self._patience.begin_anew()

    def put_on(self) -> None:
        """Puts the hooks on again, after :meth:`remove`."""
        self._set_hooks()

    def remove(self) -> None:
        """Takes all hooks off."""
        self.names.remove()
        for handle in self._handles:
            handle.remove()


def _paths_of(routine: Routine) -> set[str]:
    """The modules that ``routine`` has hooks on."""
    return {call.path for call in (*routine.stretches, *routine.unseen, *routine.noting)} - {""}


def _siblings_of(dropped: Collection[str], parts: Mapping[str, nn.Module]) -> set[str]:
    """Modules of the class, and in the list, of one in which the plan drops values: layers that steps may leave out."""
    classes: set[tuple[str, type[nn.Module]]] = set()
    for name in dropped:
        path = module_of(name)
        while path in parts and path:
            classes.add((path.rpartition(".")[0], type(parts[path])))
            path = path.rpartition(".")[0]
    found: set[str] = set()
    for path, part in parts.items():
        # Lists of modules have no forward that could be called.
        if (path.rpartition(".")[0], type(part)) in classes and type(part).forward is not nn.Module.forward:
            found.add(path)
    return found


class _Enter(Passive):
    """The hook of one module; copies of the module, by deepcopy or pickle, get one that does nothing."""

    def __init__(self, values: Practised | None, path: str) -> None:
        self._values = values
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return _Enter, (None, self._path)

    def __call__(self, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        if self._values is not None:
            self._values.enter(self._path)


class _EnterOrAside(AsideInOneGraph, _Enter):
    """A hook that a compiler leaves out which has to make one graph of the module."""

    def __init__(self, values: Practised | None, path: str, told: str) -> None:
        _Enter.__init__(self, values, path)
        AsideInOneGraph.__init__(self, told)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The module is called."""
        _Enter.__call__(self, module, args, kwargs)
