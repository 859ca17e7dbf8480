"""What a step rebinds on a replica other than the first is undone, and told before."""

from collections.abc import Mapping
from typing import Any

import pytest
from torch import nn

from lightning_dpx.python_objects.object_contents import OF_EVERY_MODULE
from lightning_dpx.replicas.copied_attributes import CopiedAttributes


class Told:
    def __init__(self) -> None:
        self.values: list[tuple[int, Any, Any]] = []

    def __call__(self, index: int, expected: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        self.values += [(index, expected.get(name), value) for name, value in now.items()]


@pytest.fixture
def module() -> Any:
    module: Any = nn.Identity()
    module.count = 1
    module.private = 0
    return module


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def copies(module: Any, told: Told) -> CopiedAttributes:
    return CopiedAttributes([nn.Identity(), module], OF_EVERY_MODULE | {"private"}, told)


def test_what_a_step_rebinds_is_undone_and_told(module: Any, told: Told, copies: CopiedAttributes) -> None:
    copies.restore()
    assert told.values == []
    module.count = 2
    module.made = "by the step"
    module.private = 5
    copies.restore()
    assert (module.count, module.private) == (1, 5)
    assert not hasattr(module, "made")
    assert told.values == [(1, 1, 2)]


def test_what_a_step_deletes_is_there_again(module: Any, copies: CopiedAttributes) -> None:
    del module.count
    module.other = 1  # as many attributes as before
    copies.restore()
    assert module.count == 1
    assert not hasattr(module, "other")


def test_what_is_set_is_meant_to_be_there(module: Any, told: Told, copies: CopiedAttributes) -> None:
    module.count = 2
    copies.set(1, "count", 7)
    copies.set(1, "name", "new")
    assert told.values == [(1, 1, 2)], "before it was overwritten"
    copies.restore()
    assert (module.count, module.name) == (7, "new")


def test_what_is_deleted_stays_deleted(module: Any, copies: CopiedAttributes) -> None:
    copies.delete(1, "count")
    copies.delete(1, "count")
    module.count = 3
    copies.restore()
    assert not hasattr(module, "count")
