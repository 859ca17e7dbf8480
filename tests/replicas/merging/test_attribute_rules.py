import torch
from torch import nn

from lightning_dpx.replicas import AttributeRules, ListPlace, ListWatch, NumberWatch, Weights
from lightning_dpx.replicas.merging.rules import Rule

CPU = torch.device("cpu")
WEIGHTS = Weights(rows=(3, 1), of_loss=(3, 1))


def modules() -> list[nn.Module]:
    """The user's module and the copy of a second replica, which share their lists."""
    first = nn.Module()
    second = nn.Module()
    first.losses = second.losses = []
    first.count = second.count = 10
    return [first, second]


def test_rows_that_cannot_be_joined_are_news() -> None:
    rules = AttributeRules(rules={"self.rows": Rule(kind="join")}, rebound={"rows"})
    weights = Weights(rows=[1, 1], of_loss=[1, 1])
    parts = [torch.zeros(1, 2), torch.zeros(1, 3)]
    assert rules.merge_rebound("rows", None, parts, weights, torch.device("cpu")) is None
    assert rules.news.take() == {"self.rows"}


def test_without_lists_and_numbers_there_is_nothing_to_put_together() -> None:
    assert not AttributeRules()
    assert AttributeRules(rebound={"count"})


def test_a_number_that_slices_have_added_to_is_that_of_one_device() -> None:
    first, second = modules()
    rules = AttributeRules(rules={"self.count": Rule(kind="added")}, rebound={"count"})
    watch = NumberWatch([first, second], first, {"count"})
    first.count += 3
    second.count += 1
    rules.join_rebound(watch, WEIGHTS, CPU)
    assert first.count == 14


def test_items_of_slices_become_one_of_the_batch() -> None:
    first, second = modules()
    place = ListPlace("losses")
    rules = AttributeRules(rules={f"{place}.0": Rule(kind="mean")}, appended={place: 1}, growing={place})
    watch = ListWatch([first, second], {place})
    first.losses.append(1.0)
    second.losses.append(5.0)
    rules.join_appended(watch, WEIGHTS, CPU)
    assert first.losses == [2.0]


def test_lists_out_of_which_a_step_takes_items_are_noted() -> None:
    first, second = modules()
    first.losses += [1, 2, 3]
    place = ListPlace("losses")
    rules = AttributeRules(growing={place})
    watch = ListWatch([first, second], {place})
    first.losses.pop(0)
    rules.join_appended(watch, WEIGHTS, CPU)
    assert rules.lost_items == {"self.losses"}
