"""Whatever an object keeps is found by name, wherever it keeps it."""

import array
import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_dpx.python_objects.kept_values import kept_values


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


class Slotted:
    __slots__ = ("count", "unset")

    def __init__(self) -> None:
        self.count = 0


class MoreThanSlotted(Slotted):
    def __init__(self) -> None:
        super().__init__()
        self.name = "more"


def closure() -> Callable[[], int]:
    count = 0

    def call() -> int:
        nonlocal count
        count += 1
        return count if count < 0 else call.__closure__ is not None

    return call


def with_default(count: list[int] = [0], *, more: int = 1) -> None:  # noqa: B006
    count[0] += more


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (Counter(), {"count": 0}),
        (Slotted(), {"count": 0}),
        (MoreThanSlotted(), {"count": 0, "name": "more"}),
        (closure(), {"count": 0}),
        (with_default, {"count": [0], "more": 1}),
        (functools.partial(with_default, [3], more=2), {"count": [0], "more": 2, "args": ([3],)}),
        (array.array("l", [1, 2]), {"items": [1, 2]}),
        (bytearray(b"\1\2"), {"items": [1, 2]}),
        (ctypes.c_ubyte(7), {"bytes": b"\7"}),
        (Counter, None),
        (math.sqrt, None),
        (math, None),
        (3, None),
    ],
)
def test_kept_values_by_name(value: Any, kept: dict[str, Any] | None) -> None:
    assert kept_values(value) == kept


def test_a_method_keeps_what_its_object_does() -> None:
    counter = Counter()
    assert kept_values(counter.__call__) == {"__self__": counter}


def test_attributes_of_a_function_are_kept_by_it() -> None:
    def call() -> None: ...

    call.count = 1  # type: ignore[attr-defined]
    assert kept_values(call) == {"count": 1}


def test_what_the_compiler_notes_on_a_function_is_not_kept_by_it() -> None:
    compiled = torch.compile(closure(), backend="eager")
    compiled.count = 0  # type: ignore[attr-defined]
    again = torch.compile(closure(), backend="eager")
    again.count = 0  # type: ignore[attr-defined]
    assert compiled.__dict__ != again.__dict__, "the compiler notes an address on each"
    found = kept_values(compiled)
    assert found is not None
    assert found["count"] == 0
    assert not [name for name in found if "torchdynamo" in name]
