"""A budget that leaves no room is refused at setup."""

import torch

from tests.lightning.memory.test_example_input import refused, watched


def test_a_budget_without_room_for_parameters_is_refused_before_data_are_loaded() -> None:
    error = refused(watched(), memory_budget="0.25MiB")
    assert "beside activations (parameters, gradients, optimizer state, the batch) takes" in str(error)


def test_one_row_of_the_example_input_that_cannot_fit_is_refused() -> None:
    example = torch.randn(7, 2000, 128)  # seven rows; and one row has 2000 positions
    error = refused(watched(example), memory_budget="4.5MiB")
    assert "smallest that can is" in str(error)
    assert any("That is for one row of example_input_array" in note for note in error.__notes__)
