"""What a profile finds out about the values of a step, and the storages that they are in."""

import weakref
from collections.abc import Mapping
from dataclasses import replace

from lightning_dpx.memory.execute.calls import SelectiveReplay
from lightning_dpx.memory.execute.values import Value
from lightning_dpx.memory.profile.data import SavedValue
from lightning_dpx.memory.tracing.storage_ledger import Allocation

_OFFLOADED = "it cannot be made again, and a step that runs a backward of its own offloads nothing"
_NOT_IN_GRAPH = "it does not come from the graph"
_ONLY_BY_CALL = "it goes in the forward, and only the call of a module gives it again"


class DeadValue:
    """A value that forward itself let go, because nothing leads from it to the loss.

    Args:
        value: It.
        span: Its memory.
        refused: Why it cannot be made again.
    """

    def __init__(self, value: Value, span: Allocation, refused: str) -> None:
        self.name: str = value.name
        self.operator: str = value.operator
        self.num_bytes: int = value.held().nbytes
        self.span = span
        # Weak, because the step lets go of values as it would without a profile.
        self.sources: list[weakref.ref[Value]] = [weakref.ref(source) for source in saved_sources(value)]
        self.refused: str = "" if value.make is not None else refused or _NOT_IN_GRAPH
        # A plan names the calls that are made again for what backward asks for, and only these are noted.
        if _needs_call(value):
            self.refused = _ONLY_BY_CALL


def saved_sources(value: Value) -> list[Value]:
    """What was saved of that which ``value`` is made from, also by way of what was not."""
    found = []
    waiting = list(value.sources)
    while waiting:
        source = waiting.pop()
        if source.name:
            found.append(source)
        else:
            waiting += source.sources
    return found


def _needs_call(value: Value) -> bool:
    """Whether a module would be called again on the way to ``value``, as far back as to what is saved."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one.make, SelectiveReplay):
            return True
        waiting += (source for source in one.sources if not source.name)
    return False


class FoundValues:
    """Values and storages of a step, numbered in the order in which they were found.

    Attributes:
        values: For planners; each after those that it is made from.
        saved: The event before which each was saved, by name.
        memories: The name of the first value in each storage, and its memory.
        storages: The number of a storage, by the id of its memory.
        dead: What forward itself let go.
    """

    def __init__(self) -> None:
        self.values: list[SavedValue] = []
        self.saved: dict[str, int] = {}
        self.memories: list[tuple[str, Allocation]] = []
        self.storages: dict[int, int] = {}
        self.dead: list[DeadValue] = []

    def storage_of(self, name: str, span: Allocation) -> int:
        """The number of the storage that has that memory; values in one storage get the same."""
        # The list below holds every allocation, so that no id is given twice.
        if id(span) not in self.storages:
            self.storages[id(span)] = len(self.memories)
            self.memories.append((name, span))
        return self.storages[id(span)]

    def add_dead(self, order: Mapping[Value, int]) -> None:
        """Adds what forward let go: no backward asks for it, so it is dropped for nothing.

        Args:
            order: The numbers of the others.
        """
        for dead in self.dead:
            inputs = []
            for reference in dead.sources:
                source = reference()
                if source is not None and source in order:  # others have gone in forward as well
                    inputs.append(order[source])
            self.values.append(
                SavedValue(
                    dead.name,
                    dead.operator,
                    dead.num_bytes,
                    self.storage_of(dead.name, dead.span),
                    tuple(inputs),
                    0.0,
                    dead.refused,
                    saved=self.saved[dead.name],
                )
            )

    def offload_nothing(self) -> None:
        """A copy to the host's memory is awaited when the forward is over, and here a backward may come before that."""
        for number, value in enumerate(self.values):
            # Without the time of a copy no planner takes it for one that can be offloaded.
            if value.copying:
                refused = _OFFLOADED if value.offloaded else value.refused
                self.values[number] = replace(value, copying=0.0, offloaded=False, refused=refused)
