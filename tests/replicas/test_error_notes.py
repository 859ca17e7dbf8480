"""An error stays the object that it was and says where in the module, and on what, it was raised."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx import ReplicaGroup
from lightning_dpx.replicas.error_notes import FirstNaN, annotate, note_replica, trial_noted

CPU = torch.device("cpu")


class Fails(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        raise self.error


def notes_of(error: BaseException) -> list[str]:
    module = nn.Sequential(nn.Identity(), nn.Sequential(Fails(error)))
    with pytest.raises(type(error)) as caught:
        module(torch.ones(1))
    assert caught.value is error
    annotate(error, module, CPU, FirstNaN())
    return error.__notes__


def test_the_innermost_module_is_named() -> None:
    assert notes_of(ValueError("odd")) == ["In module 1.0."]


def test_out_of_memory_says_what_the_device_held() -> None:
    place, held = notes_of(torch.OutOfMemoryError("none left"))
    assert place == "In module 1.0."
    assert held.startswith("cpu held ")
    assert "MiB when it was asked for more; its peak was" in held


def test_a_lost_device_is_said_to_be_lost() -> None:
    assert "cpu is lost to this process" in notes_of(torch.AcceleratorError("assert"))[1]


def test_a_device_that_has_no_pinned_memory_left_is_not_lost() -> None:
    _, held = notes_of(torch.AcceleratorError("CUDA error: out of memory"))
    assert held.startswith("cpu held ")


def test_the_first_module_that_made_a_nan_is_remembered() -> None:
    class Divides(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows / rows

    module = nn.Sequential(nn.Identity(), nn.Sequential(Divides()), nn.Identity())
    first_nan = FirstNaN()
    with first_nan.watching(module):
        module(torch.zeros(1))
    assert first_nan.path == "1.0"
    assert not module[1][0]._forward_hooks, "watched no longer"
    with first_nan.watching(module):
        module(torch.ones(1))
    assert first_nan.path == ""


def test_replica_device_and_stage_are_noted_and_that_a_run_was_a_trial() -> None:
    error = ValueError("odd")
    note_replica(error, 2, CPU, "forward")
    with pytest.raises(ValueError, match="odd"), trial_noted(1, CPU, "training step", "to find a plan"):
        raise error
    assert error.__notes__ == [
        "In replica 2 on cpu, during forward.",
        "In replica 1 on cpu, during training step, in a trial run to find a plan.",
    ]


class MakesNaN(nn.Module):
    """A NaN, unless it is told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.fails = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("odd")
        return self.linear(rows * float("nan")).mean()


@pytest.mark.parametrize("execution", ["inline", "threads"])
def test_an_error_after_anomaly_mode_says_nothing_of_a_nan_that_was_seen_in_it(execution: Any) -> None:
    module = nn.Sequential(MakesNaN())
    with ReplicaGroup(module, ["cpu", "cpu"], execution=execution) as group:
        with torch.autograd.set_detect_anomaly(True):
            group.forward(torch.ones(4, 1), is_train=True)
            with pytest.raises(RuntimeError, match="nan values") as caught:
                group.backward()
        assert "The first module whose output held a NaN was 0.linear." in caught.value.__notes__
        module[0].fails = True
        with pytest.raises(ValueError, match="odd") as later:
            group.forward(torch.ones(4, 1), is_train=True)
        assert not any("NaN" in note for note in later.value.__notes__)
