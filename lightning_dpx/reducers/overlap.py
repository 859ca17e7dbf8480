"""Gradients that travel while backward still runs, bucket by bucket, as in PyTorch DDP."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_dpx.devices import chosen_streams, is_host, stream_context
from lightning_dpx.errors import ReplicationError
from lightning_dpx.reducers.buckets import split_at_boundaries


class OverlappedReduction:
    """Reduces every bucket of parameters as soon as all active replicas have their gradients for it.

    Which parameters get a gradient, and that they get it once, is learned from the backward before; a parameter that
    did not behave so is left for the end.

    Args:
        columns: K x N parameters, one list per replica.
        num_buckets: Buckets; see :func:`split_at_boundaries`.
        reduce: Reduces the parameters with these indices; called from whichever thread completes a bucket.
        names: Of the parameters, for errors.
    """

    def __init__(
        self,
        columns: Sequence[Sequence[nn.Parameter]],
        num_buckets: int,
        reduce: Callable[[list[int]], None],
        names: Sequence[str],
    ) -> None:
        self._columns = columns
        self._reduce = reduce
        self._names = names
        # On the host nothing is queued, so nothing is asked in any step.
        devices = {parameter.device for column in columns for parameter in column}
        self._accelerators = [device for device in devices if not is_host(device)]
        self._streams: tuple[torch.Stream, ...] = ()  # that the caller of the backward has chosen
        # Autograd's threads of several devices count at the same time.
        self._lock = threading.Lock()
        splits = split_at_boundaries([parameter.numel() for parameter in columns[0]], num_buckets)
        self._bucket_of: dict[int, int] = {}
        for number, split in enumerate(splits):
            self._bucket_of.update(dict.fromkeys(split, number))
        self._handles: list[RemovableHandle] = []
        # Nothing is known before the first backward, so nothing is expected: it is reduced at its end as a whole.
        self._expected: set[int] = set()
        self._buckets: list[list[int]] = [list(split) for split in splits]
        self._unfilled = [0] * len(splits)  # by bucket, expected gradients that have not come yet
        self._num_gradients = self._none_yet()
        self._is_active = [False] * len(columns)
        self._done: set[int] = set()
        self._during_backward = False

    def _none_yet(self) -> list[list[int]]:
        """K x N: how many gradients each parameter got in this backward."""
        return [[0] * len(column) for column in self._columns]

    @property
    def buckets(self) -> list[list[int]]:
        """The parameters of every bucket, as indices, in the order in which backward finishes them."""
        return self._buckets

    @property
    def done(self) -> frozenset[int]:
        """The parameters that the last backward reduced by itself."""
        return frozenset(self._done)

    @contextmanager
    def during_backward(self, active: Sequence[int], *, waits_for_last: bool = False) -> Iterator[None]:
        """For one backward of these replicas.

        Args:
            active: The indices of the replicas.
            waits_for_last: Each runs several backwards, of which the last counts: see :meth:`begin_last`.
        """
        # At the first backward, not before: what makes no use of it finds no hooks.
        if not self._handles:
            self._install()
        self._done = set()
        self._num_gradients = self._none_yet()
        self._is_active = [replica in active and not waits_for_last for replica in range(len(self._columns))]
        # Only what is expected is waited for: unused parameters would keep a bucket for ever.
        self._unfilled = [len(active) * len(self._expected.intersection(split)) for split in self._buckets]
        self._streams = chosen_streams(self._accelerators) if self._accelerators else ()
        self._during_backward = True
        try:
            yield
        finally:
            self._during_backward = False
        # A parameter without a gradient would keep its bucket waiting, and one that gets several (of a module that
        # reentrant checkpointing runs twice) would be sent half-finished.
        counts = zip(*(self._num_gradients[replica] for replica in active), strict=True)
        once = (1,) * len(active)
        self._expected = {index for index, column in enumerate(counts) if column == once}

    def begin_last(self, replica: int) -> None:
        """This replica's gradients are complete with the backward that begins now."""
        with self._lock:
            self._num_gradients[replica] = [0] * len(self._columns[replica])
            self._is_active[replica] = True

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
                # Quantized weights and flags are of whole numbers, which have no gradient, and take no hook.
                if parameter.is_floating_point() or parameter.is_complex():
                    self._handles.append(_hook(parameter, partial(self._on_gradient, replica, index)))

    def _on_gradient(self, replica: int, index: int, parameter: torch.Tensor) -> None:
        if not self._during_backward:
            return
        # Autograd has a thread for each device, and replicas in threads of their own come here at the same time.
        with self._lock:
            counts = self._num_gradients[replica]
            counts[index] += 1
            if index in self._done:
                raise ReplicationError(
                    f"Parameter {self._names[index]} got a second gradient in one backward, after the first was sent: "
                    "use DPXStrategy(gradient_buckets=0) for modules whose recomputation changes from step to step."
                )
            # Only expected first gradients fill a bucket; the rest waits for the end of backward.
            if counts[index] > 1 or index not in self._expected or not self._is_active[replica]:
                return
            number = self._bucket_of[index]
            self._unfilled[number] -= 1
            if self._unfilled[number]:
                return
            # The others of the bucket are reduced after the backward.
            ready = [member for member in self._buckets[number] if member in self._expected]
            self._done.update(ready)
        # Outside of the lock: a reduction may wait for a device, and other replicas go on filling other buckets.
        self._reduce_in_streams(ready, parameter.device)

    def _reduce_in_streams(self, ready: list[int], here: torch.device) -> None:
        """On the caller's streams of the other devices; autograd enters that of its thread's own device alone."""
        with ExitStack() as stack:
            for stream in self._streams:
                if stream.device != here:
                    stack.enter_context(stream_context(stream))
            self._reduce(ready)


def _hook(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)  # torch takes hooks only while it does
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    if frozen:
        parameter.requires_grad_(False)
    return handle
