"""What a call of a module finds around itself: autocast, the buffers and switches of its parts, what attributes hold.

All of it is noted when the call begins, and is put back for as long as the call is made again. Random numbers are not
part of it: see :mod:`lightning_dpx.memory.execute.call_draws`.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_dpx.devices import is_host
from lightning_dpx.memory.execute.call_draws import unseen
from lightning_dpx.memory.execute.module_anatomy import Anatomy
from lightning_dpx.torch_compat import AnyBatchNorm, AnyInstanceNorm, buffers_of, bytes_of, version_counter

_NORMS = (AnyBatchNorm.forward, AnyInstanceNorm.forward)
_SMALL_BUFFER = 4096  # bytes; of larger ones no copy is made at every call, which no plan counts


class CallSurroundings:
    """What one call found around itself when it began.

    Args:
        anatomy: What its module consists of.
        held: What the objects behind the attributes of its module held.
        home: The device it runs on.
    """

    __slots__ = ("_anatomy", "_autocast", "_buffers", "_held", "_num_threads", "_on_host", "_parameters", "_training")

    def __init__(self, anatomy: Anatomy, held: list[Any], home: torch.device) -> None:
        self._anatomy = anatomy
        self._held = held
        self._autocast = _autocast_state(home)
        self._num_threads = torch.get_num_threads()
        self._on_host = is_host(home)
        self._training = anatomy.training()
        self._parameters = anatomy.versions()
        self._buffers: list[_Buffer] = []
        if any(buffers_of(part) for part in anatomy.parts):
            # Copies of buffers are no part of the step, for those who watch its operators.
            with unseen(), torch.no_grad():
                self._buffers = _buffers_of(anatomy.parts)

    def difference(self, module: nn.Module) -> str:
        """Something that is not as it was when the call of ``module`` began; empty if all is."""
        if not self._anatomy.is_same():
            return f"what {type(module).__name__} consists of"
        if self._anatomy.versions() != self._parameters:
            return f"a parameter of {type(module).__name__}"
        # Norms may write their statistics. The second call gets copies, so they are written once.
        for buffer in self._buffers:
            if not buffer.is_there() or (buffer.is_changed() and not _is_norm(buffer.part)):
                return f"{type(buffer.part).__name__}.{buffer.key}"
        return self._anatomy.state.difference(self._held, self._anatomy.state.marks())

    def check_parameters(self, name: str) -> None:
        """No parameter was written to since; the call has this ``name``.

        Raises:
            RuntimeError: one was.
        """
        if self._anatomy.versions() != self._parameters:
            raise RuntimeError(f"A parameter of {name!r} was changed in place between forward and backward.")

    @contextmanager
    def restored(self, name: str) -> Iterator[None]:
        """All is as it was when the call of this ``name`` began; what is changed in here is put back afterwards.

        Raises:
            RuntimeError: something cannot be as it was.
        """
        # Backward runs without gradients, and without them autograd would save nothing to catch.
        with ExitStack() as stack, torch.enable_grad():
            for kind, enabled, dtype in self._autocast:
                if torch.is_autocast_enabled(kind) != enabled or torch.get_autocast_dtype(kind) != dtype:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            stack.enter_context(self._anatomy.as_it_was(self._training))
            # On the host, sums have the bits of the number of threads that share them, and a replica's backward may run
            # in a thread of its own, with another share of the cores than its forward had.
            if (here := torch.get_num_threads()) != self._num_threads:
                torch.set_num_threads(self._num_threads)
                # What a thread sets is for all that begin later. A replica on the host has its share of the cores back;
                # autograd's thread of an accelerator has none, and an old number there would be that of new threads.
                if self._on_host:
                    stack.callback(torch.set_num_threads, here)
            if any(buffers_of(part) for part in self._anatomy.parts):
                stack.enter_context(self._buffers_of_then(name))
            # Last: what stands in for buffers and parts is no attribute that anybody has set.
            now = self._put_attributes_back(name)
            try:
                yield
            finally:
                self._anatomy.state.put_back(now)

    def _put_attributes_back(self, name: str) -> list[Any]:
        """The caller of the module may have set others since, or written to what they hold; what they held now."""
        state = self._anatomy.state
        now = state.marks()
        if left := state.put_back(self._held, now):
            state.put_back(now)  # some of it may be back already
            raise RuntimeError(f"{left} of {name!r} was changed between forward and backward.")
        return now

    @contextmanager
    def _buffers_of_then(self, name: str) -> Iterator[None]:
        """Other tensors with the same numbers stand in for the buffers, which backward may need as they are."""
        # Of large buffers there are no copies: these must be as they were.
        for buffer in self._buffers:
            if buffer.copy is None and not _is_norm(buffer.part) and (not buffer.is_there() or buffer.is_changed()):
                raise RuntimeError(
                    f"Buffer {buffer.key!r} of a {type(buffer.part).__name__} in {name!r} was changed between "
                    "forward and backward."
                )
        parts = self._anatomy.parts
        before = [(part, dict(buffers_of(part))) for part in parts if buffers_of(part)]
        try:
            for part, buffers in before:
                for key, tensor in buffers.items():
                    if tensor is not None:
                        buffers_of(part)[key] = tensor.detach().clone()
            for buffer in self._buffers:
                if buffer.copy is not None:
                    buffers_of(buffer.part)[buffer.key] = buffer.copy.clone()
            yield
        finally:
            for part, buffers in before:
                buffers_of(part).clear()  # the call may have registered more of them
                buffers_of(part).update(buffers)


def _autocast_state(device: torch.device) -> list[tuple[str, bool, torch.dtype]]:
    """Device type, whether autocast is on for it, and its dtype: of the host and of ``device``."""
    kinds = dict.fromkeys(["cpu", device.type])
    kinds.pop("meta", None)  # torch raises an error when it is asked about autocast there
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


class _Buffer(NamedTuple):
    """A buffer when a call began.

    Attributes:
        part: Whose it is.
        key: Its name there.
        tensor: Itself.
        version: Of the tensor.
        copy: Its numbers, where it is small: a batch norm writes into its statistics without a new version.
    """

    part: nn.Module
    key: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None

    def is_there(self) -> bool:
        """Whether the module has no other one by now."""
        return buffers_of(self.part).get(self.key) is self.tensor

    def is_changed(self) -> bool:
        """Whether it was written to."""
        return version_counter(self.tensor) != self.version


def _buffers_of(parts: Collection[nn.Module]) -> list[_Buffer]:
    buffers = list[_Buffer]()
    for part in parts:
        for key, tensor in buffers_of(part).items():
            if tensor is not None:
                # The second call of a norm in training may read any statistics: it uses none.
                small = bytes_of([tensor]) <= _SMALL_BUFFER and not (_is_norm(part) and part.training)
                copy = tensor.detach().clone() if small else None
                buffers.append(_Buffer(part, key, tensor, version_counter(tensor), copy))
    return buffers


def _is_norm(part: nn.Module) -> bool:
    """Whether it is one of torch's, which in training writes its statistics and does not read them."""
    # Neither a subclass nor an instance may have a forward of its own, which may do anything.
    return type(part).forward in _NORMS and "forward" not in vars(part)
