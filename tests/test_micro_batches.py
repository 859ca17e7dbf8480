"""A group's slices in micro-batches: the outputs and gradients of the plain module, in less memory."""

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import places

ROWS = 13
WAYS = [(1, 2), (1, 3), (2, 2), (2, [3, 1])]


@pytest.fixture
def make_group():
    """Builds groups that are closed after the test."""
    with ExitStack() as groups:
        yield lambda *args, **options: groups.enter_context(dpx.ReplicaGroup(*args, **options))


class Loss(nn.Module):
    """Rows (B, 3) and labels (B,) to the mean loss, or to logits (B, 2); counts its forwards in a buffer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        logits = self.net(rows)
        return logits if labels is None else F.cross_entropy(logits, labels)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, 3), torch.randint(2, (ROWS,))


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.cpu().clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize(("num_devices", "micro_batches"), WAYS)
def test_a_loss_and_its_gradients(
    make_group: Any, num_devices: int, micro_batches: Any, one_pass: bool, execution: str, hardware: str
) -> None:
    plain = Loss()
    rows, labels = data()
    expected = plain(rows, labels)
    expected.backward()
    group = make_group(Loss(), places(num_devices), micro_batches=micro_batches, execution=execution)
    for _ in range(2):  # "write" forgets those of the first time
        if one_pass:
            group.forward_backward(rows, labels)
        else:
            group.forward(rows, labels)
            group.backward()
        sizes = [part.stop - part.start for part in group.slices]
        loss = sum(output.cpu() * size / ROWS for output, size in zip(group.outputs(), sizes, strict=True))
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(gradients(group.replicas[0].module), gradients(plain))
    assert not any(output.requires_grad for output in group.outputs())
    assert float(group.replicas[0].module.calls) == 2  # what a second pass counts is not counted


@pytest.mark.parametrize(("num_devices", "micro_batches"), WAYS)
def test_gradients_that_depend_on_all_outputs(
    make_group: Any, num_devices: int, micro_batches: Any, hardware: str
) -> None:
    """A loss over all pairs of rows, as contrastive losses are; and the gradients of the inputs."""

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits @ logits.T, torch.arange(ROWS, device=logits.device))

    plain = Loss()
    rows = data()[0].requires_grad_()
    loss(plain(rows)).backward()
    group = make_group(Loss(), places(num_devices), micro_batches=micro_batches, inputs_need_grad=True, grad_req="add")
    group.forward(rows.detach())
    logits = group.outputs_merged().requires_grad_()
    loss(logits).backward()
    group.backward(logits.grad)
    torch.testing.assert_close(gradients(group.replicas[0].module), gradients(plain))
    torch.testing.assert_close(group.input_grads_merged()[0].cpu(), rows.grad)
    group.forward(rows.detach())
    group.backward(logits.grad)
    twice = {name: 2 * value for name, value in gradients(plain).items()}
    torch.testing.assert_close(gradients(group.replicas[0].module), twice)


def test_both_passes_draw_the_same_random_numbers(make_group: Any, hardware: str) -> None:
    """Bit by bit the gradients of a loop by hand over the same slices, and what is drawn afterwards is the same."""
    rows, labels = data()
    group = make_group(Loss(dropout=0.5), places(1), micro_batches=3)
    by_hand = copy.deepcopy(group.replicas[0].module)
    group.forward(rows, labels)  # parameters reach their device; draws are noticed
    torch.manual_seed(3)
    group.forward(rows, labels)
    group.backward()
    after = torch.rand(3)
    torch.manual_seed(3)
    for part in group.slices:
        own = [value[part].to(places(1)[0]) for value in (rows, labels)]
        (by_hand(*own) * (len(own[0]) / ROWS)).backward()
    assert torch.equal(torch.rand(3), after)
    for name, value in gradients(by_hand).items():
        torch.testing.assert_close(gradients(group.replicas[0].module)[name], value, rtol=0, atol=1e-7)


def test_rows_and_fewer_rows(make_group: Any) -> None:
    group = make_group(Loss(), places(1), micro_batches=4)
    for num_rows, starts in ((13, [0, 4, 7, 10]), (12, [0, 4, 8]), (5, [0, 3]), (2, [0])):
        group.forward(torch.randn(num_rows, 3))
        assert [part.start for part in group.slices] == starts
        assert len(group.outputs_merged()) == num_rows
    small = make_group(Loss(), places(1), micro_batches=4)
    small.forward(torch.randn(3, 3))
    assert [len(output) for output in small.outputs()] == [1, 1, 1]


def test_micro_batches_hold_the_parameters_of_their_device(make_group: Any) -> None:
    group = make_group(Loss(), places(2), micro_batches=[2, 1])
    first, second, other = (list(replica.module.parameters()) for replica in group.replicas)
    assert all(one is two for one, two in zip(first, second, strict=True))
    assert not any(one is two for one, two in zip(first, other, strict=True))


def test_a_monitor_sees_every_output_once(make_group: Any) -> None:
    seen: list[tuple[int, str]] = []
    group = make_group(Loss(), places(1), micro_batches=2)
    group.install_monitor(lambda replica, name, tensor: seen.append((replica, name)))
    group.forward(*data())
    group.backward()
    assert seen.count((0, "net.0")) == seen.count((1, "net.0")) == 1


def test_memory_does_not_grow_with_the_batch(make_group: Any, sim: Any) -> None:
    """Two passes over four times the rows, in micro-batches of the same rows: hardly more is held at the peak."""
    peaks = {}
    for number in (1, 4):
        deep = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(20)), nn.Linear(8, 1))
        group = make_group(deep, ["sim:0"], micro_batches=number)
        rows = torch.randn(512 * number, 8)
        group.forward(rows)
        group.backward(torch.ones(len(rows), 1, device="sim:0"))
        held = sim.memory_allocated(0)
        sim.reset_peak_memory_stats(0)
        group.forward(rows)
        group.backward(torch.ones(len(rows), 1, device="sim:0"))
        peaks[number] = sim.max_memory_allocated(0) - held
    assert peaks[4] < 1.25 * peaks[1] + 4 * 512 * 9 * 4  # the inputs and outputs of all rows


@pytest.mark.parametrize("given", [0, -2, 2.0, [1, 0], [], "3"])
def test_bad_numbers_are_refused(given: Any) -> None:
    with pytest.raises(dpx.ConfigurationError, match="micro_batches"):
        dpx.ReplicaGroup(Loss(), places(1), micro_batches=given)
