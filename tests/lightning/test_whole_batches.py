"""What cannot be cut goes whole to the first replica, in every stage, and is then equal to one device."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.lightning.whole_batches import WholeBatches
from tests.conftest import StepsByHand, assert_equal, make_trainer

WHOLE = "gets a batch whole, on the first replica"


class Scored(LightningModule):
    """Logs and returns, in every stage, something of every row of a batch, which :meth:`rows` finds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.seen: list[int] = []

    def rows(self, batch: Any) -> torch.Tensor:
        return batch

    def scores(self, batch: Any) -> torch.Tensor:
        return self.net(self.rows(batch)).squeeze(1)

    def loss(self, batch: Any, name: str) -> torch.Tensor:
        scores = self.scores(batch)
        loss = (scores - 1).square().mean()
        self.log(name, loss, on_step=False, on_epoch=True, batch_size=len(scores))
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.scores(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def tensor(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(10 * rows + seed))


def outcome(model: LightningModule, batches: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Weights, logged values and predictions of a fit, a test and a prediction."""
    loader = DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)
    seen, trainer = {}, make_trainer(max_epochs=1, **options)
    trainer.fit(model, loader, loader)
    seen.update(trainer.callback_metrics)
    trainer.test(model, loader, verbose=False)
    seen.update(trainer.callback_metrics)
    predictions = torch.cat([part.cpu() for part in trainer.predict(model, loader)])
    seen.update(model.state_dict(), predictions=predictions)
    return {name: value.detach().cpu().clone() for name, value in seen.items()}


class Ragged(Scored):
    def rows(self, batch: Any) -> torch.Tensor:
        return torch.cat(batch)


class Detection(Scored):
    def rows(self, batch: Any) -> torch.Tensor:
        images, targets = batch
        return torch.stack(
            [image.mean(0) + target["box"].sum(0) for image, target in zip(images, targets, strict=True)]
        )


class Box:
    """An object that nobody knows."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def to(self, device: Any, **_: Any) -> "Box":
        return Box(self.rows.to(device))


class Boxed(Scored):
    def rows(self, batch: Any) -> torch.Tensor:
        return batch.rows


class Shifted(Scored):
    def rows(self, batch: Any) -> torch.Tensor:
        return batch["x"] + batch["shift"]


class Counted(Scored):
    def rows(self, batch: Any) -> torch.Tensor:
        count = batch if isinstance(batch, int) else batch["count"]
        return tensor(count).to(self.device)


def boxes(*counts: int) -> list[dict[str, torch.Tensor]]:
    return [{"box": tensor(count)} for count in counts]


FALLBACKS: dict[str, tuple[type[Scored], list[Any], str]] = {
    "ragged": (Ragged, [[tensor(2), tensor(5)], [tensor(4), tensor(1), tensor(3)]], "do not agree"),
    "detection": (
        Detection,
        [([tensor(2), tensor(5)], boxes(1, 3)), ([tensor(3), tensor(4), tensor(2)], boxes(2, 1, 0))],
        "one item per row",
    ),
    "object": (Boxed, [Box(tensor(4)), Box(tensor(6))], r"\(Box\) cannot be cut"),
    "one row": (Shifted, [{"x": tensor(6), "shift": tensor(1)}, {"x": tensor(4), "shift": tensor(4)}], "shift .*: 1"),
    "int": (Counted, [4, 6], r"\(int\) has a batch dim"),
    "ints": (Counted, [{"count": 4}, {"count": 6}], r"\(dict\) has a batch dim"),
}  # fmt: skip


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize(("devices", "execution"), [(2, "inline"), (3, "threads")])
@pytest.mark.parametrize("name", FALLBACKS)
def test_a_batch_that_cannot_be_cut_does_in_every_stage_what_it_does_on_one_device(
    name: str, devices: int, execution: str
) -> None:
    kind, batches, message = FALLBACKS[name]
    with pytest.warns(UserWarning, match=rf"(?s){WHOLE}.*{message}.*batch_slicer") as told:
        ours = outcome(kind(), batches, strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=devices)
    stages = [str(one.message).split()[1] for one in told if WHOLE in str(one.message)]
    assert stages == ["validation_step", "training_step", "test_step", "predict_step"]
    assert_equal(ours, outcome(kind(), batches))


class Several(Scored):
    """Looks at all rows of a batch of any number of sizes."""

    def rows(self, batch: Any) -> torch.Tensor:
        self.seen.append(len(batch["x"]))
        return batch["x"] + (0 if batch.get("more") is None else batch["more"].mean(0))


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("options", [{}, {"reducer": "colocate"}, {"on_oom": "replan"}], ids=str)
def test_only_the_batch_that_cannot_be_cut_is_whole_and_gradients_add_up_over_both_kinds(
    options: Any, execution: str
) -> None:
    cut, whole = {"x": tensor(8)}, {"x": tensor(6, 1), "more": tensor(3)}
    batches = [cut, whole, {"x": tensor(8, 2)}, {"x": tensor(4), "more": tensor(7)}, whole]
    model, theirs = Several(), outcome(Several(), batches, accumulate_grad_batches=2)
    strategy = dpx.DPXStrategy(execution=execution, verify="off", **options)  # it counts what replicas see
    with pytest.warns(UserWarning, match=WHOLE):
        ours = outcome(model, batches, strategy=strategy, devices=2, accumulate_grad_batches=2)
    assert_equal(ours, theirs)


class ByHand(StepsByHand, Several):
    pass


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("reducer", ["auto", "colocate"])
def test_manual_optimization_of_batches_of_both_kinds(reducer: str, execution: str) -> None:
    batches = [{"x": tensor(8)}, {"x": tensor(6), "more": tensor(3)}, {"x": tensor(8)}]
    strategy = dpx.DPXStrategy(execution=execution, verify="off", reducer=reducer)
    with pytest.warns(UserWarning, match=WHOLE):
        ours = outcome(ByHand(), batches, strategy=strategy, devices=2)
    assert_equal(ours, outcome(ByHand(), batches))


@pytest.mark.filterwarnings("ignore:.*gets a batch whole", "ignore:.*no `val_dataloader`")
def test_several_loaders_are_cut_together_where_they_agree(execution: str) -> None:
    class SemiSupervised(Scored):
        def rows(self, batch: Any) -> torch.Tensor:
            self.seen.append(len(batch[0][0]))
            return batch[0][0] + batch[1][0]

    def fitted(second: int, **options: Any) -> tuple[SemiSupervised, dict[str, torch.Tensor]]:
        loaders = [DataLoader([[tensor(6), tensor(6, 1)]], None), DataLoader([[tensor(second), tensor(second)]], None)]
        model = SemiSupervised()
        make_trainer(max_epochs=1, **options).fit(model, CombinedLoader(loaders, "max_size"))
        return model, dict(model.state_dict())

    for second, seen in ((6, [3, 3]), (1, [6])):
        strategy = dpx.DPXStrategy(verify="off", execution=execution)
        (model, ours), (_, theirs) = fitted(second, strategy=strategy, devices=2), fitted(second)
        assert model.seen == seen
        assert_equal(ours, theirs)


class FetchesItself(Scored):
    """Takes the iterator of its loader, in every stage."""

    def fetched(self, dataloader_iter: Any, name: str) -> torch.Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch.to(self.device), name)

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        return self.fetched(dataloader_iter, "train")

    def validation_step(self, dataloader_iter: Any) -> None:
        self.fetched(dataloader_iter, "val")

    def test_step(self, dataloader_iter: Any) -> None:
        self.fetched(dataloader_iter, "test")

    def predict_step(self, dataloader_iter: Any) -> torch.Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.scores(batch.to(self.device))


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (1, {"memory_budget": "1GiB"}),
        (2, {"execution": "inline"}),
        (3, {"execution": "threads"}),
        (2, {"execution": "inline", "reducer": "colocate"}),
        (2, {"execution": "inline", "memory_budget": "1GiB"}),
        (2, {"execution": "inline", "on_oom": "replan"}),
    ],
    ids=str,
)
def test_a_step_that_takes_dataloader_iter_runs_alone_on_the_first_replica(devices: int, options: Any) -> None:
    batches = [tensor(6), tensor(4), tensor(6, 1)]
    theirs = outcome(FetchesItself(), batches)
    if devices == 1:
        ours = outcome(FetchesItself(), batches, strategy=dpx.DPXStrategy(**options), devices=1)
    else:
        with pytest.warns(UserWarning, match=rf"{WHOLE}.*dataloader_iter\) fetches its batches itself"):
            ours = outcome(FetchesItself(), batches, strategy=dpx.DPXStrategy(**options), devices=devices)
    assert_equal(ours, theirs)


class Untouchable:
    """A batch that fails if anybody looks into it; moving it is all that one device does."""

    def __init__(self, rows: torch.Tensor) -> None:
        object.__setattr__(self, "_rows", rows)

    def to(self, *_: Any, **__: Any) -> "Untouchable":
        return self

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("walked over")

    def __len__(self) -> int:
        raise AssertionError("counted")


class Looks(Scored):
    def rows(self, batch: Any) -> torch.Tensor:
        return object.__getattribute__(batch, "_rows")


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("options", [{}, {"batch_dim": {"nothing of that name": 1}}], ids=str)
def test_merged_replicas_never_ask_how_a_batch_could_be_cut(devices: int, options: Any) -> None:
    batches = [Untouchable(tensor(4)), Untouchable(tensor(6))]
    ours = outcome(Looks(), batches, strategy=dpx.DPXStrategy(**options), devices=devices)
    assert_equal(ours, outcome(Looks(), batches), bitwise=True)


@pytest.mark.parametrize("devices", [1, 2])
def test_merged_replicas_plan_for_batches_that_nobody_can_cut(devices: int) -> None:
    batches = [[tensor(2), tensor(5)], [tensor(3)]]
    ours = outcome(Ragged(), batches, strategy=dpx.DPXStrategy(verify="off", memory_budget="1GiB"), devices=devices)
    assert_equal(ours, outcome(Ragged(), batches))


class Packed(Scored):
    def rows(self, batch: PackedSequence) -> torch.Tensor:
        rows = unpack_sequence(batch)
        self.seen.append(len(rows))
        return torch.stack([row.mean(0) for row in rows])


@pytest.mark.usefixtures("hardware")
def test_packed_sequences_are_cut_and_equal_to_one_device(execution: str) -> None:
    batches = [pack_sequence([tensor(n) for n in lengths], enforce_sorted=False) for lengths in ([1, 4, 2, 3], [5, 1])]
    model = Packed()
    ours = outcome(model, batches, strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=2)
    assert max(model.seen) == 2
    assert_equal(ours, outcome(Packed(), batches))


class Weighted(Scored):
    """Logs without a batch size; Lightning counts one row, that of the first tensor."""

    def rows(self, batch: Any) -> torch.Tensor:
        return batch["x"] * batch["weight"]

    def loss(self, batch: Any, name: str) -> torch.Tensor:
        loss = self.scores(batch).square().mean()
        self.log(name, loss, on_step=False, on_epoch=True)
        return loss


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_logged_means_weigh_a_batch_as_on_one_device(execution: str) -> None:
    batches = [{"weight": torch.tensor(0.5), "x": tensor(8)}, {"weight": torch.tensor(2.0), "x": tensor(4)}]
    ours = outcome(Weighted(), batches, strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=2)
    assert_equal(ours, outcome(Weighted(), batches))


@pytest.mark.usefixtures("hardware")
def test_a_batch_of_too_few_rows_for_two_replicas_is_not_announced() -> None:
    batches = [{"x": tensor(1), "box": Box(tensor(1))}]
    ours = outcome(Several(), batches, strategy=dpx.DPXStrategy(verify="off", execution="inline"), devices=2)
    assert_equal(ours, outcome(Several(), batches))


class SlicesItself(Detection):
    def slice_batch(self, batch: Any, sizes: Any) -> list[Any]:
        images, targets = map(iter, batch)
        return [([next(images) for _ in range(n)], [next(targets) for _ in range(n)]) for n in sizes]

    def rows(self, batch: Any) -> torch.Tensor:
        self.seen.append(len(batch[0]))
        return super().rows(batch)


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("as_argument", [True, False])
def test_what_cannot_be_cut_for_certain_is_cut_by_a_slicer_of_the_user(as_argument: bool, execution: str) -> None:
    batches = FALLBACKS["detection"][1]
    model = SlicesItself()
    slicer = model.slice_batch if as_argument else None
    ours = outcome(
        model, batches, strategy=dpx.DPXStrategy(verify="off", execution=execution, batch_slicer=slicer), devices=2
    )
    assert max(model.seen) == 2
    assert_equal(ours, outcome(Detection(), batches))


def test_errors_of_a_slicer_end_the_run_with_a_note() -> None:
    def fails(batch: Any, sizes: Any) -> Any:
        raise KeyError("images")

    strategy = dpx.DPXStrategy(verify="off", execution="inline", batch_slicer=fails)
    with pytest.raises(KeyError, match="images") as caught:
        outcome(Scored(), [tensor(4)], strategy=strategy, devices=2)
    assert any("In batch_slicer, for a Tensor and sizes [2, 2]" in note for note in caught.value.__notes__)


def test_what_is_no_slicer_of_batches_is_refused() -> None:
    with pytest.raises(dpx.ConfigurationError, match="batch_slicer is 3, which is not allowed"):
        dpx.DPXStrategy(verify="off", batch_slicer=3)


def test_a_stage_that_gets_all_batches_whole_says_so_once() -> None:
    whole = WholeBatches()
    with pytest.warns(UserWarning, match="gets all of its batches whole.*It differs. Use another loss"):
        whole.give_whole("training_step", "It differs.", "Use another loss.")
    whole.give_whole("training_step", "It differs.", "Use another loss.")  # a second warning would be an error
    assert (whole.reason_for("training_step"), whole.reason_for("test_step")) == ("It differs.", None)


def test_on_one_device_it_says_that_a_batch_is_not_cut_into_micro_batches() -> None:
    whole = WholeBatches(1)
    advice = "For all devices to take part, let it take a batch."
    expected = "gets a batch whole, in one piece, M = 1: It fetches. For micro-batches, let it take a batch."
    with pytest.warns(UserWarning, match=expected):
        whole.announce_batch("training_step", "It fetches.", advice, "fetches")


@pytest.mark.parametrize("stage", ["training_step", "validation_step"])
def test_a_stage_that_gets_all_batches_whole_runs_on_the_first_replica(stage: str) -> None:
    class Given(Several):
        def on_fit_start(self) -> None:
            self.trainer.strategy.session.whole_batches.give_whole(stage, "It differs.")

    model, loader = Given(), DataLoader([{"x": tensor(6)}], None)
    trainer = make_trainer(
        max_epochs=1, num_sanity_val_steps=0, strategy=dpx.DPXStrategy(verify="off", execution="inline"), devices=2
    )
    with pytest.warns(UserWarning, match=f"{stage} gets all of its batches whole"):
        trainer.fit(model, loader, loader)
    assert model.seen == ([6, 3, 3] if stage == "training_step" else [3, 3, 6])


class SortsByLabel(Scored):
    """Counts what it sees in every way, and returns rows by label, which not every slice has all of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_rows", torch.zeros((), dtype=torch.long))
        self.calls = 0
        self.sum = 0
        self.by_kind = {"rows": 0}
        self.labels: Counter[int] = Counter()
        self.per_loader = [0, 0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows, labels = batch
        self.calls += 1
        self.sum += len(rows)
        self.by_kind["rows"] += len(rows)
        self.labels.update(labels.tolist())
        self.per_loader[0] += len(rows)
        self.num_rows += len(rows)
        self.seen.append(len(rows))
        by_label = {int(label): rows[labels == label] for label in labels.unique()}
        return {"loss": self.loss(rows, "train"), "rows": by_label}

    validation_step = LightningModule.validation_step


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_training_step_whose_outputs_come_apart_in_a_later_batch_runs_on_the_whole_batch(
    options: Any, micro_batches: int, execution: str
) -> None:
    labels = torch.zeros(36, dtype=torch.long)
    labels[18:20] = 1  # in one slice of the second batch
    loader = DataLoader(TensorDataset(tensor(36), labels), 12)
    one = SortsByLabel()
    make_trainer(**options).fit(one, loader)
    ours = SortsByLabel()
    strategy = dpx.DPXStrategy(execution=execution, micro_batches=micro_batches)
    with pytest.warns(UserWarning, match="training_step gets all of its batches whole.*different keys for result.rows"):
        make_trainer(devices=2, strategy=strategy, **options).fit(ours, loader)
    assert (ours.calls, ours.sum, int(ours.num_rows)) == (one.calls, one.sum, int(one.num_rows))
    assert ours.seen == one.seen
    assert ours.by_kind == one.by_kind
    assert ours.labels == one.labels
    assert ours.per_loader == one.per_loader
    assert_equal(ours.state_dict(), one.state_dict())


class SortsByHand(SortsByLabel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.returned: list[set[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(output["loss"])
        optimizer.step()
        return output

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned.append(set(outputs["rows"]))


def test_a_step_by_hand_whose_outputs_come_apart_has_trained_and_has_later_batches_whole(execution: str) -> None:
    labels = torch.zeros(36, dtype=torch.long)
    labels[18:20] = 1  # in one slice of the second batch
    loader = DataLoader(TensorDataset(tensor(36), labels), 12)
    one = SortsByHand()
    make_trainer().fit(one, loader)
    ours = SortsByHand()
    strategy = dpx.DPXStrategy(execution=execution, verify="off")
    with pytest.warns(UserWarning, match=r"different keys for result.rows.*gets what the first slice returned"):
        make_trainer(devices=2, strategy=strategy).fit(ours, loader)
    assert ours.returned[2:] == one.returned[2:]
    assert_equal(ours.net.state_dict(), one.net.state_dict())


class BeginsAgain(Scored):
    """Counts rows up to 20, and steps."""

    validation_step = LightningModule.validation_step

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.count = 0
        self.rows_seen = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        self.count += len(batch)
        self.rows_seen.update(len(batch))
        self.seen.append(len(batch))
        if self.count >= 20:
            self.count -= self.count
        return self.loss(batch, "train")


class BeginsAgainInBuffer(BeginsAgain):
    def __init__(self) -> None:
        super().__init__()
        del self.count
        self.register_buffer("count", torch.zeros(()))


@pytest.mark.parametrize("kind", [BeginsAgain, BeginsAgainInBuffer])
def test_a_count_that_begins_again_does_so_by_all_rows(kind: Any, execution: str) -> None:
    loader = DataLoader(tensor(40), 8)  # type: ignore[arg-type]
    one = kind()
    make_trainer().fit(one, loader)
    ours = kind()
    with pytest.warns(UserWarning, match=r"gets all of its batches whole.*self\.count has counted rows until now"):
        make_trainer(devices=2, strategy=dpx.DPXStrategy(execution=execution)).fit(ours, loader)
    assert (ours.calls, ours.count, ours.seen) == (one.calls, one.count, one.seen)
    assert ours.rows_seen.compute() == one.rows_seen.compute()
    assert_equal(ours.state_dict(), one.state_dict())


class GoesRoundARing(BeginsAgain):
    """Counts rows from 0 again and again, as the pointer of a queue; in one of 8 two steps of 5 rows look alike."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.pointer[0] = (self.pointer + len(batch)) % self.size
        return self.loss(batch, "train")


@pytest.mark.parametrize(("size", "seen"), [(8, "has counted rows until now, and comes"), (9, "a whole number, comes")])
def test_the_pointer_of_a_ring_begins_again_by_all_rows(size: int, seen: str, execution: str) -> None:
    loader = DataLoader(tensor(30), 6)  # type: ignore[arg-type]
    one = GoesRoundARing(size)
    make_trainer(max_epochs=1).fit(one, loader)
    ours = GoesRoundARing(size)
    strategy = dpx.DPXStrategy(execution=execution)
    with pytest.warns(UserWarning, match=rf"whole, on the first .*self\.pointer,? {seen} together"):
        make_trainer(max_epochs=1, devices=2, strategy=strategy).fit(ours, loader)
    assert_equal(ours.state_dict(), one.state_dict())


class SecondOrder(torch.optim.SGD):
    """Divides gradients by the diagonal of the Hessian, which it takes from the graph that backward has left."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        curvatures = torch.autograd.grad(gradients, parameters, [torch.ones_like(one) for one in gradients])
        for parameter, gradient, curvature in zip(parameters, gradients, curvatures, strict=True):
            parameter.grad = gradient.detach() / (1 + curvature.abs())
        super().step()
        return loss


class KeepsTheGraph(Scored):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward(create_graph=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SecondOrder(self.parameters(), lr=0.1)


def check_trains_on_whole_batches(make: Callable[[], LightningModule], told: str) -> None:
    """Two replicas tell of it with the text ``told``, and have the weights of one device."""
    loader = DataLoader(tensor(48), 16)
    expected = make()
    make_trainer(max_epochs=2).fit(expected, loader, loader)
    model = make()
    strategy = dpx.DPXStrategy(execution="inline")
    with pytest.warns(UserWarning, match=told):
        make_trainer(max_epochs=2, strategy=strategy, devices=2).fit(model, loader, loader)
    assert_equal(dict(model.state_dict()), dict(expected.state_dict()))


@pytest.mark.filterwarnings("ignore:Using backward")  # torch's own about create_graph=True
def test_gradients_with_a_graph_are_those_of_the_whole_batch() -> None:
    check_trains_on_whole_batches(KeepsTheGraph, "creates a graph of the gradients")


class Membrane(nn.Module):
    """Its class resets all of its instances at once, as a library of spiking networks does."""

    instances: ClassVar[list["Membrane"]] = []

    def __init__(self) -> None:
        super().__init__()
        self.potential: Any = 0.0
        self.instances.append(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.potential = self.potential * 0.5 + rows
        return self.potential


class ResetByClass(Scored):
    def __init__(self) -> None:
        super().__init__()
        self.membrane = Membrane()

    def scores(self, batch: Any) -> torch.Tensor:
        for instance in Membrane.instances:
            instance.potential = 0.0
        for _ in range(2):
            potential = self.membrane(super().scores(batch))
        return potential


def test_modules_that_code_finds_by_their_class_have_whole_batches() -> None:
    check_trains_on_whole_batches(ResetByClass, r"listed in Membrane\.instances")


SCALES: dict[nn.Module, float] = {}


class WeighsById(Scored):
    """Decays its parameters by how much their ids say; those of another copy are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.decays = {id(parameter): 0.1 for parameter in self.parameters()}

    def scores(self, batch: Any) -> torch.Tensor:
        decays = [self.decays.get(id(one), 0.0) * one.square().sum() for one in self.parameters()]
        return super().scores(batch) + sum(decays)


class ScaledByKey(Scored):
    """Looks its layers up in a dict that all copies share."""

    def __init__(self) -> None:
        super().__init__()
        SCALES.clear()
        SCALES.update(dict.fromkeys(self.children(), 3.0))

    def scores(self, batch: Any) -> torch.Tensor:
        scales = [SCALES.get(child, 1.0) for child in self.children()]
        return super().scores(batch) * scales[0]


@pytest.mark.parametrize(("kind", "told"), [(WeighsById, r"looked up in self\.decays"), (ScaledByKey, "in SCALES")])
def test_parts_that_are_looked_up_by_who_they_are_have_whole_batches(kind: type[Scored], told: str) -> None:
    """Of another copy nothing is found there: numbers were wrong without a word, as no copy was right."""
    check_trains_on_whole_batches(kind, told)


class ShrinksWhatABufferViews(Scored):
    """Decays its weights in its forward; a buffer is a view of some of them."""

    def __init__(self) -> None:
        super().__init__()
        weight = next(self.parameters())
        self.register_buffer("first", weight.data[:, :2])

    def scores(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            next(self.parameters()).mul_(0.9)
        return super().scores(batch)


def test_a_check_puts_back_parameters_of_which_a_buffer_is_a_view() -> None:
    check_trains_on_whole_batches(ShrinksWhatABufferViews, "writes parameter")
