"""After a trial what it has left is gone, and nothing older was searched."""

import _thread
import gc
import weakref
from collections.abc import Iterator

import pytest

from lightning_dpx.python_objects.trial_garbage import TrialGarbage


class Circle:
    """Held by itself alone."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_set_aside() -> Iterator[None]:
    """As in a program of a user's; these tests leave what was imported out of collections."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("nothing_set_aside")
def test_what_a_trial_leaves_is_freed_without_a_search_of_what_was_there() -> None:
    kept = [Circle() for _ in range(100)]
    searched = []
    garbage = TrialGarbage()
    with garbage.freed():
        with garbage.freed():
            inner = weakref.ref(Circle())
        assert inner() is None
        outer = weakref.ref(Circle())
        searched.append(len(gc.get_objects()))
    assert outer() is None
    assert gc.get_freeze_count() == 0
    assert searched[0] < 100 < len(gc.get_objects())
    last = weakref.ref(kept.pop())
    gc.collect()
    assert last() is None


@pytest.mark.usefixtures("nothing_set_aside")
def test_what_became_garbage_before_a_trial_does_not_become_old_in_it() -> None:
    gc.disable()
    try:
        before = weakref.ref(Circle())
        with TrialGarbage().freed():
            assert before() is None
    finally:
        gc.enable()


class Interrupts(Circle):
    """As Ctrl-C in the search that finds it."""

    __del__ = staticmethod(_thread.interrupt_main)


@pytest.mark.usefixtures("nothing_set_aside")
def test_a_search_that_is_interrupted_leaves_nothing_aside() -> None:
    """Everything stayed out of collections, to the end of the process."""
    gc.disable()
    callbacks = gc.callbacks.copy()
    gc.callbacks.clear()  # one in Python would be where it arrives, and swallow it
    try:
        with pytest.raises(KeyboardInterrupt), TrialGarbage().freed():
            Interrupts()
        assert gc.get_freeze_count() == 0
    finally:
        gc.callbacks.extend(callbacks)
        gc.enable()


def test_what_the_user_has_set_aside_stays_so() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with pytest.raises(ValueError, match="of the step"), TrialGarbage().freed():
        raise ValueError("of the step")
    assert gc.get_freeze_count() > count // 2, "but for what has gone by itself meanwhile"
