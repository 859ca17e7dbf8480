"""What a step keeps is known from what it calls."""

from lightning_dpx.memory.execute.call_bytes import CallBytes


def test_only_the_outermost_of_what_varies_is_counted() -> None:
    found = CallBytes()
    found.note({"stem": 1, "layers.0": 1, "layers.0.up": 2, "layers.1": 1}, [("layers.0.up", 8)])
    assert not found.varying
    found.note({"stem": 1, "layers.1": 1}, [])
    assert found.varying == {"layers.0"}
    found.note({"stem": 1, "layers.0": 1, "layers.0.up": 2}, [])
    assert found.varying == {"layers.0", "layers.1"}


def test_calls_of_what_varies_add_to_what_is_always_kept() -> None:
    found = CallBytes()
    found.note(
        {"stem": 1, "layers.0": 1, "layers.0.up": 1}, [("", 1), ("stem", 10), ("layers.0", 200), ("layers.0.up", 100)]
    )
    found.note({"stem": 1, "layers.1": 2, "layers.1.up": 2}, [("", 1), ("stem", 10), ("layers.1.up", 800)])
    assert found.kept_by({}) == 11
    assert found.kept_by({"layers.0": 1}) == 311
    assert found.kept_by({"layers.0": 1, "layers.1": 3}) == 11 + 300 + 3 * 400


def test_a_call_that_once_kept_less_counts_as_that() -> None:
    """The first of the layers keeps what all of them take: no step is to be taken for a larger one by that."""
    found = CallBytes()
    found.note({"layers.0": 1, "layers.1": 1}, [("layers.0", 300), ("layers.1", 200)])
    found.note({"layers.1": 1}, [("layers.1", 300)])
    found.note({"layers.0": 1}, [("layers.0", 300)])
    assert found.kept_by({"layers.0": 1, "layers.1": 1}) == 500
