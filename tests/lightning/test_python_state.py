"""What hooks and steps write on a module in plain Python is as on one device."""

import copy
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer

pytestmark = pytest.mark.usefixtures("hardware")


class Collects(Classifier):
    """The idioms of Lightning 2: lists, dicts and sets filled by steps and read by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self._outputs: list[torch.Tensor] = []
        self.by_stage: dict[str, list[torch.Tensor]] = {"val": []}
        self.labels: set[int] = set()
        self.found: dict[str, int] = {}
        self.count = 0
        self.epochs: list[torch.Tensor] = []

    def on_train_epoch_start(self) -> None:
        self.scale = 1.0 + self.current_epoch  # did not exist when the replicas were made
        self.fresh: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._outputs.append(batch[0].sum(1).detach())
        self.labels |= set(batch[1].tolist())
        self.found[f"step {batch_idx} rank {self.global_rank}"] = batch_idx
        self.fresh.extend(batch[1].tolist())
        self.count += 1
        return self.scale * F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        self.epochs.append(torch.cat(self._outputs))
        self._outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.by_stage["val"].append(batch[0][:, 0])

    def on_validation_epoch_end(self) -> None:
        self.val = torch.cat(self.by_stage["val"]).cpu()
        self.by_stage["val"] = []


def fitted(kind: type[Classifier], num_rows: int = 53, **options: Any) -> Any:
    torch.manual_seed(0)
    model, loader = kind(), make_loader(num_rows)
    make_trainer(**options).fit(model, loader, loader)
    return model


def test_lists_dicts_sets_and_attributes_are_those_of_one_device(execution) -> None:
    one = fitted(Collects)
    strategy = dpx.DPXStrategy(execution=execution, verify="off")  # an item per slice is no item per step
    ours = fitted(Collects, strategy=strategy, devices=3)
    assert len(ours.epochs) == 2
    for epoch, expected in zip(ours.epochs, one.epochs, strict=True):
        torch.testing.assert_close(epoch.cpu(), expected)
    torch.testing.assert_close(ours.val, one.val)
    assert ours.labels == one.labels
    assert ours.fresh == one.fresh
    assert ours.count == one.count == 8
    assert len(ours.found) == 3 * 3 + 1, "the last batch of five rows goes to one replica"
    assert ours._outputs == []
    assert_equal(dict(ours.state_dict()), dict(one.state_dict()))


class Schedules(Classifier):
    """Hooks that change a submodule, a tensor and an object after the replicas were made."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.5), nn.Linear(16, 3))
        self.lock = None
        self.weights = None

    def on_train_epoch_start(self) -> None:
        self.net[1].negative_slope = 0.1 * self.current_epoch
        self.weights = torch.tensor([1.0, 2.0, 3.0], device=self.device) * (1 + self.current_epoch)
        self.lock = threading.Lock()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.lock:
            return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none").mul(self.weights.sum()).mean()


def test_hooks_that_change_attributes_reach_every_replica(execution) -> None:
    ours = fitted(Schedules, strategy=dpx.DPXStrategy(execution=execution), devices=3)
    assert_equal(dict(ours.state_dict()), dict(fitted(Schedules).state_dict()))


class Grows(Classifier):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.late = nn.Identity()


def test_submodules_added_during_fit_are_on_every_replica(execution) -> None:
    ours = fitted(Grows, strategy=dpx.DPXStrategy(execution=execution), devices=2)
    assert_equal(dict(ours.state_dict()), dict(fitted(Grows).state_dict()))


class Schedule:
    """A plain object that hooks advance and steps read."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.history: list[float] = []

    def advance(self) -> None:
        self.factor *= 0.5
        self.history.append(self.factor)


class Keeps(Classifier):
    """Everything that people keep on a module, changed by hooks and by steps."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"weight": 1.0})
        self.schedule = Schedule()
        self.weights = [1.0, 2.0, 3.0]
        self.ordered: OrderedDict[str, float] = OrderedDict(a=1.0, b=2.0)
        self.by_label: defaultdict[int, list[float]] = defaultdict(list)
        self.counter: Counter[int] = Counter()
        self.recent: deque[float] = deque(maxlen=7)
        self.confusion = np.zeros((3, 3), dtype=np.int64)
        self.nested = {"train": {"rows": 0}, "val": {"rows": 0}}
        self.scale = torch.ones(3)
        self.norm = lambda rows: rows / self.schedule.factor
        self.caches: dict[str, torch.Tensor] = {}
        self.bank: list[torch.Tensor] = []
        self.records: list[dict[str, torch.Tensor]] = []
        self.best = float("-inf")
        self.state: dict[str, Any] = {"last": None}
        self.heads = [self.net[0], {"out": self.net[-1]}]

    def on_train_epoch_start(self) -> None:
        self.schedule.advance()
        self.hparams["weight"] = 1.0 + self.current_epoch
        self.weights[0] += 1.0
        self.ordered.move_to_end("a")
        self.ordered["b"] += 1.0
        self.scale = self.scale.to(self.device)
        self.scale.mul_(1.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows, labels = batch
        for label in labels.tolist():
            self.by_label[label].append(self.schedule.factor)
            self.recent.append(label)
        self.counter.update(labels.tolist())
        hidden = self.heads[0](self.norm(rows)).tanh()
        logits = self.heads[1]["out"](hidden)
        np.add.at(self.confusion, (labels.cpu().numpy(), 0), 1)
        self.nested["train"]["rows"] += len(rows)
        if "ramp" not in self.caches:
            self.caches["ramp"] = torch.linspace(0, 1, 3, device=rows.device)
        self.bank.append(rows[:, 0].detach())
        self.records.append({"labels": labels, "logits": logits.detach()})
        self.state["last"] = rows.detach().mean()
        self.last_loss = F.cross_entropy(logits * self.scale + self.caches["ramp"], labels)
        self.fresh = {"seen": [batch_idx]}
        factor = self.hparams["weight"] * self.weights[0] * next(iter(self.ordered.values()))
        return self.last_loss * factor / 20

    def on_train_epoch_end(self) -> None:
        self.best = max(self.best, float(torch.cat(self.bank).max()))
        self.seen_labels = torch.cat([record["labels"] for record in self.records]).tolist()
        self.bank.clear()
        self.records = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.nested["val"]["rows"] += len(batch[0])
        self.nested["val"].setdefault("first", self.schedule.factor)
        self.log("val_loss", F.cross_entropy(self.net(batch[0]) + self.caches.get("ramp", 0.0), batch[1]))

    def on_train_end(self) -> None:
        self.final = self.nested["train"]["rows"] + self.nested["val"]["rows"]


KEPT = ("weights", "ordered", "by_label", "counter", "recent", "nested", "final", "seen_labels", "fresh", "hparams")


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_all_that_people_keep_on_a_module_is_as_on_one_device(num_replicas: int, execution: str) -> None:
    one = fitted(Keeps, precision="64-true")
    strategy = dpx.DPXStrategy(execution=execution)
    ours = fitted(Keeps, strategy=strategy, devices=num_replicas, precision="64-true")
    for name in KEPT:
        assert getattr(ours, name) == getattr(one, name), name
    assert ours.schedule.history == one.schedule.history
    assert (ours.confusion == one.confusion).all()
    assert ours.best == pytest.approx(one.best)
    torch.testing.assert_close(ours.scale.cpu(), one.scale)
    torch.testing.assert_close(ours.caches["ramp"].cpu(), one.caches["ramp"])
    assert_equal(dict(ours.state_dict()), dict(one.state_dict()))


def test_tensors_with_a_history_are_no_obstacle_to_a_test_or_a_second_fit(execution: str) -> None:
    model, loader = fitted(Keeps, strategy=dpx.DPXStrategy(execution=execution), devices=2), make_loader()
    assert model.last_loss.grad_fn is not None
    again = make_trainer(strategy=dpx.DPXStrategy(execution=execution), devices=2, max_epochs=1)
    again.test(model, loader)
    again.fit(model, loader, loader)
    one = fitted(Keeps)
    plain = make_trainer(max_epochs=1)
    plain.test(one, loader)
    plain.fit(one, loader, loader)
    assert_equal(dict(model.state_dict()), dict(one.state_dict()))


class ClosesOverItself(Classifier):
    """An optimizer that is made by a closure, as notebooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.configure_optimizers = lambda: torch.optim.SGD(self.parameters(), lr=0.1)  # type: ignore[method-assign]


def test_a_closure_over_the_module_may_configure_its_optimizers(execution: str) -> None:
    ours = fitted(ClosesOverItself, strategy=dpx.DPXStrategy(execution=execution), devices=2)
    assert_equal(dict(ours.state_dict()), dict(fitted(ClosesOverItself).state_dict()))


class ReadsItsQueue(Classifier):
    """A queue of tensors that steps fill and read: what other replicas put there must be on the reader's device."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[torch.Tensor] = []
        self.read: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        mean = torch.stack(self.queue).mean(0) if self.queue else batch[0].new_zeros(8)
        self.read.append(len(self.queue))
        self.queue.append(torch.ones(8, device=batch[0].device))
        if len(self.queue) > 4:
            self.queue.pop(0)
        return F.cross_entropy(self.net(batch[0] + mean), batch[1])


def test_a_queue_of_tensors_is_read_on_every_device(execution: str) -> None:
    ours = fitted(ReadsItsQueue, strategy=dpx.DPXStrategy(execution=execution, verify="off"), devices=2)
    assert ours.read[:3] == [0, 1, 2], "in turns each replica sees what the one before it put there"
    assert len(ours.queue) == 4
    assert {item.device for item in ours.queue} == {ours.queue[0].device}


class Words(Classifier):
    """A vocabulary, which a step's cost must not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary = {f"word {index}": index for index in range(1000)}
        self.looked_at = 0


def test_a_vocabulary_is_one_object_on_all_replicas() -> None:
    model = Words()
    strategy = dpx.DPXStrategy(execution="inline")
    trainer = make_trainer(strategy=strategy, devices=3, max_epochs=1)
    seen: list[Any] = []
    model.on_train_batch_end = lambda *_: seen.extend(  # type: ignore[method-assign]
        replica.vocabulary for replica in strategy.replica_modules
    )
    trainer.fit(model, make_loader(), make_loader())
    assert seen
    assert all(words is model.vocabulary for words in seen)


class CollectsOnTheHost(Classifier):
    """What people do so that outputs take no room on the device; and a table that is too large for it."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []
        self.table = torch.arange(30.0).view(10, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        found = self.table[batch[1].cpu()]  # an index on a device is no index of a table on the host
        self.outputs.append(torch.cat([logits.detach().cpu(), found], 1))
        return F.cross_entropy(logits, batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        return {"host": logits.cpu(), "device": logits}

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.predicted_on = {name: output.device.type for name, output in outputs.items()}


@pytest.mark.parametrize("execution", ["inline", "threads"])
def test_what_a_step_puts_on_the_host_stays_there(execution: str) -> None:
    trainer = make_trainer(strategy=dpx.DPXStrategy(execution=execution), devices=2)
    torch.manual_seed(0)
    model = CollectsOnTheHost()
    trainer.fit(model, make_loader(53), make_loader(53))
    assert {output.device.type for output in model.outputs} == {"cpu"}
    one_device = torch.cat(fitted(CollectsOnTheHost).outputs)
    assert_equal({"outputs": torch.cat(model.outputs)}, {"outputs": one_device})
    trainer.predict(model, make_loader(20))  # Lightning itself moves what it returns to the host
    assert model.predicted_on == {"host": "cpu", "device": trainer.strategy.root_device.type}


class KeepsATeacher(Classifier):
    """A teacher in a list, which stays out of checkpoints and follows the module after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [copy.deepcopy(self.net).requires_grad_(False)]
        self.scales = {"loss": torch.ones(3)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        target = self.hidden[0].to(self.device)(batch[0])
        scale = self.scales["loss"].to(self.device).sum()
        return F.cross_entropy(logits, batch[1]) + scale * F.mse_loss(logits, target)

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales["loss"].mul_(0.9)
        self.average()

    def average(self) -> None:
        with torch.no_grad():
            for kept, trained in zip(self.hidden[0].parameters(), self.net.parameters(), strict=True):
                kept.lerp_(trained.to(kept.device), 0.2)


class AveragesSilently(KeepsATeacher):
    def average(self) -> None:
        for kept, trained in zip(self.hidden[0].parameters(), self.net.parameters(), strict=True):
            kept.data = kept.data * 0.8 + trained.data.to(kept.device) * 0.2


class MadeLate(KeepsATeacher):
    def on_fit_start(self) -> None:
        self.hidden = [copy.deepcopy(self.net)]


class ScalesSilently(KeepsATeacher):
    """Writes an attribute, and a tensor in a dict, through ``.data``, which nothing counts."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.ones(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.temperature.to(self.device).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.temperature.data.mul_(0.8)
        self.scales["loss"].data.mul_(0.9)
        self.average()


@pytest.mark.parametrize("kind", [KeepsATeacher, AveragesSilently, MadeLate, ScalesSilently])
def test_a_teacher_in_a_list_and_tensors_in_a_dict_are_followed(kind: type[Classifier], execution: str) -> None:
    ours = fitted(kind, strategy=dpx.DPXStrategy(execution=execution), devices=3)
    one = fitted(kind)
    assert_equal(dict(ours.state_dict()), dict(one.state_dict()))
    assert_equal(dict(ours.hidden[0].cpu().state_dict()), dict(one.hidden[0].state_dict()))
    torch.testing.assert_close(ours.scales["loss"], one.scales["loss"])


class Labeled(torch.Tensor):
    """Names its columns, as libraries of physics do: its methods look for them, and ``detach`` forgets them."""

    labels: tuple[str, ...]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved: Any = super().to(*args, **kwargs)
        moved.labels = self.labels
        return moved

    def column(self, label: str) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)[:, self.labels.index(label)]


def labeled(rows: torch.Tensor) -> Labeled:
    made: Any = rows.as_subclass(Labeled)
    made.labels = ("x", "y")
    return made


class KeepsLabeled(Classifier):
    """One is there from the beginning, one comes from a hook, and a list gets one of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.points: Any = labeled(torch.ones(3, 2))
        self.by_epoch: list[Any] = []

    def on_train_epoch_start(self) -> None:
        self.points = labeled(torch.full((3, 2), 1.0 + self.current_epoch, device=self.device))
        self.by_epoch.append(self.points)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss * self.points.column("y").mean() * self.by_epoch[-1].column("x").mean()


def test_tensors_of_a_class_with_attributes_keep_both_on_every_replica(execution) -> None:
    ours = fitted(KeepsLabeled, strategy=dpx.DPXStrategy(execution=execution), devices=3)
    assert_equal(dict(ours.state_dict()), dict(fitted(KeepsLabeled).state_dict()))


class Cumulative:
    """Keeps rows in lists that it makes with the first batch, as metrics of several libraries do."""

    def __init__(self) -> None:
        self.kept: list[list[torch.Tensor]] | None = None

    def extend(self, *batches: torch.Tensor) -> None:
        if self.kept is None:
            self.kept = [[] for _ in batches]
        for rows, batch in zip(self.kept, batches, strict=True):
            rows.extend(part[0] for part in torch.split(batch, 1))


class KeepsRows(Classifier):
    """Rows of an epoch, which its end looks at and forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = Cumulative()
        self.epochs = list[list[list[float]]]()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metric.extend(batch[0][:, 0], batch[1])

    def on_validation_epoch_end(self) -> None:
        assert self.metric.kept is not None
        self.epochs.append([torch.stack(rows).tolist() for rows in self.metric.kept])
        self.metric.kept = None


# Three simulated devices find slices of two and one row to differ, and run whole: that is announced.
def test_lists_that_a_step_makes_after_their_owner_was_reset_have_the_rows_of_all() -> None:
    model = KeepsRows()
    loader = make_loader(num_rows=7, batch_size=3)
    strategy = dpx.DPXStrategy(execution="inline", verify="first")
    trainer = make_trainer(strategy=strategy, devices=2, max_epochs=3, num_sanity_val_steps=0)
    trainer.fit(model, loader, loader)
    rows, labels = loader.dataset.tensors  # type: ignore[attr-defined]
    assert model.epochs == [[rows[:, 0].tolist(), labels.tolist()]] * 3
