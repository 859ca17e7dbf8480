from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.memory.profile import timing_effort
from lightning_dpx.memory.profile.step_timer import StepTimer


def steps_that_are_timed() -> int:
    @contextmanager
    def alone(*, watches: bool) -> Iterator[None]:
        yield

    calls: list[int] = []
    StepTimer(torch.device("cpu"), alone).least(lambda: calls.append(1), lambda result: None)
    return len(calls)


def test_quick_timing_takes_one_step_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(timing_effort.VARIABLE, "full")
    assert steps_that_are_timed() > 3
    monkeypatch.setenv(timing_effort.VARIABLE, "quick")
    assert steps_that_are_timed() == 2


def test_without_the_variable_times_are_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(timing_effort.VARIABLE)
    assert not timing_effort.is_quick()
    assert timing_effort.rounds(9) == 9
    assert timing_effort.seconds(0.5) == 0.5


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(timing_effort.VARIABLE, "hasty")
    with pytest.raises(dpx.ConfigurationError, match=r"LIGHTNING_DPX_TIMING='hasty' is not allowed; give \"full\""):
        timing_effort.is_quick()
