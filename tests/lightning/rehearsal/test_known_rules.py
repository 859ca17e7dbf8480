"""Rules by which results of a step are merged, before and between its checks."""

import pytest

from lightning_dpx.lightning.rehearsal.known_rules import KnownRules

TRAINING = ("training_step", 0)


@pytest.mark.parametrize(("given", "used"), [("auto", "mean"), ("mean", "mean"), ("sum", "sum")])
def test_a_step_that_no_check_has_seen_is_merged_as_was_asked_for(given: str, used: str) -> None:
    known = KnownRules(given)
    assert known.asked_for(TRAINING) is None
    assert known.of(TRAINING).loss_reduction == used
    assert known.asked_for(TRAINING) is known.of(TRAINING)
    assert not known.is_checked(TRAINING)


def test_a_check_that_fails_half_way_leaves_no_rule_behind() -> None:
    known = KnownRules("auto")
    before = known.of(TRAINING)

    def check() -> None:
        with known.judged_by(TRAINING, None):
            assert known.of(TRAINING) is before
            assert known.of(("validation_step", 0)).loss_reduction == "mean"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        check()
    assert dict(known.items()) == {TRAINING: before}


def test_what_a_run_has_found_is_gone_with_it() -> None:
    known = KnownRules("auto")
    before = known.of(TRAINING)
    known.forget()
    assert known.of(TRAINING) is not before
