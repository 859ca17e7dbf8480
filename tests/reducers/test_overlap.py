"""Gradients that leave while backward runs, and those that leave at its end."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.reducers import OverlappedReduction


def test_a_second_gradient_after_the_first_has_left_is_an_error() -> None:
    weight, bias = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    reduced: list[list[int]] = []
    eager = OverlappedReduction([[weight, bias]], 2, reduced.append, ["weight", "bias"])
    for _ in range(2):
        with eager.during_backward([0]):
            (weight * bias).sum().backward()
    assert sorted(index for indices in reduced for index in indices) == [0, 1]
    assert eager.done == {0, 1}

    def twice() -> None:
        with eager.during_backward([0]):
            weight.sum().backward()
            weight.sum().backward()

    with pytest.raises(dpx.ReplicationError, match=r"Parameter weight got a second gradient .*gradient_buckets=0"):
        twice()
    eager.close()
    assert not weight._post_accumulate_grad_hooks


def test_a_bucket_leaves_when_all_replicas_have_filled_it_and_unused_parameters_wait_for_nobody() -> None:
    columns = [[torch.nn.Parameter(torch.ones(1)) for _ in range(3)] for _ in range(2)]
    reduced: list[list[int]] = []
    overlap = OverlappedReduction(columns, 3, reduced.append, ["a", "b", "c"])
    for _ in range(2):
        reduced.clear()
        with overlap.during_backward([0, 1]):
            for column in columns:
                assert overlap.is_during_backward
                (column[0] * column[2]).sum().backward()
                filled = column is columns[1]
                assert bool(reduced) == (filled and bool(overlap.done)), "one replica alone fills no bucket"
    assert sorted(reduced) == [[0], [2]]
    assert overlap.done == {0, 2}, "the second backward knows the gradients from the first"
    overlap.forget()
    assert overlap.done == frozenset()
    overlap.close()


def test_outside_of_its_backward_nothing_is_reduced_and_frozen_parameters_stay_frozen() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    reduced: list[list[int]] = []
    overlap = OverlappedReduction([[weight, frozen]], 1, reduced.append, ["weight", "frozen"])
    with overlap.during_backward([0]):
        weight.sum().backward()
    weight.sum().backward()
    assert reduced == []
    assert not frozen.requires_grad
    overlap.close()


def test_frozen_whole_numbers_have_no_gradient_to_wait_for() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    quantized = torch.nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)
    reduced: list[list[int]] = []
    overlap = OverlappedReduction([[weight, quantized]], 2, reduced.append, ["weight", "quantized"])
    for _ in range(2):
        with overlap.during_backward([0]):
            (weight * quantized).sum().backward()
    assert reduced == [[0]]
    overlap.close()


class _Streams:
    """A device's module that says which of its streams are current; the caller has chosen one of every device."""

    def __init__(self) -> None:
        self.entered: list[int] = []

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(stream_id=7, device=device)

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        self.entered.append(stream.device.index)
        yield
        self.entered.remove(stream.device.index)


@pytest.mark.parametrize("last", [0, 1])
def test_a_bucket_that_leaves_does_so_on_the_streams_that_the_caller_has_chosen(
    sim: Any, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """Autograd's thread of one device has the default streams of all others, on which nothing waits for them."""
    columns = [[torch.nn.Parameter(torch.ones(1, device=f"sim:{place}"))] for place in range(2)]
    seen: list[list[int]] = []
    streams = _Streams()
    overlap = OverlappedReduction(columns, 1, lambda _: seen.append(list(streams.entered)), ["a"])
    for _ in range(2):
        losses = [parameter.square().sum() for (parameter,) in columns]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_device_module", lambda device: streams)
            with overlap.during_backward([0, 1]):
                losses[1 - last].backward()
                losses[last].backward()
    assert seen == [[1 - last]], "that of its own device autograd has entered"
    overlap.close()
