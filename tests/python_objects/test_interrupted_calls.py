"""A call is on the stack of its thread while it runs, and not after it."""

import sys
import threading
from types import FrameType

from lightning_dpx.python_objects.interrupted_calls import is_on_stack


def own_frame() -> FrameType:
    """Of this call, which is over when it is looked at."""
    return sys._getframe()


def test_a_call_is_on_the_stack_while_it_runs() -> None:
    frame = sys._getframe()
    assert is_on_stack(frame)
    assert (lambda: is_on_stack(frame))()
    assert not is_on_stack(own_frame())


def test_it_is_on_no_other_threads_stack() -> None:
    seen: list[bool] = []
    thread = threading.Thread(target=lambda frame: seen.append(is_on_stack(frame)), args=[sys._getframe()])
    thread.start()
    thread.join()
    assert seen == [False]
