"""Numbers of attributes: which rules make of the slices' numbers what one device has."""

import pytest
import torch

from lightning_dpx.lightning.rehearsal.comparison.number_judge import NumberJudge
from lightning_dpx.replicas import Weights
from lightning_dpx.replicas.merging.tolerance import Tolerance

WEIGHTS = Weights(rows=[3, 2], of_loss=[3, 2])


def kinds(whole: float, before: float | None, parts: list[float], unstable: frozenset[str] = frozenset()) -> list[str]:
    judge = NumberJudge({"seen": whole}, Tolerance(1e-6), unstable)
    return [rule.kind for rule in judge.rules_of("seen", before, parts, WEIGHTS)]


def test_a_count_is_added_to() -> None:
    assert kinds(15.0, 10.0, [13.0, 12.0])[0] == "added"
    assert "added" not in kinds(15.0, float("inf"), [13.0, 12.0]), "all differences from infinity are alike"


def test_what_is_set_to_a_mean_is_no_count() -> None:
    found = kinds(2.6, 100.0, [3.0, 2.0])
    assert "mean" in found
    assert "added" not in found


@pytest.mark.parametrize(("read", "expected"), [(frozenset({"rows"}), ["join"]), (frozenset(), [])])
def test_rows_are_joined_for_hooks_that_read_them(read: frozenset[str], expected: list[str]) -> None:
    whole = torch.arange(5.0)
    judge = NumberJudge({"rows": whole}, Tolerance(1e-6), frozenset(), read)
    rules = judge.rules_of("rows", None, [whole[:3], whole[3:]], WEIGHTS)
    assert [rule.kind for rule in rules] == expected


@pytest.mark.parametrize("name", ["state:seen", "structure:seen"])
def test_what_changes_from_run_to_run_has_no_rule(name: str) -> None:
    assert kinds(15.0, 10.0, [13.0, 12.0], frozenset({name})) == []


def test_numbers_that_are_equal_everywhere_need_no_rule() -> None:
    judge = NumberJudge({"epoch": 4.0}, Tolerance(1e-6), frozenset())
    assert judge.rules_of("epoch", 3.0, [4.0, 4.0], WEIGHTS) == ()
    assert judge.equal == {"epoch"}


def test_a_number_that_was_zero_may_be_added_to_or_set() -> None:
    judge = NumberJudge({"seen": 5.0}, Tolerance(1e-6), frozenset())
    judge.fitting["seen"] = judge.rules_of("seen", 0.0, [3.0, 2.0], WEIGHTS)
    assert judge.settings == ["seen"]
    assert judge.unsettled == ["seen"]
