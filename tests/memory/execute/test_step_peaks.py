"""Steps that are not followed are known to be larger by their inputs, and by what they call."""

import torch

from lightning_dpx.memory.execute.known_values import KnownValues
from lightning_dpx.memory.execute.step_peaks import StepPeaks


def test_inputs_grow_by_bytes_and_by_any_dim() -> None:
    peaks = StepPeaks(None)
    assert peaks.have_grown((torch.zeros(4, 8),))
    assert not peaks.have_grown((torch.zeros(4, 8),))
    assert not peaks.have_grown((torch.zeros(2, 8),))
    assert peaks.have_grown((torch.zeros(2, 9),)), "longer rows, though fewer"


def test_without_a_budget_no_calls_are_looked_at() -> None:
    peaks = StepPeaks(None)
    peaks.note({"layers.0": 1}, KnownValues())
    peaks.note({"layers.1": 1}, KnownValues())
    assert not peaks.varying
    assert not peaks.look_at({"layers.0": 9})
    assert peaks.peak == 0
