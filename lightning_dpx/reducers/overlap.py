"""Gradients that travel while backward still runs, pack by pack (as PyTorch DDP's buckets do)."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_dpx.errors import ReplicationError
from lightning_dpx.reducers.buckets import split_at_boundaries


class OverlappedReduction:
    """Reduces every pack of parameters as soon as all active replicas have their gradients for it.

    Which parameters get a gradient, and that they get it once, is learned from the backward before; a parameter that
    did not behave so is left for the end.

    Args:
        columns: K x N parameters, one list per replica.
        num_splits: Packs; see :func:`split_at_boundaries`.
        reduce: Reduces the parameters with these indices; called from whichever thread completes a pack.
        names: Of the parameters, for errors.
    """

    def __init__(
        self,
        columns: Sequence[Sequence[nn.Parameter]],
        num_splits: int,
        reduce: Callable[[list[int]], None],
        names: Sequence[str],
    ) -> None:
        self._columns, self._reduce, self._names, self._lock = columns, reduce, names, threading.Lock()
        splits = split_at_boundaries([parameter.numel() for parameter in columns[0]], num_splits)
        self._split_of = {index: number for number, split in enumerate(splits) for index in split}
        self._handles: list[RemovableHandle] = []
        self._expected: set[int] = set()
        self._waiting: list[set[tuple[int, int]]] = []
        self._members: list[list[int]] = [list(split) for split in splits]
        self._fired: Counter[tuple[int, int]] = Counter()
        self._done: set[int] = set()
        self._during_backward = False

    @property
    def packs(self) -> list[list[int]]:
        """The parameters of every pack, as indices, in the order in which backward finishes them."""
        return self._members

    @property
    def done(self) -> frozenset[int]:
        """The parameters that the last backward reduced by itself."""
        return frozenset(self._done)

    @contextmanager
    def during_backward(self, active: Sequence[int]) -> Iterator[None]:
        """For one backward of these replicas."""
        if not self._handles:
            self._install()
        self._done, self._fired = set(), Counter()
        self._waiting = [
            {(replica, index) for replica in active for index in split if index in self._expected}
            for split in self._members
        ]
        self._during_backward = True
        try:
            yield
        finally:
            self._during_backward = False
        self._expected = {i for i in self._split_of if all(self._fired[replica, i] == 1 for replica in active)}

    @property
    def is_during_backward(self) -> bool:
        """Whether a backward is under way whose gradients are wanted."""
        return self._during_backward

    def forget(self) -> None:
        """After the rest has been reduced, or after an error."""
        self._done = set()

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _install(self) -> None:
        for replica, column in enumerate(self._columns):
            for index, parameter in enumerate(column):
                self._handles.append(_hook(parameter, partial(self._on_gradient, replica, index)))

    def _on_gradient(self, replica: int, index: int, _: object) -> None:
        if not self._during_backward:
            return
        with self._lock:
            self._fired[replica, index] += 1
            if index in self._done:
                raise ReplicationError(
                    f"Parameter {self._names[index]} got a second gradient in one backward, after the first was sent: "
                    "use DPXStrategy(gradient_buckets=0) for modules whose recomputation changes from step to step."
                )
            number = self._split_of[index]
            waiting = self._waiting[number]
            if (replica, index) not in waiting:
                return
            waiting.discard((replica, index))
            ready = [] if waiting else [member for member in self._members[number] if member in self._expected]
            self._done.update(ready)
        if ready:
            self._reduce(ready)


def _hook(parameter: nn.Parameter, hook: Callable[[object], None]) -> RemovableHandle:
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)  # torch takes hooks only while it does
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    if frozen:
        parameter.requires_grad_(False)
    return handle
