"""A step without forward and backward is timed with all else that a step does, and leaves nothing behind."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_dpx.lightning.tuning import empty_step
from lightning_dpx.lightning.tuning.empty_step import EmptyRun, EmptySeconds, seconds_of_empty_step, seconds_of_loading
from tests.conftest import SIMULATED, make_trainer, sim_device

CPU = torch.device("cpu")
LEAST = 0.01  # seconds of processor time that what is timed here takes at the least


def work() -> None:
    began = time.thread_time()
    while time.thread_time() - began < LEAST:
        pass


class Slow(torch.optim.SGD):
    """An optimizer whose step takes its time."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        type(self).steps += 1
        work()
        return super().step(closure)


class Refuses(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ValueError("not like this")


class Net(LightningModule):
    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> None:
        super().__init__()
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        self.net[0].weight.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.net.parameters(), lr=0.1)  # type: ignore[call-arg]


class Slowly:
    """Collates rows, and takes its time."""

    batches = 0

    def __call__(self, rows: Any) -> Any:
        self.batches += 1
        work()
        return torch.utils.data.default_collate(rows)


class SeenError(Exception):
    """Ends a fit before its first step."""


def on_first_batch(
    module: LightningModule, look: Callable[[Trainer, LightningModule, Any], Any], loader: Any = None, **options: Any
) -> Any:
    """What ``look`` finds where a fit has its optimizers and its first batch."""
    found = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, _: int) -> None:
            found.append(look(trainer, pl_module, batch))
            raise SeenError

    data = DataLoader(TensorDataset(torch.ones(16, 4)), 8) if loader is None else loader
    with pytest.raises(SeenError):
        make_trainer(max_steps=1, callbacks=[Looks()], **options).fit(module, data)
    return found[0]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_optimizer_steps_on_parameters_of_its_own(replicas: int, accumulate: int) -> None:
    module = Net(Slow)
    before = [parameter.clone() for parameter in module.parameters()]
    Slow.steps = 0

    def look(trainer: Trainer, module: LightningModule, batch: Any) -> float:
        seconds = seconds_of_empty_step(trainer, module, EmptyRun(devices=[CPU] * replicas, batch=batch)).whole
        assert all(torch.equal(one, other) for one, other in zip(module.parameters(), before, strict=True))
        assert all(parameter.grad is None for parameter in module.parameters())
        assert not trainer.optimizers[0].state
        assert Slow.steps > 2
        return seconds

    # A step for every so many batches, and the time is that of one batch.
    seconds = on_first_batch(module, look, accumulate_grad_batches=accumulate)
    assert seconds > LEAST / accumulate


def test_what_is_logged_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    log = LightningModule.log

    def noted(self: LightningModule, name: str, value: Any, **options: Any) -> None:
        calls.append((name, options))
        log(self, name, value, **options)

    monkeypatch.setattr(LightningModule, "log", noted)
    logged = [("loss", {"prog_bar": True}), ("rate", {"on_epoch": True})]

    def look(trainer: Trainer, module: LightningModule, batch: Any) -> float:
        return seconds_of_empty_step(trainer, module, EmptyRun(devices=[CPU], batch=batch, logged=logged)).whole

    assert on_first_batch(Net(), look) > 0
    assert calls[:2] == logged


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_on_an_accelerator_the_time_of_the_host_is_told_from_that_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which is slow here: what was handed to it is done when it is waited for."""
    waits = []

    def slow(device: torch.device) -> None:
        waits.append(device)
        work()

    given = []
    move = torch.Tensor.to

    def moved(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        given.append(self.device)
        return move(self, *args, **options)

    monkeypatch.setattr(empty_step, "synchronize", slow)

    def look(trainer: Trainer, module: LightningModule, batch: Any) -> EmptySeconds:
        on_device = [tensor.to("sim:1") for tensor in batch]
        module.to("sim:1")
        monkeypatch.setattr(torch.Tensor, "to", moved)
        try:
            return seconds_of_empty_step(trainer, module, EmptyRun(devices=[sim_device(1)], batch=on_device))
        finally:
            monkeypatch.setattr(torch.Tensor, "to", move)
            module.to("cpu")

    Slow.steps = 0
    seconds = on_first_batch(Net(Slow), look)
    assert Slow.steps > 2
    assert set(waits) == {sim_device(1)}
    assert LEAST < seconds.queued <= seconds.whole - LEAST, "the optimizer, and then the device"
    assert CPU in given, "the batch is on its way to the device, as a loader's is"


def test_an_empty_step_that_fails_is_told_of_and_counts_as_nothing() -> None:
    def look(trainer: Trainer, module: LightningModule, batch: Any) -> float:
        with pytest.warns(UserWarning, match=r"forward and backward alone: .* failed \(ValueError: not like this\)"):
            return seconds_of_empty_step(trainer, module, EmptyRun(devices=[CPU], batch=batch)).whole

    assert on_first_batch(Net(Refuses), look) == 0


def test_a_step_by_hand_has_its_optimizers_in_its_own_time() -> None:
    class ByHand(Net):
        def __init__(self) -> None:
            super().__init__(Slow)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            return None

    Slow.steps = 0
    assert (
        on_first_batch(
            ByHand(), lambda *given: seconds_of_empty_step(*given[:2], EmptyRun(devices=[CPU], batch=given[2])).whole
        )
        > 0
    )
    assert Slow.steps == 0


def test_a_batch_is_loaded_to_see_how_long_that_takes() -> None:
    collate = Slowly()
    loader = DataLoader(TensorDataset(torch.ones(64, 4)), 8, collate_fn=collate)
    assert on_first_batch(Net(), lambda trainer, *_: seconds_of_loading(trainer), loader) > LEAST
    assert collate.batches <= 2 + 4, "as many as the fit takes, and a few"


def test_the_last_batch_of_few_rows_is_not_the_one_that_is_timed() -> None:
    class Some(Slowly):
        def __call__(self, rows: Any) -> Any:
            if len(rows) == 8:
                work()
            return torch.utils.data.default_collate(rows)

    loader = DataLoader(TensorDataset(torch.ones(17, 4)), 8, collate_fn=Some())
    assert on_first_batch(Net(), lambda trainer, *_: seconds_of_loading(trainer), loader) > LEAST


class Stream(IterableDataset[Any]):
    taken = 0

    def __iter__(self) -> Any:
        for _ in range(8):
            self.taken += 1
            yield (torch.ones(4),)


def test_nothing_is_taken_from_a_stream() -> None:
    stream = Stream()
    assert on_first_batch(Net(), lambda trainer, *_: seconds_of_loading(trainer), DataLoader(stream, 2)) == 0
    assert stream.taken <= 4, "what the fit takes itself"


class Failing(Slowly):
    def __call__(self, rows: Any) -> Any:
        if self.batches == 2:
            raise OSError("a file is gone")
        return super().__call__(rows)


def test_a_loader_that_fails_later_is_told_of_and_counts_as_nothing() -> None:
    loader = DataLoader(TensorDataset(torch.ones(64, 4)), 8, collate_fn=Failing())

    def load(trainer: Any, *_: Any) -> float:
        with pytest.warns(UserWarning, match=r"loading a batch takes is not counted: .*OSError: a file is gone"):
            return seconds_of_loading(trainer)

    assert on_first_batch(Net(), load, loader) == 0


def test_an_empty_step_waits_for_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "1"), ("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    sizes = []

    class Unused(Trainer):
        def fit(self, *_: Any, **__: Any) -> None:
            sizes.append(self.world_size)
            raise RuntimeError("nothing is run here")

    monkeypatch.setattr(empty_step, "Trainer", Unused)
    run = EmptyRun(devices=[CPU], batch=torch.ones(2, 2))
    with pytest.warns(UserWarning, match="nothing is run here"):
        assert seconds_of_empty_step(make_trainer(accelerator="cpu", devices=1), Net(), run) == EmptySeconds()
    assert sizes == [1]
