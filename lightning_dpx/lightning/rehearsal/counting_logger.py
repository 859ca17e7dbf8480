"""Loggers of a rehearsal: of the class of the user's, they take any call, write nothing, and count."""

from collections.abc import Callable
from typing import Any

from lightning_dpx.lightning.lightning_api import Logger


def counting_logger(original: Logger, note: Callable[[str], None]) -> Logger:
    """Stands in for a logger.

    Args:
        original: The user's, whose class it has, and whose plain attributes (a folder, a version) it shows.
        note: Is told the name of every method that is called, of the logger or of its experiment.
    """
    # Steps ask isinstance(self.logger, TensorBoardLogger), and must take the
    # branch they take in the run.
    kind = type(original)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    try:
        # Without __init__, which would open files or a connection.
        stand_in: Any = object.__new__(type(kind.__name__, (_Counts, kind), names))
    except TypeError:  # a class that allows no other to be made from it
        stand_in = object.__new__(_Counts)
    vars(stand_in).update(_original=original, _note=note)
    return stand_in  # type: ignore[no-any-return]


class _Counts(Logger):
    """Answers for all that a logger is asked."""

    def __getattribute__(self, name: str) -> Any:
        # Python's own protocol, and the attributes of the stand-in itself.
        if name.startswith("_"):
            return super().__getattribute__(name)
        if name == "experiment":
            return _CountingExperiment(self._note)
        if callable(getattr(type(self._original), name, None)) or not hasattr(self._original, name):
            return _counted(self._note, name)
        return getattr(self._original, name)

    @property
    def name(self) -> str | None:
        """Never asked for: see ``__getattribute__``."""

    @property
    def version(self) -> int | str | None:
        """Never asked for: see ``__getattribute__``."""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Never asked for: see ``__getattribute__``."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Never asked for: see ``__getattribute__``."""

    def __getitem__(self, _index: int) -> "_Counts":
        return self


class _CountingExperiment:
    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            # As of any object: copy and pickle ask for names such as __deepcopy__, and would
            # take an answer for a method.
            raise AttributeError(name)
        return _counted(self._note, name)

    def __getitem__(self, _key: Any) -> "_CountingExperiment":
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        del value
        self._note(str(key))


def _counted(note: Callable[[str], None], name: str) -> Callable[..., None]:
    def method(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        note(name)

    return method
