"""What follows from a difference, or from a step that could not be checked."""

import pytest

import lightning_dpx as dpx
from lightning_dpx.lightning.rehearsal.comparison.parity_report import Comparison
from lightning_dpx.lightning.rehearsal.verdicts import Verdicts


def comparison() -> Comparison:
    return Comparison(rows=5, sizes=(3, 2), stage="training_step", differences=[("loss", "the loss is 2.0, not 1.0")])


def test_a_line_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    verdicts = Verdicts(dpx.DPXStrategy(), "warn")
    with caplog.at_level("INFO"):
        verdicts.say("dpx: a line")
        verdicts.say("dpx: a line")
        verdicts.forget()
        verdicts.say("dpx: a line")
    assert caplog.messages.count("dpx: a line") == 1


def test_a_difference_is_warned_of_unless_it_was_told() -> None:
    verdicts = Verdicts(dpx.DPXStrategy(), "warn")
    with pytest.warns(UserWarning, match=r"the loss is 2\.0, not 1\.0"):
        verdicts.differs("training_step", comparison(), is_told=False)
    verdicts.differs("training_step", comparison(), is_told=True)  # any warning would be an error here


def test_a_difference_is_an_error_where_that_was_asked_for_also_if_it_was_told() -> None:
    verdicts = Verdicts(dpx.DPXStrategy(), "raise")
    with pytest.raises(dpx.ParityError, match=r"the loss is 2\.0, not 1\.0"):
        verdicts.differs("training_step", comparison(), is_told=True)


def test_a_step_that_could_not_be_checked_ends_the_run_after_it_and_once() -> None:
    verdicts = Verdicts(dpx.DPXStrategy(), "raise")
    verdicts.note_unchecked("dpx: training_step was not checked: it is odd.")
    with pytest.raises(dpx.ParityError, match=r"it is odd\. With verify='raise' every step has to be checked"):
        verdicts.refuse_unchecked()
    verdicts.refuse_unchecked()
