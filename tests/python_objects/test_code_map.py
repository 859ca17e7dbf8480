"""Code is followed once, and what it names is found as if it were followed each time; nothing lives longer for it."""

import gc
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from lightning_dpx.python_objects.reachable import reachable

FILE = """
import random
from torch import nn

COUNT = 0
LATE = None
TABLE = {}

def helper():
    return LATE, TABLE

def other():
    return HIDDEN

HIDDEN = random.Random(5)

def decorated(function):
    found = None
    def wrapper():
        nonlocal found
        return found, function()
    def fill(value):
        nonlocal found
        found = value
    wrapper.fill = fill
    return wrapper

@decorated
def wrapped():
    return COUNT

class Net(nn.Module):
    noise = None

    @property
    def rate(self):
        return self.noise

    @staticmethod
    def draw():
        global COUNT
        COUNT += 1
        return helper()

    def forward(self, x):
        return x, wrapped()
"""


@pytest.fixture
def file() -> Iterator[types.ModuleType]:
    """A file of the user's."""
    found = types.ModuleType("a_file_of_the_user")
    sys.modules[found.__name__] = found
    exec(FILE, vars(found))
    yield found
    del sys.modules["a_file_of_the_user"]


def generators(module: nn.Module) -> list[Any]:
    return [generator for _, generator in reachable(module, (random.Random,))]


def exchanged_function(file: Any) -> Any:
    file.helper = file.other
    return file.HIDDEN


def filled_global(file: Any) -> Any:
    file.LATE = random.Random(1)
    return file.LATE


def filled_table(file: Any) -> Any:
    file.TABLE["noise"] = random.Random(2)
    return file.TABLE["noise"]


def filled_class(file: Any) -> Any:
    file.Net.noise = random.Random(3)
    return file.Net.noise


def exchanged_property(file: Any) -> Any:
    noise = random.Random(4)
    file.FROM_PROPERTY = noise
    exec("def rate(self): return FROM_PROPERTY", vars(file))
    file.Net.rate = property(file.rate)
    return noise


def added_method(file: Any) -> Any:
    file.Net.another = file.other
    return file.HIDDEN


def renamed_attribute(file: Any) -> Any:
    """As many attributes as before."""
    noise = random.Random(8)
    del file.Net.noise
    file.Net.later = noise
    return noise


def class_in_the_place_of_an_object(file: Any) -> Any:
    noise = random.Random(9)
    exec("class Late:\n    noise = None", vars(file))
    file.Late.noise = noise
    file.TABLE = file.Late
    return noise


def filled_closure(file: Any) -> Any:
    noise = random.Random(6)
    file.wrapped.fill(noise)
    return noise


@pytest.mark.parametrize(
    "change",
    [
        exchanged_function,
        filled_global,
        filled_table,
        filled_class,
        exchanged_property,
        added_method,
        renamed_attribute,
        class_in_the_place_of_an_object,
        filled_closure,
    ],
)
def test_what_changes_after_the_first_search_is_found_by_the_next(
    change: Callable[[Any], Any], file: types.ModuleType
) -> None:
    module = file.Net()
    assert generators(module) == generators(module) == []
    for _ in range(3):  # a global that counts its calls
        module.draw()
    noise = change(file)
    assert generators(module) == [noise]
    assert generators(file.Net()) == [noise]


def test_nothing_lives_longer_for_it(file: types.ModuleType) -> None:
    module = file.Net()
    held = random.Random(7)
    file.LATE = held
    assert generators(module) == [held]
    living = [weakref.ref(one) for one in (file.Net, file.helper, held)]
    vars(file).clear()
    del module, held
    gc.collect()
    assert [reference() for reference in living] == [None, None, None]


def test_what_a_function_was_made_to_stand_for_is_followed(file: types.ModuleType) -> None:
    exec(
        "import functools\ndef original(): return KEPT\ndef stands(): return None\n"
        "functools.update_wrapper(stands, original)\nNet.method = stands\nKEPT = random.Random(3)\ndel original",
        vars(file),
    )
    assert generators(file.Net()) == [file.KEPT]
