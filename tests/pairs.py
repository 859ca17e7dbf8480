"""Of a test with many parameters, the combinations in which every two values meet; all others are ``slow``.

A reducer that fails with two replicas in threads fails in one of these. A fault that needs three particular values at
once is looked for by ``pytest -m slow``.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations, groupby
from typing import Any

import pytest

_Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]  # two parameters, each with a value


def keep_every_pair(items: Sequence[pytest.Item]) -> None:
    """Marks as ``slow`` what tests of three and more parameters need not run for every pair of values.

    Args:
        items: In the order in which they were collected; the combinations of a test follow one another.
    """
    for _, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        tests = [item for item in group if item.get_closest_marker("slow") is None]
        for item in _superfluous(tests):
            item.add_marker(pytest.mark.slow)


def _superfluous(tests: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of ``tests`` that hold no pair which the chosen ones do not; chosen is what adds most, the first such."""
    rest = {item: set(_pairs(item)) for item in tests}
    missing = set().union(*rest.values())
    while missing:
        chosen = max(rest, key=lambda item: len(rest[item] & missing))
        missing -= rest.pop(chosen)
    return [item for item, pairs in rest.items() if pairs]


def _pairs(item: pytest.Item) -> Iterator[_Pair]:
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    if len(parameters) > 2:
        yield from combinations(((name, _told_apart(value)) for name, value in parameters.items()), 2)


def _told_apart(value: Any) -> Hashable:
    """Equal for one value in two combinations; other objects are the same in all of them."""
    return repr(value) if isinstance(value, str | int | float | tuple | type(None)) else id(value)
