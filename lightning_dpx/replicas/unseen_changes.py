"""What a step changes of the module's attributes and no rehearsal has seen change: it is rehearsed again.

A count of what the first batches have none of, a list that grows now and then: nothing is known about how the parts of
slices come together, so no user may be left to believe that they do.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_dpx.replicas.merging.rebound_numbers import changed_numbers, numbers_of

_MISSING = object()


class UnseenChanges:
    """The changes of one step after the other, by the place of a submodule among those that are looked after.

    Args:
        root: The user's module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._tell: Callable[[set[str]], None] | None = None
        self._known: Collection[str] = ()
        self._changed: set[tuple[int, str]] = set()
        self._prefixes: list[str] = []
        self._prefixes_of: Sequence[nn.Module] | None = None

    def begin(self, tell: Callable[[set[str]], None], known: Collection[str]) -> None:
        """A step has run, whose changes are noted from here on.

        Args:
            tell: Gets the paths of containers that have been changed, and of numbers that other replicas than the first
                have changed.
            known: Paths that are known already: their numbers are not looked at, for which a device would be
                waited for.
        """
        self._tell = tell
        self._known = known

    def note_container(self, place: int, name: str) -> None:
        """A container behind this attribute was changed."""
        self._changed.add((place, name))

    def note_numbers(
        self, place: int, expected: Mapping[str, Any], state: Mapping[str, Any], modules: Sequence[nn.Module]
    ) -> None:
        """Attributes of a submodule as they are on another replica, and as they were before the step."""
        # No rehearsal asks for them: then nothing is compared.
        if self._tell is None:
            return
        unknown: dict[str, Any] = {}
        for name, value in state.items():
            is_rebound = expected.get(name, _MISSING) is not value
            if is_rebound and self._path(place, name, modules) not in self._known:
                unknown[name] = value
        now = numbers_of(unknown.items())
        before = {name: expected.get(name) for name in now}
        self._changed.update((place, name) for name in changed_numbers(before, now))

    def end(self, modules: Sequence[nn.Module]) -> None:
        """Tells what was noted, before the next step begins."""
        if self._changed and self._tell is not None:
            self._tell(self.paths_of(self._changed, modules))
        self._tell = None
        self._changed.clear()

    def paths_of(self, attributes: Iterable[tuple[int, str]], modules: Sequence[nn.Module]) -> set[str]:
        """The paths of attributes of submodules, which are given by their places."""
        return {self._path(place, name, modules) for place, name in attributes}

    def _path(self, place: int, name: str, modules: Sequence[nn.Module]) -> str:
        # Paths are only computed where something has changed, once for one structure.
        if self._prefixes_of is not modules:
            names = {id(child): f"{path}." for path, child in self._root.named_modules() if path}
            self._prefixes = [names.get(id(child), "") for child in modules]
            self._prefixes_of = modules
        return f"{self._prefixes[place]}{name}"
