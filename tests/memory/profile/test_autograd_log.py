"""When autograd saved, asked for and let go of what."""

import pytest
import torch

from lightning_dpx.memory.profile.autograd_log import AutogradLog
from lightning_dpx.memory.profile.data import Request
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace


@pytest.fixture
def log() -> AutogradLog:
    return AutogradLog(MemoryTrace(torch.device("cpu")))


def test_what_is_asked_for_once_is_used_until_autograd_lets_go_of_it(log) -> None:
    index = log.note_saved()
    log.values[index] = 7
    event = log.note_asked(index)
    log.note_released(index)
    requests, saved = log.requests(end=10)
    assert requests == [Request(event, 7, event + 1, index)]
    assert saved == []


def test_what_is_asked_for_again_is_used_until_the_copy_that_was_given_is_gone(log) -> None:
    index = log.note_saved()
    log.values[index] = 7
    first = log.note_asked(index)
    copied = torch.ones(3)
    log.watch_use(first, copied)
    del copied
    second = log.note_asked(index)
    log.note_released(index)
    requests, saved = log.requests(end=10)
    assert [(one.event, one.released) for one in requests] == [(first, first + 1), (second, second + 1)]
    assert saved == [(0, 7)]


def test_what_is_no_value_is_no_request(log) -> None:
    log.note_asked(log.note_saved())
    assert log.requests(end=10) == ([], [])


def test_what_is_never_asked_for_and_never_let_go_lives_to_the_end(log) -> None:
    log.note_saved()
    index = log.note_saved()
    event = log.note_asked(index)
    asked, ends = log.held(end=10)
    assert asked == [-1, event]
    assert ends == [10, 10]
