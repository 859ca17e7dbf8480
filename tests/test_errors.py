"""Errors of this package are errors of Python's own kinds, and say what they were told."""

import pytest
import torch
from lightning.pytorch.utilities.memory import is_oom_error, is_out_of_cpu_memory

from lightning_dpx import errors


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        (errors.ConfigurationError, ValueError), (errors.UnsupportedError, NotImplementedError),
        (errors.WholeBatchError, errors.UnsupportedError), (errors.SliceError, ValueError),
        (errors.ReplicationError, TypeError), (errors.GatherError, ValueError), (errors.ParityError, RuntimeError),
        (errors.CollectiveError, RuntimeError), (errors.PlanError, ValueError), (errors.BudgetError, errors.PlanError),
        (errors.BudgetError, torch.OutOfMemoryError), (errors.BenchError, RuntimeError),
    ],
)  # fmt: skip
def test_every_error_is_one_of_the_package_and_one_of_python_s(kind: type[Exception], also: type[Exception]) -> None:
    assert issubclass(kind, errors.DPXError)
    assert issubclass(kind, also)


def test_a_budget_that_is_not_met_is_out_of_memory_to_lightning_and_says_only_its_own_words() -> None:
    error = errors.BudgetError("no plan fits", smallest=5)
    assert is_oom_error(error)
    assert not is_out_of_cpu_memory(error)
    assert (str(error), error.smallest) == ("no plan fits", 5)


def test_a_step_for_one_replica_says_why_and_that_one_device_can_do_it() -> None:
    error = errors.WholeBatchError("it counts.", "Count elsewhere.")
    text = "several replicas: it counts. Count elsewhere. One device can do it, with the whole batch (devices=1, "
    assert str(error).endswith(f"{text}micro_batches=1).")


class OddError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def test_an_error_that_cannot_be_printed_is_described_all_the_same() -> None:
    assert errors.describe_error(ValueError("x")) == "ValueError: x"
    assert errors.describe_error(OddError()) == "OddError (its __str__ fails with ZeroDivisionError)"


def test_few_names_are_told_and_the_others_counted() -> None:
    assert errors.some_of(["a", "b"]) == "a, b"
    assert errors.some_of(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert errors.some_of(["a", "b", "c"], most=2) == "a, b and 1 more"
