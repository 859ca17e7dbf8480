"""Named, extensible choices: what a user may select by a string, and what an extension may add in one file."""

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from lightning_dpx.errors import ConfigurationError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps lower-case names to classes of one kind.

    Args:
        kind: What the entries are, in the words of an error message, for example ``"reducer"``.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """A class decorator that makes the class available under ``name``.

        Raises:
            ConfigurationError: ``name`` already belongs to another class.

        Examples:
            >>> @dpx.register_reducer("one_by_one")
            ... class OneByOne(dpx.GradientReducer):
            ...     '''Adds up on the owner, one gradient after the other.'''
            ...     def _sum(self, lists, targets):
            ...         owners = [self.distinct_devices[target] for target in targets]
            ...         columns = zip(zip(*lists), owners)
            ...         return [sum(self._move(part, owner) for part in parts) for parts, owner in columns]
        """

        def add(entry: type[T]) -> type[T]:
            # The same class may come again; another one would silently take its place.
            present = self._entries.setdefault(name, entry)
            if present is not entry:
                raise ConfigurationError(
                    f"The {self._kind} name {name!r} is taken by {present.__qualname__}; "
                    f"register {entry.__qualname__} under another name."
                )
            return entry

        return add

    def unregister(self, name: str) -> None:
        """``name`` stands for nothing again.

        Raises:
            ConfigurationError: it did not stand for anything.
        """
        # Raises the error that names what there is.
        self[name]
        del self._entries[name]

    def __getitem__(self, name: str) -> type[T]:
        try:
            return self._entries[name]
        except KeyError:
            # A config may hold something that is no text.
            close = difflib.get_close_matches(str(name), self._entries, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigurationError(
                f"Unknown {self._kind} {name!r}; available: {', '.join(sorted(self._entries))}.{hint}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
