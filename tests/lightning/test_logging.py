"""What replicas log in one step is logged once."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.lightning.logging import StepLog, path_of, replay
from lightning_dpx.replicas import BatchSlice, MergeRules, Replica
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer

CPU = torch.device("cpu")


class Logs(nn.Module):
    """Keeps what is logged at last."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[str, float, dict[str, Any]]] = []

    def log(self, name: str, value: Any, **options: Any) -> None:
        self.logged.append((name, round(float(value), 4), options))


class NoMetrics:
    """No value is that of a metric."""

    def is_whole(self, value: Any) -> bool:
        return False


def logs_of(*entries: list[tuple[str, Any, dict[str, Any]]], rows: tuple[int, ...] = (3, 1)) -> list[StepLog]:
    module = Logs()
    found = []
    for index, (mine, num_rows) in enumerate(zip(entries, rows, strict=True)):
        log = StepLog(BatchSlice(Replica(index, CPU, module), num_rows, None))
        with log.recording(module):
            for name, value, options in mine:
                module.log(name, value, **options)
        found.append(log)
    assert module.logged == [], "nothing reaches the module's own log inside a step"
    return found


def replayed(logs: list[StepLog]) -> list[tuple[str, float, dict[str, Any]]]:
    module = Logs()
    replay(logs, module, CPU, NoMetrics(), MergeRules())
    return module.logged


@pytest.mark.parametrize(("reduce_fx", "expected"), [("mean", 2.0), ("sum", 6.0), ("min", 1.0), ("max", 5.0)])
def test_values_come_together_by_their_own_operation_weighted_by_rows(reduce_fx: str, expected: float) -> None:
    options = {"reduce_fx": reduce_fx}
    logs = logs_of([("a", torch.tensor(1.0), options)], [("a", torch.tensor(5.0), options)])
    [(name, value, _)] = replayed(logs)
    assert (name, value) == ("a", expected)


def test_a_name_that_is_logged_again_in_a_step_is_told_apart() -> None:
    twice = [("a", 1.0, {}), ("a", 3.0, {})]
    assert [(name, value) for name, value, _ in replayed(logs_of(twice, twice))] == [("a", 1.0), ("a", 3.0)]
    assert path_of(("a", 0)) == "a"
    assert path_of(("a", 1)) == "a (call 2)"


def test_what_one_replica_logs_is_logged_and_batch_sizes_add_up() -> None:
    logs = logs_of([("a", 1.0, {"batch_size": 6}), ("only", 7.0, {})], [("a", 5.0, {"batch_size": 2})])
    found = {name: (value, options.get("batch_size")) for name, value, options in replayed(logs)}
    assert found == {"a": (2.0, 8), "only": (7.0, None)}


def test_a_logged_tensor_keeps_no_graph() -> None:
    loss = torch.ones(1, requires_grad=True).sum()
    [first, _] = logs_of([("a", loss, {})], [])
    assert not first.entries["a", 0][0].requires_grad


def test_settings_may_be_given_by_place_as_lightning_takes_them() -> None:
    module = Logs()
    log = StepLog(BatchSlice(Replica(0, CPU, module), 4, None))
    with log.recording(module):
        module.log("a", torch.tensor(1.0), True, False, True, False, "sum")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="on_stepp"):
            module.log("b", torch.tensor(1.0), True, on_stepp=True)  # type: ignore[call-arg]
    [(name, value, options)] = replayed([log])
    assert (name, value) == ("a", 1.0)
    assert options == {"prog_bar": True, "logger": False, "on_step": True, "on_epoch": False, "reduce_fx": "sum"}


class LogsByAPartial(Classifier):
    """Its head has a way to log of its own, as heads do that know no LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net.log_value = functools.partial(self.log, on_step=False, on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.net.log_value("by_head", loss)  # type: ignore[operator]
        self.log("by_step", loss)
        return loss


class LogsBySuper(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        super().log("by_super", loss, on_step=False, on_epoch=True)
        return loss


@pytest.mark.parametrize("kind", [LogsByAPartial, LogsBySuper])
def test_what_is_logged_past_self_log_is_logged_as_on_one_device(kind: type[Classifier], execution: str) -> None:
    def logged(**options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        trainer = make_trainer(max_epochs=1, **options)
        trainer.fit(kind(), make_loader(), make_loader())
        return dict(trainer.callback_metrics)

    with pytest.warns(UserWarning, match="training_step gets all of its batches whole.* past self.log"):
        ours = logged(strategy=dpx.DPXStrategy(execution=execution), devices=2)
    assert_equal(ours, logged())


class LogsInItsBackward(Classifier):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.log("in_backward", loss.detach(), on_step=False, on_epoch=True)
        super().backward(loss, *args, **kwargs)


def test_a_backward_that_logs_leaves_steps_their_slices(execution: str, recwarn: pytest.WarningsRecorder) -> None:
    """It is called once for the whole batch."""
    logged = []
    for options in ({}, {"strategy": dpx.DPXStrategy(execution=execution), "devices": 2}):
        torch.manual_seed(0)
        trainer = make_trainer(max_epochs=1, **options)
        trainer.fit(LogsInItsBackward(), make_loader(), make_loader())
        logged.append(dict(trainer.callback_metrics))
    assert_equal(logged[1], logged[0])
    assert not any("whole" in str(one.message) for one in recwarn)


class AddsToItsLossInPlace(Classifier):
    """Logs a loss, and goes on to add another one to it, as a base class and what is derived from it do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log_dict({"first": loss})
        loss += 0.1 * self.net(batch[0]).square().mean()
        self.log("both", loss)
        return loss


@pytest.mark.parametrize("execution", ["inline", "threads"])
def test_a_value_is_logged_as_it_was_then(execution: str, hardware: str) -> None:
    """Tensors were kept until all slices had ended, and one device of the rehearsal kept them as long."""

    def logged(**options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        trainer = make_trainer(max_epochs=1, **options)
        trainer.fit(AddsToItsLossInPlace(), make_loader(32, 8), make_loader(32, 8))
        return {name: torch.as_tensor(trainer.callback_metrics[name]).cpu() for name in ("first", "both")}

    ours = logged(strategy=dpx.DPXStrategy(execution=execution), devices=2, accelerator=hardware)
    assert_equal(ours, logged())
