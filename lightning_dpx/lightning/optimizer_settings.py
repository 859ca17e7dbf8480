"""What a step changes of optimizers and schedulers (a learning rate, say), it changes once, however many slices run it.

    batch finds lr = 0.1 --slice 0--> 0.09 --put back--> 0.1 --slice 1--> 0.09 --> 0.09, as on one device

Every slice finds them as the batch did, and what the first one makes of them is what remains. Steps by hand have views
of their optimizers instead (`manual/replica_views.py`).
"""

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import starmap
from typing import TYPE_CHECKING, Any

import torch

from lightning_dpx.python_objects.object_graph import PLAIN
from lightning_dpx.torch_compat import version_counter

if TYPE_CHECKING:
    from lightning_dpx.lightning.strategy import DPXStrategy

_SEQUENCES = (list, tuple)
_MISSING = object()
_PARAMETERS = "params"


class SettingsSnapshot:
    """The hyperparameters of optimizers, and the attributes of schedulers, as they are now.

    Args:
        optimizers: Whose parameter groups.
        schedulers: And those that they hold.
    """

    __slots__ = ("_held", "_tensors")

    def __init__(self, optimizers: Iterable[Any], schedulers: Iterable[Any]) -> None:
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []  # what is there, and a copy of it
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                # The dicts themselves are kept beside their copies: user code may hold them, so
                # they are put back in place.
                self._held.append((group, dict(group)))
        for scheduler in _with_children(schedulers):
            self._held.append((vars(scheduler), dict(vars(scheduler))))
        self._tensors = self._noted_tensors()

    def _noted_tensors(self) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
        """Settings that are tensors, with versions and copies: schedulers write ``lr=torch.tensor(0.1)`` in place."""
        found = [value for _, before in self._held for value in before.values() if type(value) is torch.Tensor]
        return [(value, version_counter(value), value.detach().clone()) for value in found]

    @property
    def is_current(self) -> bool:
        """Whether nothing has changed since."""
        # Asked at every slice: two generators would cost as much as what they ask.
        for tensor, version, _ in self._tensors:
            if version_counter(tensor) != version:
                return False
        return all(starmap(_are_same, self._held))

    def again(self) -> "SettingsSnapshot":
        """A snapshot of the same optimizers and schedulers, as they are now."""
        snapshot = SettingsSnapshot((), ())
        snapshot._held = [(now, dict(now)) for now, _ in self._held]
        snapshot._tensors = snapshot._noted_tensors()
        return snapshot

    def restore(self) -> None:
        """Puts all settings back; parameters stay in the groups that they are in."""
        for now, before in self._held:
            for key in [key for key in now if key not in before]:
                del now[key]
            for key, value in before.items():
                if key != _PARAMETERS:
                    now[key] = value
        with torch.no_grad():
            for place, (tensor, version, before_it) in enumerate(self._tensors):
                if version_counter(tensor) != version:
                    tensor.copy_(before_it)
                    # That is a write as well, after which all is as it was.
                    self._tensors[place] = tensor, version_counter(tensor), before_it


class OptimizerSettings:
    """The settings of a run's optimizers and schedulers, which a step changes once.

    Args:
        strategy: Has them.

    Attributes:
        has_changed: Whether the slices of the last batch have changed any.
    """

    def __init__(self, strategy: "DPXStrategy") -> None:
        self._strategy = strategy
        self._before: SettingsSnapshot | None = None
        self._after_first: SettingsSnapshot | None = None
        self._has_begun = False
        self.has_changed: bool = False

    def snapshot(self) -> SettingsSnapshot:
        """The settings as they are now."""
        strategy = self._strategy
        return SettingsSnapshot(strategy.optimizers, [config.scheduler for config in strategy.lr_scheduler_configs])

    @contextmanager
    def changed_once(self) -> Iterator[None]:
        """The slices of one batch run in here; :attr:`has_changed` says afterwards whether they have changed any."""
        before = self.snapshot()
        self._before = before
        self._after_first = None
        self._has_begun = False
        try:
            yield
        except BaseException:
            before.restore()  # the batch may be run again
            raise
        finally:
            self._before = None
        after_first = self._after_first
        self.has_changed = not before.is_current
        if after_first is None:
            return
        # The first slice may have changed nothing, and a later one something.
        if after_first is not before:
            self.has_changed |= not after_first.is_current
        # As good as always all are as they were: to put them back took as long as to ask twice more.
        if self.has_changed:
            after_first.restore()

    def begin_slice(self) -> None:
        """One slice begins, those before it are over."""
        before = self._before
        if before is None:
            return
        is_first = not self._has_begun
        self._has_begun = True
        # It finds what the batch found, as nothing has run yet.
        if is_first:
            return
        if before.is_current:
            # The first slice has left everything as it was, so that is what remains.
            self._after_first = self._after_first or before
            return
        if self._after_first is None:
            self._after_first = before.again()
        before.restore()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What runs in here has run before: it changes nothing."""
        before = self.snapshot()
        try:
            yield
        finally:
            before.restore()


def plain_settings(optimizers: Iterable[Any], schedulers: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Numbers and texts among them, by name."""
    for place, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if type(value) in PLAIN:
                    yield f"optimizers[{place}].param_groups[{number}][{key!r}]", value
    for place, scheduler in enumerate(schedulers):
        yield f"lr_schedulers[{place}].last_epoch", getattr(scheduler, "last_epoch", None)


def _with_children(schedulers: Iterable[Any]) -> Iterator[Any]:
    for scheduler in schedulers:
        yield scheduler
        children = getattr(scheduler, "_schedulers", None)  # of a SequentialLR, a ChainedScheduler
        if isinstance(children, _SEQUENCES):
            yield from _with_children(children)


def _are_same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    if len(now) != len(before):
        return False
    # Asked at every slice, and nearly always so: in C, a quarter of the time.
    if all(map(operator.is_, now, before)) and all(map(operator.is_, now.values(), before.values())):
        return True
    for key, value in before.items():
        found = now.get(key, _MISSING)
        if found is not value and not _is_same(found, value):
            return False
    return True


def _is_same(one: Any, two: Any) -> bool:
    """Whether both are the same object, the same number or text, or sequences of such."""
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    # Equal numbers and texts are no change, even as other objects.
    if type(one) in PLAIN:
        return bool(one == two)
    if type(one) in _SEQUENCES:
        return len(one) == len(two) and all(map(_is_same, one, two))
    return False
