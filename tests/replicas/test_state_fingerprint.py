"""Whether a step writes the Python state of a module is seen from what its objects hold."""

from typing import Any

import pytest
from torch import nn

from lightning_dpx.replicas.state_fingerprint import StateFingerprint


class Meter:
    """Counts in slots, as an object that is made often does."""

    __slots__ = ("average", "count")

    def __init__(self) -> None:
        self.count = 0.0
        self.average = 0.0


class Slotted(Meter):
    __slots__ = ("best",)


class Counted:
    def __init__(self) -> None:
        self.count = 0.0


@pytest.mark.parametrize("kind", [Meter, Slotted, Counted])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_fingerprint_sees_what_a_step_counts_in_an_object(kind: type[Any], times: int) -> None:
    module: Any = nn.Linear(1, 1)
    module.meter = kind()
    module.meter.count = times / 3
    before = StateFingerprint(module)
    assert not before.compare()[0]
    # Python gives a number the memory, and so the id, of the one that was dropped last.
    for _ in range(times):
        module.meter.count += 0.5
    assert before.compare()[0]


def test_a_fingerprint_sees_a_slot_that_is_set_for_the_first_time() -> None:
    module: Any = nn.Linear(1, 1)
    module.meter = Slotted()
    before = StateFingerprint(module)
    module.meter.best = 1
    assert before.compare()[0]


@pytest.mark.parametrize("made", [dict, Counted], ids=["dict", "object"])
def test_a_fingerprint_sees_what_was_written_before_it_was_replaced(made: type[Any]) -> None:
    module: Any = nn.Linear(1, 1)
    module.kept = made()
    replaced = StateFingerprint(module)
    module.kept = made()
    assert replaced.compare() == (False, True)
    written = StateFingerprint(module)
    if made is dict:
        module.kept["rows"] = 1
    else:
        module.kept.count += 1
    module.kept = made()
    assert written.compare() == (True, True)
