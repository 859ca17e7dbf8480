"""The host's allocator has an error of its own, and steps that run out of memory there are told from others by it."""

import contextlib
import gc
import logging
import weakref
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.devices import free_garbage, is_out_of_memory, raises_out_of_memory
from tests.conftest import make_trainer

ROWS = 256
WIDTH = 64


def too_large() -> torch.Tensor:
    return torch.empty(2**50)


def test_the_hosts_error_is_known_by_its_text() -> None:
    with pytest.raises(RuntimeError) as failed:
        too_large()
    assert type(failed.value) is RuntimeError
    assert is_out_of_memory(failed.value)
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert is_out_of_memory(
        RuntimeError("[...] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.")
    )
    assert not is_out_of_memory(RuntimeError("another one"))
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator: can't allocate memory"))


def test_cudas_error_where_pinned_memory_runs_out_is_known_by_its_code_or_its_text() -> None:
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported"))
    coded = torch.AcceleratorError("another text")
    assert not is_out_of_memory(coded)
    coded.error_code = 2
    assert is_out_of_memory(coded)

    def pin() -> None:
        raise coded

    with pytest.raises(torch.OutOfMemoryError, match="another text"):
        raises_out_of_memory(pin)()


def test_it_gets_the_type_of_other_devices_and_holds_nothing_that_does_not_fit() -> None:
    seen: list[weakref.ref[Any]] = []

    def step() -> None:
        held = nn.Linear(2, 2)
        seen.append(weakref.ref(held))
        try:
            too_large()
        except RuntimeError as error:
            error.add_note("In module net.")
            raise

    with pytest.raises(torch.OutOfMemoryError, match="you tried to allocate") as failed:
        raises_out_of_memory(step)()
    assert failed.value.__notes__ == ["In module net."]
    assert failed.value.__context__ is None
    del failed
    free_garbage()
    assert seen[0]() is None


def test_what_does_not_fit_goes_with_the_error_and_waits_for_no_look_for_garbage() -> None:
    seen: list[weakref.ref[Any]] = []

    def step() -> None:
        held = nn.Linear(2, 2)
        seen.append(weakref.ref(held))
        too_large()

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            raises_out_of_memory(step)()
        assert seen[0]() is None
    finally:
        gc.enable()


def test_other_errors_and_results_pass_as_they_are() -> None:
    error = RuntimeError("another one")

    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError) as failed:
        raises_out_of_memory(fail)()
    assert failed.value is error
    assert raises_out_of_memory(lambda: 3)() == 3


REFUSALS = ContextVar("REFUSALS", default=0)  # no state of a module, which a profile would put back


class Greedy(LightningModule):
    """Of all rows it needs more than there is, as often as is said."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        left = REFUSALS.get()
        if left and len(rows) == ROWS:
            REFUSALS.set(left - 1)
            too_large()
        loss: torch.Tensor = self.net(rows).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class RefusesOnce(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            REFUSALS.set(1)


def weights(refusals: int, **options: Any) -> torch.Tensor:
    """Those that a fit ends with."""
    torch.manual_seed(1)
    module = Greedy()
    rows = torch.randn(3 * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    token = REFUSALS.set(refusals)
    try:
        make_trainer(max_epochs=1, **options).fit(module, DataLoader(TensorDataset(rows), ROWS))
        assert REFUSALS.get() == 0
    finally:
        REFUSALS.reset(token)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_a_step_that_does_not_fit_on_the_host_is_profiled_on_fewer_rows(caplog: pytest.LogCaptureFixture) -> None:
    expected = weights(0)
    with caplog.at_level(logging.INFO):
        strategy = dpx.DPXStrategy(memory_budget="800KiB", plan_cache=False, micro_batches=1)
        found = weights(2, strategy=strategy, devices=1)  # a look at the step, and its profile
    assert "profiled on 1/4 of the rows, because all did not fit" in caplog.text
    assert torch.equal(found, expected)


def test_a_step_that_runs_out_of_the_hosts_memory_is_repeated() -> None:
    expected = weights(0)
    strategy = dpx.DPXStrategy(memory_budget="800KiB", plan_cache=False, micro_batches=1, on_oom="replan")
    with pytest.warns(UserWarning, match="a step ran out of memory .* and is repeated, 1 of 3 times at the most"):
        found = weights(0, strategy=strategy, devices=1, callbacks=[RefusesOnce()])
    assert torch.equal(found, expected)
