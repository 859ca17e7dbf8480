from typing import Any

import pytest
import torch

from lightning_dpx.errors import GatherError
from lightning_dpx.replicas import MergeRules, News, Weights
from lightning_dpx.replicas.merging.rule_search import Search
from lightning_dpx.replicas.merging.rules import Rule
from lightning_dpx.replicas.merging.tolerance import Tolerance

CPU = torch.device("cpu")
EXACT = Tolerance.of(torch.float64, 1000)


def by_rows(sizes: tuple[int, ...]) -> Weights:
    return Weights(rows=sizes, of_loss=sizes)


def test_a_text_in_the_place_of_a_container_that_was_seen_is_merged_by_its_type() -> None:
    rules = MergeRules(outputs={"result": Rule(kind="children"), "result.0": Rule(kind="equal")})
    assert rules.merge_outputs(["text", "text"], by_rows((3, 1)), CPU) == "text"
    assert rules.merge_outputs([["text"], ["text"]], by_rows((3, 1)), CPU) == ["text"]


class Point:
    """Without equality; what it holds is in slots."""

    __slots__ = ("__dict__", "x")

    def __init__(self, x: Any) -> None:
        self.x = x


class Seen:
    """Is what its attributes are."""

    def __init__(self, labels: set[int], hits: int) -> None:
        self.labels = labels
        self.hits = hits


def test_objects_that_were_alike_in_the_rehearsal_are_put_together_by_attributes_where_they_no_longer_are() -> None:
    search = Search(weights=by_rows((3, 2)), tolerance=EXACT)
    found = search.examine(Seen({0, 2}, 1), [Seen({0, 2}, 1), Seen({0, 2}, 1)], "result")
    rules = MergeRules({one.path: one.rules[0] for one in found})
    with pytest.warns(UserWarning, match="was the same on all slices in the rehearsal"):
        merged = rules.merge_outputs([Seen({0}, 1), Seen({1, 2}, 2)], by_rows((1, 1)), CPU)
    assert merged.labels == {0, 1, 2}
    assert merged.hits == 3


def test_objects_that_cannot_be_put_together_are_compared_after_the_rehearsal_as_well() -> None:
    rules = MergeRules({"result": Rule(kind="equal")})
    first = Point(1)
    assert rules.merge_outputs([first, Point(1)], by_rows((1, 1)), CPU) is first
    with (
        pytest.warns(UserWarning, match="was the same on all slices in the rehearsal"),
        pytest.raises(GatherError, match="different values"),
    ):
        rules.merge_outputs([first, Point(2)], by_rows((1, 1)), CPU)


def test_an_object_that_all_slices_share_stays_itself() -> None:
    shared = Seen({1}, 2)
    rules = MergeRules({"result": Rule(kind="children")})
    assert rules.merge_outputs([shared, shared], by_rows((1, 1)), CPU) is shared


def test_a_constant_that_changes_is_told() -> None:
    rules = MergeRules({"result": Rule(kind="equal")})
    assert rules.merge_outputs([7, 7], by_rows((1, 1)), CPU) == 7
    with pytest.warns(UserWarning, match="was the same on all slices in the rehearsal"):
        assert rules.merge_outputs([7, 8], by_rows((1, 1)), CPU) == 15


def test_a_value_that_was_zero_so_far_is_noticed() -> None:
    rules = MergeRules({"result": Rule(kind="by type")}, news=News(undecided=frozenset({"result"})))
    rules.merge_outputs([0, 0], by_rows((1, 1)), CPU)
    assert not rules.news.is_pending
    rules.merge_outputs([0, 1], by_rows((1, 1)), CPU)
    assert rules.news.is_pending
