"""What one object of every kind holds is read, and is there again after it was written."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_dpx.python_objects import object_contents as contents


class Slotted:
    __slots__ = ("empty", "full")

    def __init__(self) -> None:
        self.full = 1


class Both(Slotted):
    def __init__(self) -> None:
        super().__init__()
        self.own = [1]


def change_both(value: Any) -> None:
    value.full = 2
    value.empty = 3
    value.another = value.own
    del value.own


def change_module(module: Any) -> None:
    module.number = 2
    module.new = None


def change_class(kind: Any) -> None:
    kind.limit = 2
    kind.added = 1


def module() -> nn.Module:
    made = nn.Linear(2, 2)
    made.number = 1  # type: ignore[assignment]
    return made


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Any, Any]] = {
    "module": (module, change_module, contents.attributes_of, contents.write_attributes),
    "class": (lambda: type("Settings", (), {"limit": 1}), change_class, contents.class_values, contents.write_class),
    "slots and dict": (Both, change_both, contents.fields_of, contents.write_fields),
    "dict": (
        lambda: OrderedDict(a=1, b=2), lambda held: held.move_to_end("a"), contents.pairs_held, contents.write_pairs,
    ),
    "array": (lambda: np.zeros(3), lambda array: array.fill(1), contents.bytes_of_array, contents.write_bytes),
    "bytearray": (
        lambda: bytearray(b"ab"), lambda held: held.extend(b"c"), contents.bytes_of_array, contents.write_bytes,
    ),
    "array of objects": (
        lambda: np.array([None, "a"], dtype=object), lambda array: array.fill(1), contents.objects_of_array,
        contents.write_array,
    ),
    "cell": (
        lambda: (lambda x: lambda: x)([1]).__closure__[0],  # type: ignore[index]
        lambda cell: setattr(cell, "cell_contents", 2), contents.cell_content, contents.write_cell,
    ),
    "list": (lambda: [1, 2], lambda held: held.pop(), tuple, contents.CONTAINER_WRITERS[list]),
    "deque": (lambda: deque([1, 2]), lambda held: held.rotate(), tuple, contents.CONTAINER_WRITERS[deque]),
    "set": (lambda: {1, 2}, lambda held: held.add(3), tuple, contents.CONTAINER_WRITERS[set]),
}  # fmt: skip


def plain(held: tuple[Any, ...]) -> list[Any]:
    return [one.tolist() if isinstance(one, np.ndarray) else one for one in held]


@pytest.mark.parametrize("kind", KINDS)
def test_it_holds_again_what_it_held(kind: str) -> None:
    make, change, read, write = KINDS[kind]
    value = make()
    before = read(value)
    change(value)
    assert plain(read(value)) != plain(before)
    write(value, before)
    assert plain(read(value)) == plain(before)


def test_a_container_is_filled_again() -> None:
    ordered = OrderedDict(a=1, b=2)
    contents.refill(ordered, [("b", 2), ("a", 1)])
    assert list(ordered.items()) == [("b", 2), ("a", 1)]
    recent = deque([1, 2], maxlen=2)
    contents.refill(recent, [3])
    assert (list(recent), recent.maxlen) == ([3], 2)


def test_tensors_count_by_their_writes_and_arrays_by_their_checksum() -> None:
    tensor = torch.zeros(2)
    before = contents.version_of(tensor)
    tensor.add_(1)
    assert contents.version_of(tensor) != before
    with torch.inference_mode():
        assert contents.version_of(torch.zeros(2)) == (None,)
    array = np.arange(6).reshape(2, 3)
    assert contents.checksum_of(array) == contents.checksum_of(array.T.T)
    assert contents.checksum_of(array) != contents.checksum_of(array.reshape(3, 2))
    assert contents.slot_contents(Both()) == [("full", 1)]
