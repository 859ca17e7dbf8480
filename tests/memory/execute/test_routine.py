"""Where hooks go on and off, made from what a forward was seen to do."""

from lightning_dpx.memory.execute.routine import Entered, Saved, make_routine


def test_stretches_end_with_what_matters_and_stay_within_calls() -> None:
    kept, dropped = Saved("", ""), Saved("b:1", "TanhBackward0")
    events = [
        Entered("a", 0), kept, kept, kept, Entered("b", 0), kept, dropped, kept, Entered("c", 0), kept, kept,
        Entered("c", 1), dropped, Entered("d", 0), dropped, kept,
    ]  # fmt: skip
    found = make_routine(events, {"a": 1, "b": 1, "c": 2, "d": 1}, {"b:1", "e#2:3"}, {"d"})
    assert found.stretches == {
        Entered("b", 0): (None, dropped),
        Entered("c", 1): (dropped,),
        Entered("d", 0): (dropped,),
    }
    assert found.unseen == {Entered("e", 1)}


def test_all_is_counted_from_the_beginning_of_a_call_that_is_made_again() -> None:
    kept, dropped = Saved("", ""), Saved("b:1", "TanhBackward0")
    by_call = Saved("cell:2", "", Entered("cell", 0))
    events = [
        Entered("b", 0), dropped, kept, Entered("cell", 0), kept, kept, Entered("cell.part", 0), kept, kept, by_call,
        kept, Entered("c", 0), kept, kept,
    ]  # fmt: skip
    found = make_routine(events, dict.fromkeys(("b", "cell", "cell.part", "c"), 1), {"b:1", "cell:2"}, {"cell"})
    assert found.stretches == {Entered("b", 0): (dropped,), Entered("cell", 0): (*[None] * 4, by_call)}
    assert found.passed == {Entered("cell.part", 0)}
