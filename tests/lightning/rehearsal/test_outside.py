"""What steps keep outside of the module, in objects and nested containers: named where slices differ, and in order."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset
from torchmetrics import MeanMetric

import lightning_dpx as dpx
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer

LOSSES: list[tuple[int, float]] = []
BY_BATCH: dict[int, list[float]] = {}
LABELS: list[int] = []
THREADS: list[str] = []


class Meter:
    def __init__(self) -> None:
        self.losses: list[float] = []


METER = Meter()


class Records(Callback):
    def __init__(self) -> None:
        self.meter = Meter()


class Rows(Dataset[int]):
    """A data set that the module holds, and in which its step counts."""

    def __init__(self) -> None:
        self.steps = 0
        self.labels: list[int] = []

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 4


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    yield
    for kept in (LOSSES, LABELS, THREADS, METER.losses):
        kept.clear()
    BY_BATCH.clear()


class Keeps(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.keep(batch, batch_idx, float(loss.detach()))
        return loss

    def keep(self, batch: Any, batch_idx: int, loss: float) -> None:
        raise NotImplementedError

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class InAListOfPairs(Keeps):
    def keep(self, batch: Any, batch_idx: int, loss: float) -> None:
        LOSSES.append((batch_idx, loss))


class InListsOfADict(Keeps):
    def keep(self, batch: Any, batch_idx: int, loss: float) -> None:
        BY_BATCH.setdefault(batch_idx, []).append(loss)


class InAnObject(Keeps):
    def keep(self, batch: Any, batch_idx: int, loss: float) -> None:
        METER.losses.append(loss)


class InAnObjectOfACallback(Keeps):
    def keep(self, batch: Any, batch_idx: int, loss: float) -> None:
        self.trainer.callbacks[0].meter.losses.append(loss)  # type: ignore[attr-defined]


class InADataSet(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows()

    def keep(self, batch: Any, batch_idx: int, loss: float) -> None:
        self.rows.steps += 1


class LabelsInADataSet(InADataSet):
    def keep(self, batch: Any, batch_idx: int, loss: float) -> None:
        self.rows.labels += batch[1].tolist()


class LabelsInAGlobal(Keeps):
    def keep(self, batch: Any, batch_idx: int, loss: float) -> None:
        LABELS.extend(batch[1].tolist())
        THREADS.extend([threading.current_thread().name] * len(batch[1]))  # as many as on one device


class Loads(dict[str, float]):
    """Loads what it is asked for, as mappings of names to models do; here there is nothing to load."""

    def items(self) -> Any:
        raise ImportError("a model of the mapping is not there")

    __len__ = __iter__ = __bool__ = __contains__ = keys = values = get = items  # type: ignore[assignment]

    def __deepcopy__(self, memo: Any) -> Any:
        return self


FACTORS = Loads(loss=2.0)


class ByMappingsThatLoad(Keeps):
    """Its loss is a mean over pairs of rows, which slices do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = Loads(loss=2.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.net(batch[0])
        return torch.pdist(rows).mean() * FACTORS["loss"] * self.factors["loss"]


class ByHand(ByMappingsThatLoad):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean() * FACTORS["loss"] * self.factors["loss"]
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


def fit(kind: type[LightningModule], execution: str = "") -> Any:
    torch.manual_seed(0)
    model = kind()
    where = {"devices": 2, "strategy": dpx.DPXStrategy(execution=execution)} if execution else {}
    make_trainer(max_epochs=1, callbacks=[Records()], **where).fit(model, make_loader(24, 8))
    return model


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (InAListOfPairs, "LOSSES"),
        (InListsOfADict, "BY_BATCH.0"),
        (InAnObject, "METER.losses"),
        (InAnObjectOfACallback, r"trainer.callbacks\[0\].meter.losses"),
        (InADataSet, "self.rows.steps"),
    ],
)
def test_what_slices_do_not_keep_as_one_device_does_is_named(kind: type[Keeps], name: str) -> None:
    with pytest.warns(UserWarning, match=rf"is not what it is on one device: {name} is"):
        fit(kind, "inline")


def test_a_rehearsal_leaves_nothing_in_a_data_set_that_the_module_holds() -> None:
    assert fit(LabelsInADataSet, "inline").rows.labels == fit(LabelsInADataSet).rows.labels


def test_threads_take_turns_where_a_step_writes_outside_of_the_module() -> None:
    fit(LabelsInAGlobal, "threads")
    labels = list(LABELS)
    assert set(THREADS) == {threading.main_thread().name}
    LABELS.clear()
    fit(LabelsInAGlobal)
    assert labels == LABELS


def test_mappings_that_load_what_they_are_asked_for_are_read_past_their_methods() -> None:
    """Their own methods fail: no replicas were made, and a step that reached one as a global was not checked."""
    with pytest.warns(UserWarning, match="is not what it is on one device: the loss is"):
        fit(ByMappingsThatLoad, "inline")


def test_steps_by_hand_leave_mappings_that_load_alone() -> None:
    theirs, ours = (fit(ByHand, execution).state_dict() for execution in ("", "inline"))
    assert_equal(ours, theirs)


class Recorder:
    """Collects what a layer gives, for a script or a callback that registers its method as a hook."""

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.last: torch.Tensor | None = None
        self.num_rows = 0


class AppendsSums(Recorder):
    def hook(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.sums.append(output.sum().item())


class KeepsTheLast(Recorder):
    def hook(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.last = output.detach()


class CountsRows(Recorder):
    """It has a tensor, so that every replica has a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(3)

    def hook(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.num_rows += len(output)


class UpdatesAMetric(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.largest = MeanMetric()

    def hook(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.largest.update(output.detach().max())


class OnlyLoss(Keeps):
    def keep(self, batch: Any, batch_idx: int, loss: float) -> None: ...


class TapsALayer(Keeps):
    """Its own hook fills a dict by which the step itself gets the output of a layer."""

    def __init__(self) -> None:
        super().__init__()
        taps = self.taps = dict[str, torch.Tensor]()
        self.net.register_forward_hook(lambda layer, args, output: taps.update(out=output))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.net(batch[0])
        return F.cross_entropy(self.taps["out"], batch[1])


def fit_recorded(model: Keeps, **options: Any) -> None:
    strategy = dpx.DPXStrategy(execution="inline", **options)
    make_trainer(max_epochs=1, devices=2, strategy=strategy).fit(model, make_loader(24, 8))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (AppendsSums, r"AppendsSums.sums is \+1 items on one device, \+2 items in slices"),
        (KeepsTheLast, "KeepsTheLast.last is of one slice"),
        (CountsRows, "CountsRows.num_rows is"),
        (UpdatesAMetric, "UpdatesAMetric.largest.mean_value is of one slice"),
    ],
)
def test_what_hooks_of_submodules_keep_elsewhere_is_compared(kind: Any, text: str) -> None:
    """The hooks of a shadow have a copy of the recorder, and nothing looked at that: it was said to be as before."""
    model = OnlyLoss()
    model.net.register_forward_hook(kind().hook)
    with pytest.warns(UserWarning, match=f"not what it is on one device: the hook's {text}"):
        fit_recorded(model)


def test_what_hooks_keep_is_that_of_one_device_where_the_stage_is_given_whole() -> None:
    model = OnlyLoss()
    recorder = AppendsSums()
    model.net.register_forward_hook(recorder.hook)
    with pytest.warns(UserWarning, match="the hook's AppendsSums.sums"):
        fit_recorded(model, verify="first")
    assert len(recorder.sums) == 3


def test_what_hooks_keep_for_their_own_step_is_no_difference() -> None:
    fit_recorded(TapsALayer(), verify="raise")


@pytest.mark.parametrize("registers", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_rehearsal_leaves_nothing_in_what_hooks_of_parameters_have_captured(registers: str) -> None:
    """Shadows have these very hooks on their parameters, and not copies: a list had items of three more backwards."""
    model = OnlyLoss()
    calls: list[int] = []
    getattr(model.net.weight, registers)(lambda _: calls.append(1))
    with pytest.warns(UserWarning, match="hooks of parameters change .*a hook of net.weight"):
        fit_recorded(model)
    assert len(calls) == 6  # two slices of three batches


def test_a_rehearsal_leaves_nothing_in_what_hooks_of_all_modules_have_captured() -> None:
    model = OnlyLoss()
    sums: list[float] = []
    handle = register_module_forward_hook(lambda layer, args, output: sums.append(output.sum().item()))
    try:
        with pytest.warns(UserWarning, match=r"the hook's .*sums is \+1 items on one device, \+2 items in slices"):
            fit_recorded(model)
    finally:
        handle.remove()
    assert len(sums) == 6


class RoundsOperators(TorchDispatchMode):
    """To steps of the largest number of a result, which differs from slice to slice."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            step = result.abs().max() / 3
            return torch.round(result / step) * step
        return result


class RoundsFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.linear:
            step = result.detach().abs().max() / 3
            return result + (torch.round(result / step) * step - result).detach()
        return result


class CountsLinear(TorchFunctionMode):
    """Keeps its count in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.by_name: dict[str, list[int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            self.number += 1
            self.by_name.setdefault("linear", []).append(1)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [RoundsOperators, RoundsFunctions])
def test_a_mode_that_changes_what_operators_return_is_in_rehearsals(mode: type[Any]) -> None:
    """Without it slices did what one device does, in the rehearsal alone."""
    strategy = dpx.DPXStrategy(execution="threads")
    trainer = make_trainer(devices=2, max_epochs=1, limit_val_batches=0, strategy=strategy)
    with mode(), pytest.warns(UserWarning, match="is not what it is on one device: the loss is"):
        trainer.fit(Classifier(), make_loader(), make_loader())


def test_a_mode_counts_the_steps_that_are_trained() -> None:
    """What rehearsals run came to it, half as much again."""
    counted = CountsLinear()
    options: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0}
    strategy = dpx.DPXStrategy(execution="threads")
    with counted:
        make_trainer(devices=2, strategy=strategy, **options).fit(Classifier(), make_loader(), make_loader())
    # Two linear layers, called twice in each step by each of two replicas.
    assert (counted.number, len(counted.by_name["linear"])) == (16, 16)
