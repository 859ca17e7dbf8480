"""Objects that answer every name have no attributes beside those that they hold."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.python_objects.own_attributes import is_made_from_state, own_attributes, reduced_unchanged
from tests.conftest import Classifier, assert_equal, run, strategy_in


class AnswersAll:
    """As the wrapper of a foreign library, or what stands for a remote object: every name is a function."""

    __slots__ = ("_name",)

    def __init__(self, name: str = "") -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__dict__":
            raise AttributeError(name)
        return AnswersAll(name)

    def __call__(self) -> str:
        return self._name


class Plain:
    def __init__(self) -> None:
        self.size = 3


def test_only_what_an_object_holds_counts() -> None:
    assert own_attributes(Plain()) == {"size": 3}
    assert own_attributes(AnswersAll()) is None
    assert own_attributes(3) is None
    assert own_attributes(Plain) is None, "of a class it is no dict"
    module = nn.Linear(1, 1)
    assert own_attributes(module) is vars(module)


def test_an_object_is_made_from_its_state_unless_it_has_items_or_says_otherwise() -> None:
    assert is_made_from_state(Plain, Plain().__reduce_ex__(4))
    assert not is_made_from_state(OrderedDict, OrderedDict(a=1).__reduce_ex__(4))
    assert not is_made_from_state(Plain, "the name of a global")


LIBRARY = AnswersAll()


class Calls(Classifier):
    """Names such an object in its code, and holds one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.library = AnswersAll()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert LIBRARY.version() == self.library.version() == "version"
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("execution", ["inline", "threads"])
def test_a_module_that_uses_one_trains_as_on_one_device(execution: str) -> None:
    assert_equal(run(Calls(), strategy=strategy_in(execution, verify="warn"), devices=2), run(Calls()))


def test_what_a_state_drops_from_the_object_itself_is_put_back() -> None:
    class Drops:
        def __init__(self) -> None:
            self.cache: dict[str, int] | None = {"a": 1}
            self.size = 3

        def __getstate__(self) -> dict[str, Any]:
            del self.cache
            self.extra = 1
            return vars(self)

    value = Drops()
    cache = value.cache
    assert reduced_unchanged(value)[2] == {"size": 3, "extra": 1}
    assert vars(value) == {"cache": {"a": 1}, "size": 3}
    assert value.cache is cache
    assert reduced_unchanged(3)[1] == (int, 3), "an object without attributes is as it is"
