"""Where lists are, and what has been appended to them."""

from collections import UserDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.replicas.merging.appended_items import ListPlace, ListWatch, find_lists, without_graphs


class Holder:
    def __init__(self) -> None:
        self.history: list[float] = []


def holding(**attributes: Any) -> nn.Module:
    module = nn.Module()
    module.part = nn.Module()
    vars(module).update(attributes)
    return module


def test_lists_are_found_through_mappings_lists_and_objects() -> None:
    attributes = {
        "losses": [1.0],
        "by_stage": {"train": [], "val": [[], []]},
        "holder": Holder(),
        "latest": deque(maxlen=3),
        "name": "x",
        "tensor": torch.zeros(2),
    }
    places = [str(place) for place in find_lists(attributes.items())]
    assert sorted(places) == [
        "self.by_stage.train",
        "self.by_stage.val",
        "self.by_stage.val.0",
        "self.by_stage.val.1",
        "self.holder.history",
        "self.latest",
        "self.losses",
    ]


class Configuration(Mapping[str, Any]):
    """As libraries have it: answers by code, and has no answer where a value is missing."""

    def __init__(self, **content: Any) -> None:
        self._content = content

    def __getitem__(self, key: str) -> Any:
        raise LookupError(f"missing mandatory value: {key}")

    def __iter__(self) -> Iterator[str]:
        raise LookupError("missing mandatory value")

    def __len__(self) -> int:
        return len(self._content)


def test_a_mapping_of_the_users_own_is_looked_into_without_asking_it() -> None:
    module = holding(options=Configuration(path=None, losses=[]), kept=UserDict(losses=[]))
    module.view = MappingProxyType({"losses": []})
    places = find_lists(vars(module).items())
    named = {str(place) for place in places}
    assert {"self.options._content.losses", "self.kept.data.losses", "self.view.losses"} <= named
    watch = ListWatch([module], places)
    vars(module.options)["_content"]["losses"].append(1.0)
    module.kept["losses"].append(2.0)
    module.view["losses"].append(3.0)
    grown = {str(place): items for place, items in watch.grown(places).items()}
    assert grown["self.options._content.losses"] == [1.0]
    assert grown["self.kept.data.losses"] == [2.0]
    assert grown["self.view.losses"] == [3.0]


def test_circles_end() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert len(find_lists([("circle", circle)])) == 1


def test_a_place_is_found_in_a_submodule_and_may_be_empty() -> None:
    module = holding()
    vars(module.part)["seen"] = {"a": [1]}
    assert ListPlace("part.seen", ("a",)).find(module) == [1]
    assert ListPlace("part.seen", ("b",)).find(module) is None
    assert ListPlace("part.other").find(module) is None


def test_what_is_appended_is_replaced() -> None:
    module = holding(losses=[1, 2], numbers=defaultdict(list))
    places = [ListPlace("losses"), ListPlace("numbers", ("train",))]
    watch = ListWatch([module], places)
    module.losses += [3, 4]
    module.numbers["train"].append(5)
    assert [watch.appended(place) for place in places] == [[3, 4], [5]]
    watch.replace(places[0], [7])
    assert module.losses == [1, 2, 7]


def test_a_list_with_a_limit_has_what_it_dropped_again() -> None:
    items = [object() for _ in range(6)]
    module = holding(latest=deque(items[:3], maxlen=3))
    watch = ListWatch([module], [ListPlace("latest")])
    module.latest.extend(items[3:5])
    assert watch.appended(ListPlace("latest")) == items[3:5]
    watch.replace(ListPlace("latest"), items[5:])
    assert list(module.latest) == [items[1], items[2], items[5]]


def test_another_list_in_its_place_is_none_that_grew() -> None:
    module = holding(losses=[1])
    watch = ListWatch([module], [ListPlace("losses")])
    module.losses = [1, 2]
    assert watch.appended(ListPlace("losses")) == []


def test_of_a_list_that_is_made_in_the_step_every_replica_has_its_own() -> None:
    modules = [holding(losses=None) for _ in range(3)]
    watch = ListWatch(modules, [ListPlace("losses")])
    for index, module in enumerate(modules):
        module.losses = [index]
    assert watch.appended(ListPlace("losses")) == [0, 1, 2]
    watch.replace(ListPlace("losses"), [9])
    assert modules[0].losses == [9]


def test_what_all_replicas_have_appended_to_one_list_is_counted_once() -> None:
    """Theirs are mirrors of it, which hold their own items as well."""
    modules = [holding(by_stage={}) for _ in range(2)]
    place = ListPlace("by_stage", ("train",))
    watch = ListWatch(modules, [place])
    modules[0].by_stage["train"] = [1, 2]
    modules[1].by_stage["train"] = [2]
    assert watch.appended(place, expected=2) == [1, 2]


def test_lists_inside_of_new_items_are_no_lists_that_grow() -> None:
    module = holding(pairs=[[1]])
    watch = ListWatch([module], find_lists(vars(module).items()))
    module.pairs.append([2, 3])
    module.pairs[0].append(4)
    grown = watch.grown(find_lists([("pairs", module.pairs)]))
    assert {str(place): items for place, items in grown.items()} == {"self.pairs": [[2, 3]], "self.pairs.0": [4]}


def test_items_keep_no_graph() -> None:
    loss = torch.ones(2, requires_grad=True).sum()
    kept = without_graphs([{"loss": loss}, "x", SimpleNamespace()])
    assert not kept[0]["loss"].requires_grad
    assert kept[1] == "x"


def test_a_window_that_the_step_cuts_keeps_its_length() -> None:
    items = [object() for _ in range(6)]
    window = items[:3]
    module = holding(window=window)
    watch = ListWatch([module], [ListPlace("window")])
    for item in items[3:5]:  # of two slices
        window.append(item)
        window.pop(0)
    assert watch.appended(ListPlace("window")) == items[3:5]
    watch.replace(ListPlace("window"), items[5:])
    assert window == [items[1], items[2], items[5]]


def test_a_window_that_is_not_full_yet_drops_nothing() -> None:
    items = [object() for _ in range(6)]
    window = items[:2]
    module = holding(window=window)
    watch = ListWatch([module], [ListPlace("window")])
    window.extend(items[2:4])
    watch.replace(ListPlace("window"), items[4:5])
    assert window == [items[0], items[1], items[4]]


def test_items_that_are_taken_out_are_noticed() -> None:
    place = ListPlace("hardest")
    for change, is_lost in (
        (lambda held: held.append(7), False),
        (lambda held: held.pop(0), True),
        (lambda held: held.pop(), True),
        (lambda held: held.sort(reverse=True), True),
        (lambda held: held.clear(), True),
    ):
        module = holding(hardest=[1.5, 2.5, 3.5])
        watch = ListWatch([module], [place])
        change(module.hardest)
        assert watch.has_lost_items(place) == is_lost
    module = holding(hardest=deque([1.5, 2.5], maxlen=2))
    watch = ListWatch([module], [place])
    module.hardest.append(3.5)
    assert not watch.has_lost_items(place), "its limit drops them in the order in which they came"
    module = holding(hardest=[object() for _ in range(2_000)])
    watch = ListWatch([module], [place])
    module.hardest = module.hardest[1:]
    assert watch.has_lost_items(place)


def test_lists_under_other_numbers_are_siblings() -> None:
    module = holding(history={0: [1], 1: [2], "name": [3]}, nested=[[1], [2]])
    assert [str(place) for place in ListPlace("history", (0,)).siblings(module)] == ["self.history.1"]
    assert [str(place) for place in ListPlace("nested", (1,)).siblings(module)] == ["self.nested.0"]
    assert ListPlace("history", ("name",)).siblings(module) == [], "another name may mean another thing"
    assert ListPlace("history").siblings(module) == []


@pytest.mark.parametrize("index", [0, 1])
def test_counters_in_a_list_are_set_and_not_appended(index: int) -> None:
    counts = [0, 0, 0]
    place = ListPlace("counts")
    watch = ListWatch([holding(counts=counts)], [place])
    counts[index] += 5
    assert watch.appended(place) == []
    assert watch.grown([place]) == {}
