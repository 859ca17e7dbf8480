"""Saved-tensor hooks that learn where they are needed, and are on nowhere else: see ``routine.py``."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.execute.calls import repeating
from lightning_dpx.memory.execute.follow_schedule import FollowSchedule
from lightning_dpx.memory.execute.graph_tape import ReachedValues
from lightning_dpx.memory.execute.hook_placement import HookPlacement, paths_of
from lightning_dpx.memory.execute.largest_inputs import tensors_in
from lightning_dpx.memory.execute.learned_routine import LearnedRoutine
from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.routine import Routine, Saved
from lightning_dpx.memory.execute.routine_forwards import OF_ANOTHER_STEP, FollowedForward, RoutineForward, SavedSizes
from lightning_dpx.memory.execute.saved_tensor_hooks import Pack, Rematerialization, ValueActions
from lightning_dpx.memory.execute.similar_values import SimilarValues
from lightning_dpx.memory.execute.step_peaks import StepPeaks
from lightning_dpx.memory.execute.transforms import STEP_ASIDE
from lightning_dpx.memory.execute.values import Value
from lightning_dpx.memory.plan.plan import module_of
from lightning_dpx.torch_compat import current_graph_task_id


class RoutineHooks(Rematerialization):
    """Saved-tensor hooks that learn where they are needed.

    Args:
        names: Tells which module call is running; its hooks are on the modules while a forward is followed.
        trusted: Operators that the plan repeats.
        actions: As of :class:`Rematerialization`.
        similar: As of :class:`Rematerialization`.
        watched: The least number of forwards that are followed call by call: the first ones, and as many again after
            one that did not follow the routine.
    """

    def __init__(
        self,
        names: CallNames,
        trusted: Collection[str],
        actions: ValueActions,
        similar: SimilarValues | None = None,
        *,
        watched: int = 1,
    ) -> None:
        super().__init__(names, actions, similar)
        self._trusted = trusted
        self._current = threading.local()
        planned = {*self.actions.dropped, *_siblings_of(self.actions.dropped, names.parts)}
        self._schedule = FollowSchedule(watched, planned)
        self._learned = LearnedRoutine(names.parts)
        self._drops = bool(self.actions.dropped or self.actions.compressed or self.actions.offloaded)
        # Where steps are only looked at, no hook stays on after that: a compiler would have to leave them out.
        self._placement = HookPlacement(names, is_off=self._only_looks)
        self._runs_backwards = False  # within a forward: what is saved there depends on what is unpacked for
        # Several threads may run forwards of the module at the same time.
        self._guard = threading.Lock()
        self._running = 0
        self._refused_before: set[str] = set()
        self._sizes = SavedSizes()
        # Who watches asks for all that is unknown, and plans for that.
        self._peaks = StepPeaks(similar if self._schedule.follows_growth else None)

    @property
    def _only_looks(self) -> bool:
        """Whether nothing is dropped, and steps are looked at for what they keep."""
        return not self._drops and self._schedule.follows_growth

    @property
    def num_deviations(self) -> int:
        """Forwards so far that did not follow the routine that they began with."""
        return self._schedule.num_deviations

    @property
    def is_routine(self) -> bool:
        """Whether forwards follow a routine now, and hooks are only where it needs them."""
        return self._placement.routine is not None

    @property
    def is_followed_for_good(self) -> bool:
        """Whether a forward has run a backward of its own, and all of them are followed call by call."""
        return self._runs_backwards

    @contextmanager
    def active(self, inputs: Any = (), *, counts_waiting: bool = False) -> Iterator[None]:
        """See :meth:`Rematerialization.active`; a forward with larger inputs is followed call by call again."""
        if self.passes(inputs):
            yield
            return
        # Searched once for both who ask.
        inputs = tensors_in(inputs)
        self._look_for_larger(inputs)
        with super().active(inputs, counts_waiting=counts_waiting):
            yield

    def passes(self, inputs: Any) -> bool:
        """See :meth:`Rematerialization.passes`; a forward with larger inputs is followed call by call again."""
        if not self._has_nothing_to_do:
            return False
        self._look_for_larger(inputs)
        return self._schedule.passes()

    def _look_for_larger(self, inputs: Any) -> None:
        # What is kept outside of the stretches grows without a sign of it, and so do steps that drop nothing.
        if self._schedule.follows_growth and self._peaks.have_grown(inputs):
            with self._guard:
                self._schedule.begin_anew()

    @property
    def _has_nothing_to_do(self) -> bool:
        """Whether forwards only have to be looked at now and then."""
        # Hooks are on all modules where another thread has needed them so far; the next forward takes them off.
        if not self._only_looks or self._learned.routine is None or self._placement.routine is None:
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
                    self._schedule.begin_anew()
        finally:
            self._current.forward = None
            if isinstance(forward, RoutineForward):
                forward.stop_noting()
                self._learned.is_lost = self._learned.is_lost or forward.changed
            with self._guard:
                self._running -= 1
                self._schedule.end(changed=forward.changed, grew=forward.grew)
                is_needed = self.is_routine or self._running or self._schedule.is_left
                # Those that :meth:`remove` has taken off meanwhile stay off.
                if self._only_looks and self.names.are_on and not is_needed:
                    self._follow(self._learned.routine)

    def _begun(self, pack: Pack, wrap: Callable[[Pack], Pack]) -> FollowedForward | RoutineForward:
        with self._guard:
            # What a step without recipes unpacks changes nothing.
            is_followed = self._schedule.begin() or (self._runs_backwards and self._drops)
            routine = None if is_followed else self._learned.routine
            is_news = self._placement.is_off or (routine is None) == self.is_routine
            if is_news and not self._running:  # others may need the hooks as they are
                self._follow(routine)
            self._running += 1
            if self._placement.routine is not None:
                # An entry tells a routine where it is; of these calls only the number matters.
                counted = self._peaks.varying - paths_of(self._placement.routine)
                return RoutineForward(pack, self.unpack, self.names, self._placement.routine, self._sizes, counted)
        return FollowedForward(pack, wrap, self.unpack, self._sizes)

    def _follow(self, routine: Routine | None) -> None:
        """The next forwards follow ``routine``, or are followed call by call."""
        self._placement.routine = routine
        self._placement.put_on(self._peaks.varying, self.enter)

    def _learn(self, forward: FollowedForward) -> None:
        needed = forward.dropped | self._unmet(forward)
        if self.reached is not None:
            needed |= self.reached.names
        self.reached = None
        routine = self._learned.routine_of(forward, needed)
        with self._guard:
            # What was refused in a forward that was followed is no news in a routine.
            self._refused_before = set(self.refused)
            self._learned.join(forward, routine)
            if STEP_ASIDE.count == forward.transforms:  # else hooks come and go on their own account
                saved = {event.name for event in forward.events if isinstance(event, Saved)}
                self._schedule.spend(saved.union(forward.calls))

    def peak_of_other_step(self) -> int:
        """Also of a forward that keeps to the routine, but calls more together than others did."""
        return max(super().peak_of_other_step(), self._peaks.peak)

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
        if forward is not None and forward.changed and is_trusted and self.can_make(value, node, output, self.similar):
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
        if not names or self.similar is None or forward is None or not forward.changed:
            return False
        # The numbers of a compressed or an offloaded value come back as they were, whatever it is.
        return self.similar.is_of_forward(value) and value.operator in self.similar.are_made_like(names)

    def _is_news(self, name: str) -> bool:
        """Whether a value is not dropped that the plan drops, and that was dropped before."""
        return name in self.actions.dropped and name not in self._refused_before

    def widen(self) -> None:
        """The next forwards show what that is."""
        super().widen()
        with self._guard:
            self._schedule.begin_anew()

    def request_operands(self, node: Any) -> None:
        """A recipe asks for the operands of ``node``."""
        super().request_operands(node)
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
                self._schedule.begin_anew()

    def put_on(self) -> None:
        """Puts the hooks on again, after :meth:`remove`."""
        self._placement.put_on(self._peaks.varying, self.enter)

    def remove(self) -> None:
        """Takes all hooks off."""
        self._placement.remove()


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
