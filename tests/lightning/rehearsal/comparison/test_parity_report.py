"""The line that says what was found."""

import pytest

from lightning_dpx.lightning.rehearsal.comparison.parity_report import Comparison, short


def comparison() -> Comparison:
    return Comparison(rows=5, sizes=(3, 2), stage="training_step")


def test_what_agrees_is_counted() -> None:
    found = comparison()
    found.counts = {"loss": 1, "gradient": 4, "logged value": 1, "output": 0}
    found.largest = 2e-7
    assert found.line() == (
        "dpx: checked on 5 rows: loss, 4 gradients, 1 logged value as on one device (largest difference 2e-7; "
        "training_step)."
    )


def test_a_step_that_does_nothing_is_said_to() -> None:
    assert comparison().line() == "dpx: checked on 5 rows: training_step returns, logs and changes nothing."


def test_what_was_not_compared_is_said() -> None:
    found = comparison()
    found.counts = {"loss": 1}
    found.skipped = ["2 gradients (they depend on random draws)"]
    assert "; not compared: 2 gradients (they depend on random draws)" in found.line()


def test_a_difference_comes_with_its_way_out_once_for_each_kind() -> None:
    found = comparison()
    found.differences = [("loss", "the loss is 2 on one device"), ("gradient", "4 of 4 gradients differ")]
    text = found.complaint()
    assert "on 5 rows in slices of 3 and 2" in text
    assert "the loss is 2 on one device; 4 of 4 gradients differ" in text
    assert text.count("training_step_end(outputs)") == 1, "gradients follow from the loss"
    assert "verify='first'" in text


def test_what_steps_keep_is_named_and_that_a_second_one_uses_it_is_a_reason() -> None:
    found = comparison()
    found.kept = ["self.a", "self.b", "self.c", "self.d"]
    assert "self.a, self.b, self.c and 1 more is of one slice" in found.line()
    reason = found.uses_kept("the loss differs")
    assert reason.startswith("A second step uses what the first one kept in self.a, self.b, self.c and 1 more")
    assert reason.endswith("which is of one slice: the loss differs.")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (2e-7, "2e-7"), (0.5, "5e-1"), (12.0, "1e1"), (float("inf"), "inf"), (float("nan"), "nan")],
)
def test_small_numbers_are_short(value, text) -> None:
    assert short(value) == text
