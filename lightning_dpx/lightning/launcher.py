"""Runs what a Trainer does in this process, and ends the workers of replicas before it handles an error."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning_dpx.lightning.lightning_compat import Launcher


class InThisProcess(Launcher):
    """Takes the place of no launcher.

    Lightning never tears a strategy down where a callback fails in ``on_exception`` or a logger in ``finalize``; idle
    threads would stay as long as the Trainer. What runs replicas after this starts them again.

    Args:
        context: Makes what the whole run is in.
        end_workers: Called when a run fails.
    """

    def __init__(self, context: Callable[[], AbstractContextManager[Any]], end_workers: Callable[[], None]) -> None:
        self._context = context
        self._end_workers = end_workers

    @property
    def is_interactive_compatible(self) -> bool:
        """Notebooks are fine: nothing is started anew."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Runs ``function`` in the context of the run; returns its result."""
        try:
            with self._context():
                return function(*args, **kwargs)
        # Ctrl-C is one, too. Lightning handles the error after this frame, and may never tear down.
        except BaseException:
            self._end_workers()
            raise

    def kill(self, signum: Any) -> None:
        """Nothing was started that would have to be told."""
