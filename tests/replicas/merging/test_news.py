import pytest

from lightning_dpx.replicas import News
from lightning_dpx.replicas.merging.rules import Rule


def rehearsed(*values: str, attributes: tuple[str, ...] = (), news: frozenset[str] = frozenset()) -> News:
    """News of a stage whose rehearsal has seen these."""
    made = News()
    made.learn(values, attributes, undecided=frozenset(), news=news, checked=values)
    return made


def test_before_a_rehearsal_nothing_is_new() -> None:
    news = News()
    news.watch([1, 2], "result", None)
    assert not news.is_pending
    assert news.take() == frozenset()


def test_a_value_that_no_rehearsal_has_seen_is_new_once() -> None:
    news = rehearsed("result")
    news.batch = 3
    news.watch([1, 2], "result.extra", None)
    assert news.is_pending
    assert news.last_batch == 3
    assert news.take() == {"result.extra"}
    news.watch([1, 2], "result.extra", None)
    assert news.take() == frozenset()


@pytest.mark.parametrize("parts", [[None, None], [1]], ids=["nothing", "one slice"])
def test_what_is_that_of_one_device_anyhow_is_not_new(parts: list[int | None]) -> None:
    news = rehearsed("result")
    news.watch(parts, "result.extra", None)
    assert not news.is_pending


def test_what_has_come_in_the_place_of_numbers_is_new() -> None:
    news = rehearsed("result")
    news.watch(["a", "b"], "result", Rule(kind="mean"))
    assert news.take() == {"result"}


def test_what_a_rehearsal_did_not_see_again_stays_unchecked() -> None:
    first = frozenset({"result.extra", "self.count"})
    news = rehearsed("result", attributes=("count",), news=first)
    assert news.unchecked == {"result.extra"}
    news.batch = 7
    news.watch([1, 2], "result.extra", None)
    assert news.last_batch == 7


def test_an_attribute_that_changes_unseen_time_and_again_is_told_once() -> None:
    news = rehearsed("result")
    for batch in range(5):
        news.note_changed({"state"}, batch)
    with pytest.warns(UserWarning, match=r"self\.state changed in 6 batches and in no check"):
        news.note_changed({"state"}, 5)
    news.note_changed({"state"}, 6)
    assert news.take() == {"self.state"}
    assert news.last_batch == 6


def test_what_a_whole_batch_has_changed_is_checked_and_not_told() -> None:
    news = rehearsed("result")
    for number in range(5):
        assert not news.often_unseen(["losses"])
        news.note_changed_by_whole(["losses"], batch=3 + number)
    assert news.is_pending
    assert news.last_batch == 7
    assert news.unchecked == {"self.losses"}
    assert news.take() == frozenset()
    assert news.often_unseen(["losses", "others"]) == {"losses"}
