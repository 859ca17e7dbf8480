"""Running out of memory looks the same on every device.

Accelerators raise :class:`torch.OutOfMemoryError`; the host's allocator raises a plain RuntimeError, which only its
text tells from an error of the step. What the package does where memory runs out (fewer rows for a profile, a tighter
plan, a note with advice) it does for the type, so what runs a step gives the host's error that type, with its text.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

# On Linux and elsewhere. By the first of them Lightning's tuner knows it as well.
_OF_HOST = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_CODE_OF_CUDA = 2  # cudaErrorMemoryAllocation, after which a device goes on
_TEXT_OF_CUDA = "CUDA error: out of memory"
P = ParamSpec("P")
T = TypeVar("T")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, had no room."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if isinstance(error, torch.AcceleratorError):
        # Pinned memory is the host's, but CUDA's to give.
        return getattr(error, "error_code", None) == _CODE_OF_CUDA or str(error).startswith(_TEXT_OF_CUDA)
    # Other errors of the same allocator have other texts.
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_HOST)


def raises_out_of_memory(run: Callable[P, T]) -> Callable[P, T]:
    """``run``, which raises :class:`torch.OutOfMemoryError` on the host as well."""

    @wraps(run)
    def alike(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return run(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found = torch.OutOfMemoryError(*error.args).with_traceback(error.__traceback__)
            # What was said of it on its way here.
            found.__notes__ = getattr(error, "__notes__", [])
        # Out here, as an error that another one is the context of would hold its frames, and they the tensors
        # that did not fit.
        try:
            raise found
        finally:
            # Its traceback leads here, and a name here would lead back: it would stay with all frames until a look for
            # cyclic garbage.
            del found

    return alike
