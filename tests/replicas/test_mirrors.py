"""What a step does to a replica's mirror of a container happens to the container, and the other way round."""

from collections import deque
from typing import Any

import pytest

from lightning_dpx.replicas.mirrors import MappingMirror, make_mirror, mirrored_pairs


def same(value: Any) -> Any:
    return value


def add_to(container: Any, item: str) -> None:
    if isinstance(container, dict):
        container[item] = item
    elif isinstance(container, set):
        container.add(item)
    else:
        container.append(item)


@pytest.mark.parametrize("make", [list, deque, set, lambda items: dict.fromkeys(items, "v")])
def test_what_replicas_add_comes_together_in_their_order(make: Any) -> None:
    source, copies = make("ab"), [make("ab"), make("ab")]
    mirror = make_mirror(source)
    for replica, copied in enumerate(copies, start=1):
        mirror.add(replica, copied)
    add_to(copies[0], "c")
    add_to(copies[1], "d")
    assert mirror.merge(1, same)
    assert mirror.merge(2, same)
    assert list(source) == list("abcd") if not isinstance(source, set) else source == set("abcd")


@pytest.mark.parametrize("make", [list, deque, set, lambda items: dict.fromkeys(items, "v")])
def test_what_the_source_has_got_since_reaches_the_mirror_translated(make: Any) -> None:
    source, copied = make("ab"), make("ab")
    mirror = make_mirror(source)
    mirror.add(1, copied)
    add_to(source, "c")
    mirror.sync(1, str.upper)
    mirror.note()
    assert ("C" in copied.values()) if isinstance(copied, dict) else ("C" in copied)
    assert not mirror.merge(1, same), "what came from the source is no act of the replica"


def test_what_a_replica_took_from_the_front_is_taken_from_the_source() -> None:
    source, copied = list("abc"), list("abc")
    mirror = make_mirror(source)
    mirror.add(1, copied)
    del copied[:2]
    copied.append("d")
    mirror.merge(1, same)
    assert source == ["c", "d"]


def test_an_item_that_a_replica_removed_from_a_dict_or_a_set_is_gone() -> None:
    for source, copied in (({"a": 1, "b": 2}, {"a": 1, "b": 2}), ({"a", "b"}, {"a", "b"})):
        mirror = make_mirror(source)
        mirror.add(1, copied)
        copied.pop("a") if isinstance(copied, dict) else copied.remove("a")
        mirror.merge(1, same)
        assert list(source) == ["b"]


def test_what_several_replicas_have_made_in_one_step_holds_the_items_of_all() -> None:
    source: dict[str, Any] = {}
    mirror = MappingMirror(source)
    copies: list[dict[str, Any]] = [{}, {}]
    for replica, copied in enumerate(copies, start=1):
        mirror.add(replica, copied)
    source["val"] = {"loss": [0], "name": "root"}
    copies[0]["val"] = {"loss": [1], "name": "first"}
    copies[1]["val"] = {"loss": [2], "extra": [3]}
    for replica in (1, 2):
        mirror.merge(replica, lambda value: value)
    assert source == {"val": {"loss": [0, 1, 2], "name": "root", "extra": [3]}}


def test_containers_in_containers_and_attributes_are_paired_once_each() -> None:
    class Holder:
        def __init__(self) -> None:
            self.items = [1]

    mine, theirs = {"a": [Holder()]}, {"a": [Holder()]}
    pairs = list(mirrored_pairs(mine, theirs))
    assert [type(one) for one, _ in pairs] == [dict, list, Holder, list]
    assert all(type(one) is type(other) and one is not other for one, other in pairs)


@pytest.mark.parametrize("make", [list, lambda items: deque(items, maxlen=3)])
def test_a_window_on_what_steps_append_is_not_copied_anew_in_every_step(make: Any) -> None:
    """Nor the whole attribute that it is in, such as a vocabulary."""
    source, copied = make([{}, {}, {}]), make([{}, {}, {}])
    mirror = make_mirror(source)
    mirror.add(1, copied)
    del source[0]
    source.append({})
    mirror.sync(1, dict)
    assert not mirror.exchanged_containers
    assert len(copied) == 3
    source.clear()
    source.extend([{}, {}])
    mirror.sync(1, dict)
    assert mirror.exchanged_containers == isinstance(source, list), "others in their place, which have no mirrors yet"
