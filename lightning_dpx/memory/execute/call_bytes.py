"""What the calls of modules keep for backward, so that a step shows by what it calls that it is a larger one.

Random layers, for example, may be called in turns for long before a step calls them all together.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping


class CallBytes:
    """Bytes that calls keep, learnt from forwards that are followed.

    Attributes:
        varying: The modules that some of these have called more often than others; none that is within another one.
    """

    def __init__(self) -> None:
        self.varying: frozenset[str] = frozenset()
        self._calls: dict[str, int] | None = None
        # The least that was seen, so that nothing is taken for a larger step that is none: which call keeps a value
        # depends on which comes first, and an expert keeps what it was given.
        self._own: dict[str, int] = {}
        self._within: dict[str, float] = {}

    def note(self, calls: Mapping[str, int], kept: Iterable[tuple[str, int]]) -> None:
        """A forward is over.

        Args:
            calls: How often it has called each module.
            kept: Of each value the path of the module whose call keeps it, and its bytes.
        """
        if self._calls is None:
            self._calls = dict(calls)
        differing = set(self.varying)
        for path in self._calls.keys() | calls.keys():
            if self._calls.get(path, 0) != calls.get(path, 0):
                differing.add(path)
        self.varying = frozenset(path for path in differing if _outermost(path, differing) == path)
        own = Counter[str]()
        within = Counter[str]()
        for path, num_bytes in kept:
            own[path] += num_bytes
            for around in _paths_around(path):
                within[around] += num_bytes
        # Calls that keep nothing are known to do so.
        for path in ("", *calls):
            self._own[path] = min(own[path], self._own.get(path, own[path]))
            per_call = within[path] / calls.get(path, 1)
            self._within[path] = min(per_call, self._within.get(path, per_call))

    def kept_by(self, calls: Mapping[str, int]) -> int:
        """About what a forward keeps that calls the ``varying`` modules so often."""
        kept = sum(calls.get(path, 0) * self._within.get(path, 0.0) for path in self.varying)
        # What is within a varying module has been counted with it.
        for path, num_bytes in self._own.items():
            if _outermost(path, self.varying) is None:
                kept += num_bytes
        return int(kept)


def _paths_around(path: str) -> list[str]:
    """The paths of a module and of those that it is in, the outermost first; not that of the root."""
    parts = path.split(".") if path else []
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]


def _outermost(path: str, paths: Collection[str]) -> str | None:
    """The first of ``paths`` on the way to ``path``."""
    return next((around for around in _paths_around(path) if around in paths), None)
