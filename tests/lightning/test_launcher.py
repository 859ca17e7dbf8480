"""What a Trainer does runs in this process, and workers end when it fails."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_dpx.lightning.launcher import InThisProcess


def launcher(log: list[str]) -> InThisProcess:
    @contextmanager
    def context() -> Iterator[None]:
        log.append("enter")
        yield
        log.append("leave")

    return InThisProcess(context, lambda: log.append("end workers"))


def test_the_result_is_that_of_the_function_and_the_workers_stay() -> None:
    log: list[str] = []
    assert launcher(log).launch(lambda one, two: one + two, 1, two=2) == 3
    assert log == ["enter", "leave"]
    assert launcher(log).is_interactive_compatible


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt()])
def test_workers_end_before_the_error_is_handled(error: BaseException) -> None:
    log: list[str] = []

    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        launcher(log).launch(fail)
    assert caught.value is error
    assert log == ["enter", "end workers"]
