"""One call of an optimizer's step, whose closure is that of every replica."""

from typing import Any

import pytest
import torch

from lightning_dpx.lightning.manual.closures import ClosureRounds, RunClosure, StepDone

CPU = torch.device("cpu")


def test_every_call_of_the_closure_is_handed_over_and_answered() -> None:
    def take_step(closure: Any) -> Any:
        with torch.no_grad():
            first = closure()
        return first + closure()

    rounds = ClosureRounds(take_step, CPU)
    command = rounds.begin()
    assert command == RunClosure(rounds, grad_enabled=False)
    command = rounds.answer(1)
    assert command == RunClosure(rounds, grad_enabled=True)
    command = rounds.answer(10)
    assert command == StepDone(11)


def test_an_optimizer_that_never_calls_it_is_done_at_once() -> None:
    assert ClosureRounds(lambda closure: "done", CPU).begin() == StepDone("done")


def test_its_error_is_raised_where_the_replicas_meet() -> None:
    def take_step(closure: Any) -> Any:
        closure()
        raise ValueError("odd")

    rounds = ClosureRounds(take_step, CPU)
    rounds.begin()
    with pytest.raises(ValueError, match="odd"):
        rounds.answer(None)


def test_an_optimizer_whose_replicas_failed_never_returns_from_its_closure() -> None:
    seen: list[str] = []

    def take_step(closure: Any) -> None:
        try:
            closure()
            seen.append("went on")
        finally:
            seen.append("unwound")

    rounds = ClosureRounds(take_step, CPU)
    rounds.begin()
    rounds.abandon()
    assert seen == ["unwound"]
    rounds.abandon()  # nothing more


def test_the_optimizer_finds_the_context_of_its_caller() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounds = ClosureRounds(lambda closure: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")), CPU)
        assert rounds.begin().result == (False, True)
