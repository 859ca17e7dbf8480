"""A tensor of another device that is copied when it is first used.

Containers on the module may hold thousands of tensors, such as the outputs of an epoch. A replica that only appends to
such a list must not pay for a copy of what is in it; one that reads it must find tensors on its own device.
"""

from typing import Any

import torch

from lightning_dpx.torch_compat import (
    DisableTorchFunctionSubclass,
    make_wrapper_subclass,
    tree_map_only,
    version_counter,
)

# What can be told without the values.
_DESCRIPTIONS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "device", "dtype", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn")
)


class RemoteTensor(torch.Tensor):
    """Stands for ``source`` on ``device``; the first operator that needs its values copies them there.

    The copy is kept, and made anew after ``source`` was written in place. Operators see, and return, plain tensors.
    """

    _source: torch.Tensor
    _copy: torch.Tensor | None
    _version_seen: int

    @staticmethod
    def __new__(cls, source: torch.Tensor, device: torch.device) -> "RemoteTensor":
        """A stand-in on ``device`` that takes no memory there."""
        made: RemoteTensor = make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, source.size(), strides=source.stride(), dtype=source.dtype, device=device
        )
        made._source = source
        made._copy = None
        made._version_seen = -1
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``func`` on plain tensors."""
        kwargs = kwargs or {}
        # Code that only asks for a shape or a device must not cause a copy.
        if func in _DESCRIPTIONS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        plain_args, plain_kwargs = tree_map_only(RemoteTensor, fetched, (args, kwargs))
        return func(*plain_args, **plain_kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs ``func`` on plain tensors, for operators that come past :meth:`__torch_function__`."""
        plain_args, plain_kwargs = tree_map_only(RemoteTensor, fetched, (args, kwargs or {}))
        return func(*plain_args, **plain_kwargs)


def source_of(remote: RemoteTensor) -> torch.Tensor:
    """The tensor that ``remote`` stands for."""
    source: torch.Tensor = remote.__dict__["_source"]
    return source


def fetched(remote: RemoteTensor) -> torch.Tensor:
    """The values of ``remote`` on its device, without history."""
    state = remote.__dict__
    source: torch.Tensor = state["_source"]
    kept: torch.Tensor | None = state["_copy"]
    version = version_of(source)
    if kept is None or state["_version_seen"] != version:
        # The question for the device would come back here, for ever.
        with DisableTorchFunctionSubclass():
            device = remote.device
        # A copy even on one device: the replica may write it, and the source is another one's.
        kept = source.detach().to(device, copy=True)
        state["_copy"] = kept
        state["_version_seen"] = version
    return kept


def version_of(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written in place; tensors of inference mode do not count."""
    if tensor.is_inference():
        return -1
    return version_counter(tensor)
