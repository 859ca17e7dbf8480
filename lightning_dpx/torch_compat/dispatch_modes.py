"""Modes that see every operator of a step, under which code may still make tensors of its own classes."""

from threading import Lock
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode

from lightning_dpx.torch_compat.names import DisableTorchFunction


class TorchDispatchMode(_TorchDispatchMode):  # type: ignore[no-untyped-call]
    """torch's mode, under which ``Subclass(tensor)`` works as it does without.

    The constructor of a tensor subclass makes a view of the tensor that it gets, which is an operator. A mode
    answers with a Python object, which has its class by then, and torch raises: "the raw Tensor object is already
    associated to a python object" (2.13). ``as_subclass`` does the same work and hides it from modes.
    """

    def __enter__(self) -> Self:
        _constructor.enter()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _constructor.exit()


class _Constructor:
    """What ``torch.Tensor.__new__`` is while one of our modes is on, in any thread."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.modes = 0

    def enter(self) -> None:
        with self.lock:
            self.modes += 1
            # torch.Tensor has none of its own: it inherits the one of its base.
            if self.modes == 1 and "__new__" not in vars(torch.Tensor):
                torch.Tensor.__new__ = staticmethod(_new_tensor)  # type: ignore[assignment, method-assign]

    def exit(self) -> None:
        with self.lock:
            self.modes -= 1
            if self.modes == 0 and torch.Tensor.__new__ is _new_tensor:
                del torch.Tensor.__new__


def _new_tensor(cls: type[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """A tensor as the constructor of ``cls`` makes it; of one that there is, with the same memory and history."""
    construct = super(torch.Tensor, cls).__new__
    if cls is torch.Tensor:
        return construct(cls, *args, **kwargs)
    # Neither is a call of the step's, and function modes of the user see none in a constructor.
    with DisableTorchFunction():
        is_made = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        tensor = args[0] if is_made else construct(torch.Tensor, *args, **kwargs)
        return torch.Tensor.as_subclass(tensor, cls)


_constructor = _Constructor()
