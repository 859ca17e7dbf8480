"""What waits for a gradient gets it, and the three moments at which replicas run their backwards give one sum."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from lightning_dpx.reducers.processes import ProcessReducer
from lightning_dpx.replicas import BatchSlice, ExpectedGradient, ReplicaSet
from lightning_dpx.step import TrainingStep
from lightning_dpx.step_backward import Pending

CPU = torch.device("cpu")
ROWS = torch.arange(6.0).reshape(6, 1)


class Step:
    """Two replicas of w x on one device, with slices of four rows and two."""

    def __init__(self) -> None:
        self.net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        self.replicas = ReplicaSet(self.net, [CPU, CPU])
        self.step = TrainingStep(self.replicas)
        first, second = self.replicas.primaries
        self.slices = [BatchSlice(first, 4, ROWS[:4].double()), BatchSlice(second, 2, ROWS[4:].double())]

    def forward(self, batch_slice: BatchSlice) -> torch.Tensor:
        return batch_slice.replica.module(batch_slice.batch).mean()

    def losses(self) -> list[torch.Tensor]:
        return [self.forward(batch_slice) for batch_slice in self.slices]

    def finish(self, loss: torch.Tensor) -> float | None:
        """Lightning's part, and the gradient that its optimizer finds."""
        loss.backward()
        self.step.backward()
        self.step.reduce()
        return None if self.net.weight.grad is None else self.net.weight.grad.item()


def after_all_forwards(step: Step) -> torch.Tensor:
    step.step.begin()
    return step.step.merge(step.slices, step.losses())


def with_each_forward(step: Step) -> torch.Tensor:
    step.step.begin()
    outputs = step.step.run_early(
        step.slices, step.forward, ExpectedGradient(), zeroed=frozenset(), shown=False, last=True
    )
    return step.step.merge(step.slices, outputs)


def after_second_pass(step: Step) -> torch.Tensor:
    def second(pending: Sequence[Pending]) -> None:
        for waiting in pending:
            gradient = waiting.leaves[0].grad
            assert gradient is not None
            step.forward(waiting.batch_slice).backward(gradient)

    step.step.begin()
    outputs = [loss.detach().requires_grad_() for loss in step.losses()]
    step.step.wait_for_second_pass(second)
    return step.step.merge(step.slices, outputs, lambda merged: (merged * torch.tensor([4, 2])).sum() / 6)


KINDS: list[Callable[[Step], torch.Tensor]] = [after_all_forwards, with_each_forward, after_second_pass]


@pytest.mark.parametrize("forward", KINDS)
def test_every_moment_gives_the_gradient_of_the_whole_batch(forward: Callable[[Step], torch.Tensor]) -> None:
    step = Step()
    assert step.finish(forward(step)) == pytest.approx(2.5)


@pytest.mark.parametrize("forward", KINDS)
def test_the_step_after_a_discarded_forward_is_a_plain_one(forward: Callable[[Step], torch.Tensor]) -> None:
    step = Step()
    forward(step)
    step.step.discard_forward()
    assert step.finish(after_all_forwards(step)) == pytest.approx(2.5)


def test_a_forward_that_fails_gives_gradients_back_that_were_put_aside() -> None:
    step = Step()
    step.net.weight.grad = torch.tensor([[7.0]], dtype=torch.float64)
    step.slices[1] = BatchSlice(step.slices[1].replica, 2, torch.zeros(2, 5, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        with_each_forward(step)
    step.step.discard_forward()
    assert step.net.weight.grad is not None
    assert step.net.weight.grad.item() == 7.0


class Others(ProcessReducer):
    """Other processes, which are in the middle of a step."""

    def mean(self, *_: Any) -> NoReturn:
        raise AssertionError("they would be waited for")


def test_after_an_error_gradients_of_earlier_batches_wait_for_no_other_process() -> None:
    step = Step()
    step.step.sums.processes = Others()
    after_all_forwards(step).backward()
    step.step.backward()
    step.step.begin()
    step.step.keep_earlier_batches()
    assert step.net.weight.grad is not None
    assert step.net.weight.grad.item() == pytest.approx(2.5)


def test_slices_of_equal_weight_share_the_product_with_it() -> None:
    step = Step()
    leaf = torch.zeros((), requires_grad=True)
    leaf.grad = torch.tensor(8.0)
    flat = torch.zeros(1)
    waiting = [Pending(one, [flat], [leaf], weight) for one, weight in zip(step.slices, (0.5, 0.5), strict=True)]
    weighted: dict[tuple[int, float], torch.Tensor] = {}
    roots = [one.roots(weighted) for one in waiting]
    assert [tensor.item() for tensor in weighted.values()] == [4.0]
    # The loss of a slice may have another shape than the merged one.
    assert [gradients[0].shape for _, gradients in roots] == [flat.shape, flat.shape]


def test_what_needs_no_gradient_waits_for_none() -> None:
    step = Step()
    waiting = Pending(step.slices[0], [], [])
    plain = torch.zeros(2)
    trained = torch.zeros(2, requires_grad=True)
    assert waiting.catch(CPU, plain) is plain
    leaf = waiting.catch(CPU, trained)
    assert waiting.leaves == [leaf]
    with torch.no_grad():
        leaf += 1
    assert trained.tolist() == [0.0, 0.0]
