"""Metrics that a step makes: each replica has one of its own by then, with its own rows, and a look comes too late.

So the making is seen: of all that a step makes, only what the module leads to afterwards counts. A batch in which some
are made is run on one device, and replicas share them from the next one on.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torchmetrics import Metric

from lightning_dpx.errors import some_of
from lightning_dpx.lightning.metrics.metrics import KINDS
from lightning_dpx.lightning.run_again import RunAgain
from lightning_dpx.python_objects.reachable import reachable

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

T = TypeVar("T")
ADVICE = "Make them before fit, or in a hook between steps."


class MetricsAppear(RunAgain):
    """A step has made metrics in slices, and is to run again on the whole batch.

    Args:
        reason: Why, as a sentence.
        advice: What to do about it.
    """

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self._reason = reason
        self._advice = advice

    def run_again(self, session: "Session", name: str, run: Callable[[], T]) -> T:
        """What the step gives for this batch, whole; at the next one the replicas share the metrics."""
        session.metric_watch.note_repeat()
        reason = f"{self._reason} They had begun it: what it draws, and counts outside of the module, they did as well."
        session.whole_batches.give_next_whole(name, reason, self._advice)
        return run()


class MadeMetrics:
    """The metrics that are made while it watches."""

    def __init__(self) -> None:
        self._made: dict[int, weakref.ref[Metric]] = {}  # by id, as long as they live

    def __bool__(self) -> bool:
        """Whether any have been."""
        return bool(self._made)

    def begin(self) -> None:
        """It watches from here on, and forgets what it has seen."""
        self._made.clear()
        if self not in _WATCHES:
            _WATCHES.add(self)
            _REDIRECTED.begin()

    def end(self) -> None:
        """Ends the watch."""
        _WATCHES.discard(self)
        # Of a run that was not torn down the watch is gone with its session.
        # That of another run, in the middle of which this one was, goes on.
        if not _WATCHES:
            _REDIRECTED.end()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Steps run in here."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def note(self, metric: Metric) -> None:
        """A metric has been made."""
        key = id(metric)
        self._made[key] = weakref.ref(metric, lambda _: self._made.pop(key, None))

    def held_by(self, modules: Sequence[nn.Module], known: Sequence[str]) -> list[str]:
        """The paths of those that modules lead to.

        Args:
            modules: Those that have run the step.
            known: Paths of metrics that were there before: what these make for themselves is theirs.
        """
        alive = self._alive()
        if not alive:
            return []
        # A tracker, say, makes one in each call of its own.
        inside = tuple(f"{path}{mark}" for path in known for mark in (".", "["))
        found: list[str] = []
        for module in modules:
            for path, metric in reachable(module, KINDS):
                if id(metric) in alive and not path.startswith(inside):
                    found.append(path)
        return list(dict.fromkeys(found))

    def _alive(self) -> set[int]:
        """The ids of those that are there still."""
        # A metric is in reference cycles with its own methods, so one that the step has dropped may be among them.
        return {key for key, reference in list(self._made.items()) if reference() is not None}

    def reset(self, modules: Sequence[nn.Module]) -> None:
        """Those that are left, though the step will run again, have seen nothing yet."""
        alive = self._alive()
        for module in modules:
            for _, metric in reachable(module, KINDS):
                if id(metric) in alive:
                    metric.reset()


class _Redirected:
    """Makes metrics known to all that watch.

    For a whole run: to exchange methods of a class with hundreds of others that inherit from it takes 50 us.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}

    def begin(self) -> None:
        # By both ways: a clone, as of a prototype, is no call of the constructor.
        for name in ("__init__", "__setstate__"):
            if name not in self._before:
                self._before[name] = vars(Metric)[name]
                type.__setattr__(Metric, name, _noted(self._before[name]))

    def end(self) -> None:
        while self._before:
            name, own = self._before.popitem()
            type.__setattr__(Metric, name, own)


def _noted(own: Any) -> Any:
    @wraps(own)
    def call(self: Metric, *args: Any, **kwargs: Any) -> Any:
        result = own(self, *args, **kwargs)
        for watch in list(_WATCHES):
            watch.note(self)
        return result

    return call


_WATCHES: "weakref.WeakSet[MadeMetrics]" = weakref.WeakSet()
_REDIRECTED = _Redirected()


def why_whole(paths: Sequence[str]) -> tuple[str, str]:
    """Why a batch in which metrics are made goes whole, and what to do about it."""
    reason = f"The step makes metrics in it ({some_of(paths)}), and every slice would make its own."
    return reason, ADVICE
