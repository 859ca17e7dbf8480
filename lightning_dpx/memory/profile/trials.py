"""Makes values again whose tensors are all there: what that takes, and whether the same comes out."""

import statistics
import traceback
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from lightning_dpx.devices import HostFullError, is_out_of_memory, raises_out_of_memory
from lightning_dpx.memory.execute.calls import SelectiveReplay, select_output
from lightning_dpx.memory.execute.recipes import NotRecomputable
from lightning_dpx.memory.execute.recomputation import release_inputs
from lightning_dpx.memory.execute.values import Unnamed, Value
from lightning_dpx.memory.profile.call_course import CallCourse
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.data import SavedValue
from lightning_dpx.memory.profile.value_table import FoundValues
from lightning_dpx.memory.tracing.storage_ledger import Allocation
from lightning_dpx.progress import at
from lightning_dpx.torch_compat import key_of

_FEWEST_TIMES = 3  # of values of a kind: their median tells what all of them take

_Kind = tuple[Any, ...]  # the operator, and the bytes of what it makes and of what it is given


def try_values(
    spans: dict[Value, Allocation | None],
    refused: Mapping[str, str],
    numbers: "weakref.WeakKeyDictionary[Value, int]",
    found: FoundValues,
    costs: CostModel,
) -> list[Value]:
    """Makes every value again that can be; in the order of backward, because that is when it will happen.

    Args:
        spans: The values, with their memory.
        refused: Why there is no recipe for some of them, by name.
        numbers: Those of values of earlier backwards; gets those of the new ones.
        found: Gets what is found out.
        costs: Tries them.

    Returns:
        The new values, with those that are not saved on the way to them.
    """
    # What was tried in an earlier backward has its number, and new values may be made from it.
    order: dict[Value, int] = dict(numbers)
    new = _in_order(spans, order, len(found.values))
    trials = _Trials(order, costs)
    _compress_masks(spans, trials, costs)
    for value in new:
        trials.refused[value] = "" if value.make is not None else refused.get(value.name, "")
    _try_all(spans, trials, costs)
    _judge_calls(spans, trials.refused)
    if costs.offloads:
        _offload_refused(spans, trials, costs)
    trials.level()
    _number_storages(spans, trials, found, costs.device)
    for value in new:  # inputs come first, which planners rely on
        why = trials.refused[value] if value in spans else ""  # on the way to others, it is made again whatever it is
        found.values.append(trials.saved_value(value, why, found.saved.get(value.name, 0)))
    numbers.update((value, order[value]) for value in new)
    return new


class _Trials:
    """What is found out about values when they are made again.

    Args:
        order: Their numbers.
        costs: Tries them.

    Attributes:
        order: As given.
        seconds: That they take.
        sizes: Their bytes on the device.
        refused: Why they cannot be made again; empty if they can.
        memory: What they take beyond their own bytes.
        compact: Bytes of those that are masks, compressed.
        copying: Seconds of a copy to the host's memory, of those that may go there.
        offloaded: Those that go there because nothing else is possible.
        storages: The number of the storage that each is in, of those that the step has allocated.
    """

    def __init__(self, order: dict[Value, int], costs: CostModel) -> None:
        self.order = order
        self.seconds = dict.fromkeys(order, 0.0)
        self.sizes = {value: _bytes_on(costs.device, value.tensor) for value in order}
        self.refused: dict[Value, str] = {}
        self.memory = _Beside()
        self.compact: dict[Value, int] = {}
        self.copying: dict[Value, float] = {}
        self.offloaded: set[Value] = set()
        self.storages: dict[Value, int] = {}
        self._kinds: dict[Value, _Kind] = {}
        self._times: dict[_Kind, list[float]] = {}

    def make(self, value: Value, costs: CostModel) -> torch.Tensor:
        """Makes ``value`` again, and notes what that takes.

        What is one of many is made once, to see that it is right: the others tell the time. A first one may fill
        caches, for example of what a library compiled for these shapes, so it is made twice.
        """
        trial = costs.trial_of(value)
        if value.tensor is None:  # nothing was known of it
            self.sizes[value] = 0 if _is_view_of(value, trial.tensor) else _bytes_on(costs.device, trial.tensor)
        kind = self._kind_of(value)
        is_known = len(self._times.get(kind, ())) >= _FEWEST_TIMES
        if is_known:
            # Its own time counts for nothing: it may have found its inputs in no cache.
            self._kinds[value] = kind
        elif costs.is_sure_at_once:
            self.note(value, trial.seconds)
        else:
            first = trial.seconds
            del trial  # or the account would find it beside the next one
            trial = costs.trial_of(value)
            self.note(value, min(first, trial.seconds))
        self.memory.beside[value] = max(0, trial.most - self.sizes[value])
        return trial.tensor

    def note(self, value: Value, seconds: float) -> None:
        """``value`` takes so long."""
        kind = self._kind_of(value)
        self._kinds[value] = kind
        self._times.setdefault(kind, []).append(seconds)

    def _kind_of(self, value: Value) -> _Kind:
        given = [self.sizes[source] for source in value.sources]
        return (value.operator, self.sizes[value], *given)

    def level(self) -> None:
        """Gives all values that the same operator makes from as many bytes the median of their times.

        One of them may have been hit by whatever else the machine did at that moment, and a plan for twenty equal
        layers should not depend on it.
        """
        medians = {kind: statistics.median(times) for kind, times in self._times.items()}
        for value, kind in self._kinds.items():
            self.seconds[value] = medians[kind]

    def saved_value(self, value: Value, refused: str, saved: int) -> SavedValue:
        """``value`` for planners; ``saved`` is the event before which it was."""
        is_offloaded = value in self.offloaded
        call = value.make.call if isinstance(value.make, SelectiveReplay) else None
        # What comes back from the host is computed from nothing, whatever it was made from.
        inputs = () if is_offloaded else tuple(self.order[source] for source in value.sources)
        return SavedValue(
            name=value.name,
            operator=value.operator,
            num_bytes=self.sizes[value],
            storage=self.storages.get(value, -1),
            inputs=inputs,
            seconds=self.seconds[value],
            refused=refused,
            compact=self.compact.get(value, 0),
            offloaded=is_offloaded,
            copying=self.copying.get(value, 0.0),
            saved=saved,
            call="" if call is None else call.name,
            beside=self.memory.beside.get(value, 0),
            picked=value.make is select_output and not is_offloaded,
            stretches=self.memory.stretches_of(value),
            gone=self.memory.gone_of(value),
            state=0 if call is None else call.draws.num_bytes,
        )


def _compress_masks(found: dict[Value, Allocation | None], trials: "_Trials", costs: CostModel) -> None:
    """Notes the bytes and seconds of the masks among ``found``, compressed."""
    for value, span in found.items():
        # What an operator made can be repeated; of a mask nothing in the graph tells who drew it.
        if value.operator or span is None:
            continue
        known = costs.compressed(value, span)
        if known is None:
            continue
        trials.compact[value], seconds = known
        trials.note(value, seconds)
        if value.make is select_output:  # masks are small in another way than by making their call again
            value.inputs[0].make.forgo(value.inputs[1])
            value.forget_recipe()


def _try_all(found: dict[Value, Allocation | None], trials: _Trials, costs: CostModel) -> None:
    """Makes them again, and notes why where that fails."""
    refused = trials.refused
    for number, value in enumerate(reversed(list(found))):
        at("trying operators", number, len(found))
        if value.make is None:
            refused[value] = "" if value in trials.compact else refused[value] or "it does not come from the graph"
            continue
        try:
            # Also what is elsewhere or was there before: others may be made from it.
            refused[value] = _try(value, trials, costs)
        except Exception as error:
            if is_out_of_memory(error):
                raise  # fewer rows may do, and the caller knows how to get them
            refused[value] = f"{value.operator} failed when repeated: {error}"


def _offload_refused(found: dict[Value, Allocation | None], trials: _Trials, costs: CostModel) -> None:
    """What cannot be made again may still go to the host's memory and come back."""
    named = [value for value, span in found.items() if value.name and span is not None]
    trials.copying = _copying(named, costs)
    trials.offloaded = {value for value in trials.copying if trials.refused[value]}
    for value in trials.offloaded:
        # Once out in forward, and once back in backward.
        trials.seconds[value] = 2 * trials.copying[value]
        trials.refused[value] = ""


def _number_storages(
    spans: dict[Value, Allocation | None], trials: _Trials, found: FoundValues, device: torch.device
) -> None:
    """Values in one storage get the same number; those in none that the step has allocated are refused."""
    for value, span in spans.items():
        if span is None:
            here = value.tensor is None or value.tensor.device == device
            why = "it was there before the step" if here else "it is on another device"
            trials.refused[value] = trials.refused[value] or why
            continue
        trials.storages[value] = found.storage_of(value.name, span)


def _judge_calls(found: Collection[Value], refused: dict[Value, str]) -> None:
    """A call that is wrong in one value is trusted in none; in its scratch memory, if it is right in the others."""
    picked = [value for value in refused if value.make is select_output]
    # Scratch memory that differs says nothing against its call; any other value does.
    unfaithful = set()
    for value in picked:
        if refused[value] and not _is_scratch(value):
            unfaithful.add(value.inputs[0])
    for value in picked:
        if value.inputs[0] in unfaithful:
            refused[value] = refused[value] or "its module gave other numbers elsewhere when it was called again"
    right = set()
    for value in picked:
        is_number = value.tensor is not None and value.tensor.is_floating_point()
        if is_number and value in found and not refused[value]:
            right.add(value.inputs[0])
    for value in picked:
        if _is_scratch(value) and value.inputs[0] in right:
            refused[value] = ""


def _in_order(found: Iterable[Value], order: dict[Value, int], first: int) -> list[Value]:
    """Numbers ``found`` and what they are computed from, but for what is in ``order`` already; inputs first."""
    new: list[Value] = []
    for value in found:
        # By a stack: a chain of values may be longer than Python recurses.
        stack = [value]
        while stack:
            top = stack[-1]
            missing = [source for source in top.sources if source not in order]
            if missing:
                stack += missing
                continue
            stack.pop()
            if top not in order:
                order[top] = first + len(new)
                new.append(top)
    return new


class _Beside:
    """What values take beyond themselves while they are made.

    Attributes:
        beside: Bytes at the most.
        courses: Of calls.
    """

    def __init__(self) -> None:
        self.beside: dict[Value, int] = {}
        self.courses: dict[Value, CallCourse] = {}

    def stretches_of(self, value: Value) -> tuple[int, ...]:
        """The bytes of each stretch of a call; nothing for other values."""
        if value in self.courses:
            return self.courses[value].stretches
        return ()

    def gone_of(self, value: Value) -> int:
        """The first stretch of its call without a tensor that is picked."""
        course = self.courses.get(value.inputs[0]) if value.make is select_output else None
        if course is None:
            return 0
        return course.gone.get(value.inputs[1], len(course.stretches))


def _try(value: Value, trials: _Trials, costs: CostModel) -> str:
    """Repeats the operator of ``value``, and unsaved ones on the way; says what is wrong with the result."""
    # A profile keeps what is saved, so only what is on the way to it is missing: each is made
    # once, and goes when all that is made from it has been tried.
    stack = [source for source in value.sources if source.tensor is None]
    while stack:
        top = stack[-1]
        if top.tensor is not None:
            stack.pop()
            continue
        missing = [source for source in top.sources if source.tensor is None]
        if missing:
            stack += missing
            continue
        if isinstance(top.make, SelectiveReplay):
            for argument in top.make.call.arguments.tensors:
                argument.tensor()  # refuses what was written to since; what is kept here is a copy
            # The call runs once more to be watched, because what it takes depends on what is
            # wanted of it.
            trials.memory.courses[top] = _course_of(top, costs)
        top.tensor = trials.make(top, costs)
        stack.pop()
        release_inputs(top)
    again = trials.make(value, costs)
    release_inputs(value)
    original = value.held()  # the profile keeps everything
    operator = value.operator or "the call that saves it"
    if again.shape != original.shape or again.dtype != original.dtype:
        return f"{operator} gave another shape or dtype when repeated"
    if costs.is_same(again, original):
        return ""
    return f"{operator} gave other numbers when repeated"


def _course_of(call: Value, costs: CostModel) -> CallCourse:
    """What ``call`` takes; without room on its device to find out, it counts as one that cannot be made again."""
    try:
        return raises_out_of_memory(costs.course_of)(call)
    except HostFullError:
        raise
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # they hold on to what did not fit
        raise NotRecomputable(f"there was no room to try {call.operator} once more") from None


def _bytes_on(device: torch.device, tensor: torch.Tensor | None) -> int:
    """What ``tensor`` takes there: nothing if it is on another device, as in parts that are shifted."""
    if tensor is not None and tensor.device == device:
        return tensor.nbytes
    return 0


def _copying(values: Iterable[Value], costs: CostModel) -> dict[Value, float]:
    """What a copy of each takes; equal sizes are measured once."""
    by_size: dict[int, float] = {}
    seconds: dict[Value, float] = {}
    for value in values:
        tensor = value.tensor
        if tensor is None:
            continue
        if tensor.nbytes not in by_size:
            by_size[tensor.nbytes] = costs.copy_seconds(tensor)
        seconds[value] = by_size[tensor.nbytes]
    return seconds


def _is_scratch(value: Value) -> bool:
    """Whether it may be what a library keeps for itself: bytes, some of which are never written or read."""
    # They differ from call to call; that the call's other results are the same tells that they will do.
    return (
        value.make is select_output
        and not value.operator
        and value.tensor is not None
        and value.tensor.dtype == torch.uint8
    )


def _is_view_of(value: Value, tensor: torch.Tensor) -> bool:
    """Whether ``value``, made again as ``tensor``, lies in the memory of what it is made from, and takes none of its
    own."""
    if isinstance(value.make, SelectiveReplay):
        return False
    address = key_of(tensor.untyped_storage())
    given: list[Any] = [source.tensor for source in value.sources]
    for entry in value.inputs:
        given.append(entry.tensor if isinstance(entry, Unnamed) else entry)
    others = [entry for entry in given if isinstance(entry, torch.Tensor)]
    return any(key_of(other.untyped_storage()) == address for other in others)
