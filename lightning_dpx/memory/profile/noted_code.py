"""Compiled code in a profiled step: the nodes of the graph that it makes, and when its functions run."""

import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.torch_compat import nodes_so_far, number_of


class NotedCode:
    """Watches the calls of compiled parts and functions; one runs at a time, what it calls is a part of it.

    Args:
        trace: Tells which event it is.

    Attributes:
        function: The number of the compiled function that is running; -1 for none.
        functions: The events between which each has run.
        around: Numbers of module calls in which compiled functions ran.
    """

    def __init__(self, trace: MemoryTrace) -> None:
        self.function: int = -1
        self.functions: list[tuple[int, int]] = []
        self.around: set[int] = set()
        self._trace = trace
        self._made: list[tuple[int, int]] = []  # by each call: the first node, and the next after it
        self._first = 0  # node of the running one

    def enter(self) -> None:
        """A call of compiled code begins."""
        self._first = nodes_so_far()

    def leave(self) -> None:
        """It is over."""
        self._made.append((self._first, nodes_so_far()))

    def begin_function(self, open_calls: Iterable[int]) -> None:
        """A compiled function begins, within these module calls."""
        # What is saved in it is not known tensor by tensor, so no replay of a call round it is counted on.
        self.around.update(open_calls)
        # As for parts that are compiled, both of its ends are events.
        self.function = len(self.functions)
        self.functions.append((self._trace.mark(), -1))
        self.enter()

    def end_function(self) -> None:
        """It is over."""
        self.leave()
        begin, _ = self.functions[self.function]
        self.functions[self.function] = begin, self._trace.mark()
        self.function = -1

    def has_made(self, node: Any) -> bool:
        """Whether a call of compiled code that is over has made ``node``."""
        if not self._made:
            return False
        number = number_of(node)
        # They are in order and apart, as parts of compiled parts have no calls of their own.
        at = bisect_right(self._made, (number, math.inf)) - 1
        return at >= 0 and self._made[at][0] <= number < self._made[at][1]
