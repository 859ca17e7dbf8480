"""Tensors in containers, and those of modules there, follow the first replica's, however they were written."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_dpx.replicas.hidden_tensors import HiddenTensors


def add_in_place(source: torch.Tensor) -> None:
    with torch.no_grad():
        source.add_(1)


def write_silently(source: torch.Tensor) -> None:
    source.data.add_(1)


def give_other_memory(source: torch.Tensor) -> None:
    source.data = source.data + 1


@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor])
@pytest.mark.parametrize("write", [add_in_place, write_silently, give_other_memory])
def test_a_tensor_that_is_written_between_steps_is_followed(
    write: Callable[[torch.Tensor], None], kind: type[torch.Tensor]
) -> None:
    source = kind(torch.zeros(3))
    copied = kind(torch.zeros(3))
    hidden = HiddenTensors([(source, copied)])
    for step in range(1, 12):  # more steps than those before each of which the bits are looked at
        write(source)
        hidden.follow()
        assert copied.tolist() == [step] * 3


def test_a_silent_write_after_many_steps_is_seen_where_one_is_customary() -> None:
    source = nn.Parameter(torch.zeros(3))
    copied = nn.Parameter(torch.zeros(3))
    hidden = HiddenTensors([(source, copied)])
    for _ in range(10):
        hidden.follow()
    write_silently(source)
    hidden.mark_changed()
    hidden.follow()
    assert copied.tolist() == [1, 1, 1]


def test_what_a_step_writes_into_a_copy_is_forgotten() -> None:
    source = torch.zeros(3)
    copied = source.clone()
    hidden = HiddenTensors([(source, copied)])
    copied.add_(5)
    hidden.follow()
    assert copied.tolist() == [0, 0, 0]


def test_another_shape_is_followed_and_what_is_dropped_is_forgotten() -> None:
    source = nn.Parameter(torch.zeros(3))
    copied = nn.Parameter(torch.zeros(3))
    others = [torch.zeros(2), torch.zeros(2)]
    hidden = HiddenTensors([(source, copied), (others[0], others[1])])
    source.data = torch.ones(5)
    others.clear()
    hidden.follow()
    assert copied.tolist() == [1] * 5
