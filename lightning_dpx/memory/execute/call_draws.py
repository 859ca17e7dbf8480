"""The random numbers of a call that may be made again: it must draw the same ones then, unseen by other code."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from lightning_dpx.devices import RandomStates, host_random_digest
from lightning_dpx.python_objects.process_generators import GeneratorWatch, ProcessGenerators
from lightning_dpx.torch_compat import DisableTorchDispatch, disable_current_modes, len_torch_dispatch_stack

_GENERATORS = threading.Lock()  # the host's belongs to all threads: no other thread repeats random numbers at that time


class CallDraws:
    """What a call draws, from the generators of torch and from those of Python and NumPy ("others").

    Whether it draws at all is known only at its end, and the states from its beginning are needed then; so they are
    taken of every call, and let go at the end of those that drew nothing.

    Args:
        home: The device that the call runs on.
        others: Watches the generators that are not torch's.
    """

    __slots__ = ("_after", "_before", "_home", "_is_over", "_others", "_others_before", "_started")

    def __init__(self, home: torch.device, others: GeneratorWatch) -> None:
        self._home = home
        self._others = others
        self._before: RandomStates | None = self._states()
        self._others_before: ProcessGenerators | None = others.now()
        self._started = self.digest()
        self._after = 0
        self._is_over = False

    def _states(self) -> RandomStates:
        if self._home.type == "cpu":
            with DisableTorchDispatch():
                return RandomStates(())
        # To ask a device's generator may take operators, which are none of the step.
        with unseen():
            return RandomStates([self._home])

    def digest(self) -> int:
        """What tells the states of torch's generators apart, and takes no memory."""
        if self._home.type == "cpu":  # asked for every tensor that autograd saves while steps are watched
            return host_random_digest()
        with unseen():
            return RandomStates([self._home]).digest()

    def end(self) -> None:
        """The call is over."""
        self._is_over = True
        self._after = self.digest()
        if self._after == self._started:
            self._before = None  # 5 KiB that would stay until backward
        if self._others.now() == self._others_before:
            self._others_before = None

    def end_at(self, digest: int) -> None:
        """When it is made again, it is only followed until the generators are there."""
        self._after = digest

    @property
    def num_bytes(self) -> int:
        """What the generators' states take that stay until the call is made again."""
        if self._before is None:
            return 0
        return self._before.nbytes

    @property
    def drew(self) -> bool:
        """Whether the call, which is over, has drawn random numbers."""
        return self._is_over and (self._before is not None or self._others_before is not None)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """What runs in here draws the call's numbers again; generators are afterwards what they were before."""
        # The stack unwinds backwards: torch's generators are put back before the lock goes.
        with ExitStack() as stack:
            if self._others_before is not None:
                stack.callback(ProcessGenerators().restore)
                self._others_before.restore()
            if self._before is not None:
                stack.enter_context(_GENERATORS)
                stack.callback(self._states().restore)
                self._before.restore()
            yield

    def check_end(self, name: str) -> None:
        """Called where the call, made again, has ended, before the generators are put back.

        Args:
            name: Of the call.

        Raises:
            RuntimeError: it drew other numbers than the first time.
        """
        if self._before is not None and self.digest() != self._after:
            raise RuntimeError(
                f"{name!r} drew other random numbers when it was called again: another thread draws from the "
                "same generator. Use execution='inline'."
            )


def unseen() -> AbstractContextManager[object]:
    """What runs in here is no part of the step for those who watch its operators."""
    if len_torch_dispatch_stack():
        return disable_current_modes()
    return nullcontext()
