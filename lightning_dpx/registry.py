"""Named, extensible choices: what a user may select by a string, and what an extension may add in one file."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from lightning_dpx.errors import ConfigurationError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps lower-case names to classes of one kind.

    Args:
        kind: What the entries are, in the words of an error message, for example ``"reducer"``.
        base: The class that all entries are of.
        reserved: Names that mean something else.
    """

    def __init__(self, kind: str, base: type[Any], reserved: Sequence[str] = ()) -> None:
        self._kind = kind
        self._base = base
        self._reserved = reserved
        self._entries: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """A class decorator that makes the class available under ``name``.

        Args:
            name: By which it is chosen.

        Raises:
            ConfigurationError: ``name`` is no name, or belongs to another class already; or what is decorated is not a
                class of this kind.

        Examples:
            >>> @dpx.register_reducer("one_by_one")
            ... class OneByOne(dpx.GradientReducer):
            ...     '''Adds up on the owner, one gradient after the other.'''
            ...     def sum_between_devices(self, lists, targets):
            ...         owners = [self.distinct_devices[target] for target in targets]
            ...         columns = zip(zip(*lists), owners)
            ...         return [sum(self.move(part, owner) for part in parts) for parts, owner in columns]
        """

        if not isinstance(name, str) or not name or name in self._reserved:
            given = getattr(name, "__qualname__", repr(name))
            raise ConfigurationError(
                f"{given} is not allowed as the name of a {self._kind}; give another text, as in "
                f'@register_{self._kind}("mine").'
            )

        def add(entry: type[T]) -> type[T]:
            if not isinstance(entry, type) or not issubclass(entry, self._base):
                raise ConfigurationError(
                    f"{getattr(entry, '__qualname__', repr(entry))} cannot be the {self._kind} {name!r}; decorate a "
                    f"subclass of {self._base.__name__}."
                )
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
        # A config may hold something that is no text, such as a list, which a dict refuses.
        except (KeyError, TypeError):
            # What means something else is no entry, and may be given all the same.
            allowed = sorted({*self._entries, *self._reserved})
            close = difflib.get_close_matches(str(name), allowed, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigurationError(f"Unknown {self._kind} {name!r}; available: {', '.join(allowed)}.{hint}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
