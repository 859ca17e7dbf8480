"""Larger inputs are noticed."""

import torch

from lightning_dpx.memory.execute.largest_inputs import LargestInputs


def test_inputs_grow_in_bytes_or_in_a_dim() -> None:
    inputs = LargestInputs()
    assert inputs.have_grown(((torch.ones(4, 8), "text"), {"mask": torch.ones(4)}))
    assert not inputs.have_grown(((torch.ones(4, 8), "text"), {"mask": torch.ones(4)}))
    assert not inputs.have_grown((torch.ones(3, 7), torch.ones(2)))
    assert inputs.have_grown((torch.ones(2, 16), torch.ones(2)))  # as many bytes: fewer rows, and longer ones
    assert inputs.have_grown((torch.ones(4, 16), torch.ones(4)))  # no longer in any dim
    assert not inputs.have_grown((torch.ones(4, 16), torch.ones(4)))


def test_what_has_no_tensors_never_grows() -> None:
    inputs = LargestInputs()
    assert not inputs.have_grown(())
    assert not inputs.have_grown((None, "a", [1, 2]))
