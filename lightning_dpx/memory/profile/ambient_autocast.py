"""Autocast that is on where a step is profiled, entered anew by every forward, as training steps enter it.

Autocast remembers the weights that it has cast, and forgets them where the outermost ``with`` ends. In training that is
the end of every forward: each step casts its weights again, autograd holds them up to their use in backward, and
backward runs outside. Within one ``with`` around a whole profile the first forward would cast for all others: these
would seem to take no memory for cast weights, and all that was cast would be there to the end.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from lightning_dpx.devices import autocast_types


class AmbientAutocast:
    """The autocast of this thread, as it is now."""

    def __init__(self) -> None:
        self._is_cached = torch.is_autocast_cache_enabled()
        self._dtypes = {
            kind: torch.get_autocast_dtype(kind) for kind in autocast_types() if torch.is_autocast_enabled(kind)
        }

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """It is off in here, but for what :meth:`entered_by` enters."""
        with ExitStack() as stack:
            for kind in self._dtypes:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield

    def entered_by(
        self, context: Callable[[], AbstractContextManager[Any]]
    ) -> Callable[[], AbstractContextManager[Any]]:
        """The context of a forward: it, and ``context`` within."""
        if not self._dtypes:
            return context
        return _Entered(self._dtypes, self._is_cached, context)


class _Entered:
    """Makes the context of a forward; called for each."""

    def __init__(
        self,
        dtypes: dict[str, torch.dtype],
        is_cached: bool,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._dtypes = dtypes
        self._is_cached = is_cached
        self._context = context

    @contextmanager
    def __call__(self) -> Iterator[None]:
        # The caller's own ``with`` is still the outermost, so torch forgets nothing by itself.
        torch.clear_autocast_cache()
        try:
            with ExitStack() as stack:
                for kind, dtype in self._dtypes.items():
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._is_cached))
                stack.enter_context(self._context())
                yield
        finally:
            torch.clear_autocast_cache()
