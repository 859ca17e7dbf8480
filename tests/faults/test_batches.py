"""Faults of batches: cases 19 to 30 of the promises, by number."""

import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import lightning_dpx as dpx
from lightning_dpx.replicas.slicing import batch_size, slice_batch
from tests.conftest import SIMULATED, assert_equal, make_loader, make_trainer, places

pytestmark = pytest.mark.usefixtures("hardware")


class Plain(LightningModule):
    """Rows (B, 8), with ``loss`` to be said by subclasses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, 3)

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(*given: Any) -> DataLoader[Any]:
    """A loader of these very batches."""
    return DataLoader(list(given), batch_size=None, collate_fn=lambda batch: batch)


def rows_and_labels(num_rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, 8, generator=generator), torch.randint(3, (num_rows,), generator=generator)


def fitted(model: LightningModule, loader: Any, devices: int = 0, **options: Any) -> dict[str, torch.Tensor]:
    """The weights after an epoch on so many replicas, or without the strategy."""
    ours = {"strategy": dpx.DPXStrategy(**options), "devices": devices} if devices else {}
    make_trainer(max_epochs=1, **ours).fit(model, loader)
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(8), self.net)


@pytest.mark.parametrize("buffers", ["broadcast", "mean"])
def test_case_19_replicas_without_rows_have_no_part_in_the_buffers(buffers: str, execution: str) -> None:
    full, short = rows_and_labels(16), rows_and_labels(4)  # of four replicas with usually 4 rows two are idle
    fitted(model := Normed(), batches(full, short), 4, buffers=buffers, execution=execution)
    quarters, halves = (
        torch.stack([part.mean(0) for part in rows.split(size)]) for (rows, _), size in ((full, 4), (short, 2))
    )
    first, second = (means[0] if buffers == "broadcast" else means.mean(0) for means in (quarters, halves))
    torch.testing.assert_close(model.net[0].running_mean.cpu(), 0.9 * 0.1 * first + 0.1 * second)
    assert model.net[0].num_batches_tracked == 2


@pytest.mark.filterwarnings("ignore:.*gets a batch whole")
@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(4, 8), torch.ones(0, 3)),
        (torch.ones(0, 8), torch.ones(0, dtype=torch.long)),
        ([], []),
        {},
    ],
)
def test_case_20_empty_batches_do_what_they_do_on_one_device(batch: Any, execution: str) -> None:
    outcomes = []
    for devices in (0, 2):
        try:
            outcomes.append(fitted(Plain(), batches(batch), devices, **({"execution": execution} if devices else {})))
        except Exception as error:  # noqa: BLE001  whatever it is
            outcomes.append(type(error))
    theirs, ours = outcomes
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, equal_nan=True)
    else:
        assert ours is theirs


def test_case_20_an_empty_tensor_may_be_given_whole() -> None:
    class Extra(Plain):
        def loss(self, batch: Any) -> torch.Tensor:
            assert batch[2].shape == (0, 3)
            return super().loss(batch) + batch[2].sum()

    loader = batches((*rows_and_labels(), torch.ones(0, 3)))
    assert_equal(fitted(Extra(), loader, 2, execution="inline", batch_dim={"2": -1}), fitted(Extra(), loader))


class Summed(Plain):
    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum") / 16


@pytest.mark.parametrize("rows", [8, 13, 3])
@pytest.mark.parametrize(("kind", "reduction"), [(Plain, "mean"), (Summed, "sum")])
def test_case_21_unequal_shares_give_the_gradient_of_the_whole_batch(
    kind: type[Plain], reduction: str, rows: int, execution: str
) -> None:
    loader = batches(rows_and_labels(rows))
    options = {"loss_reduction": reduction, "workload": [7, 1], "execution": execution}
    assert_equal(fitted(kind(), loader, 2, **options), fitted(kind(), loader))


@pytest.mark.filterwarnings("ignore:training_step returned None")
def test_case_21_a_sum_that_some_replicas_skip() -> None:
    class SomeSkip(Summed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if self.global_rank == 1 else self.loss(batch)

    rows, labels = rows_and_labels(8)
    options = {"loss_reduction": "sum", "execution": "inline", "verify": "off"}
    ours = fitted(SomeSkip(), batches((rows, labels)), 2, **options)
    assert_equal(ours, fitted(Summed(), batches((rows[:4], labels[:4]))))


def test_case_22_an_input_of_another_size_is_named_and_may_be_given_whole(execution: str) -> None:
    class Table(Plain):
        def loss(self, batch: Any) -> torch.Tensor:
            assert batch["extra"]["table"].shape == (5, 3)
            return F.cross_entropy(self.net(batch["x"]) @ batch["extra"]["table"][:3], batch["y"])

    rows, labels = rows_and_labels()
    loader = batches({"x": rows, "y": labels, "extra": {"table": torch.eye(5, 3)}})
    with pytest.warns(UserWarning, match=r"x .*: 8; extra\.table .*: 5.*batch_dim=\{'extra\.table': -1\}"):
        whole = fitted(Table(), loader, 2, execution=execution)
    assert_equal(whole, fitted(Table(), loader))
    ours = fitted(Table(), loader, 2, execution=execution, batch_dim={"extra.table": -1})
    assert_equal(ours, fitted(Table(), loader))


class Encoding(UserDict[str, Any]):
    """As a tokenizer returns."""


@dataclasses.dataclass
class Derived:
    image: torch.Tensor
    total: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.total = self.image.sum(1)


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: torch.Tensor
    names: tuple[str, ...]


Pair = namedtuple("Pair", "image label")


@pytest.mark.host
@pytest.mark.parametrize(
    ("batch", "rows_of"),
    [
        (Encoding(image=torch.arange(5.0), names=list("abcde")), lambda b: (b["image"], b["names"])),
        (Derived(torch.arange(5.0)[:, None]), lambda b: (b.image[:, 0], b.total)),
        (Frozen(torch.arange(5.0), tuple("abcde")), lambda b: (b.image, b.names)),
        (Pair(torch.arange(5.0), [0, 1, 2, 3, 4]), lambda b: (b.image, b.label)),
        ((torch.arange(5.0), [None] * 5), lambda b: b),
    ],
)
def test_case_23_containers_keep_type_and_alignment(batch: Any, rows_of: Any) -> None:
    parts = slice_batch(batch, [3, 2])
    assert all(type(part) is type(batch) for part in parts)
    for item in range(2):
        assert [row for part in parts for row in rows_of(part)[item]] == list(rows_of(batch)[item])


class Box:
    """An object that nobody knows."""

    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.host
@pytest.mark.parametrize(
    ("kind", "second"),
    [
        ("dicts", [{"id": number} for number in range(5)]),
        ("objects", [Box(number) for number in range(5)]),
        ("arrays", np.arange(5)),
        ("lists", [[number, number] for number in range(5)]),
        ("boxes", [torch.full((number + 1, 4), float(number)) for number in range(5)]),
    ],
)
def test_case_23_one_item_per_row_is_cut_or_refused_but_never_misaligned(kind: str, second: Any) -> None:
    try:
        batch = torch.arange(5), second
        assert batch_size(batch) == 5
        parts = slice_batch(batch, [3, 2])
    except dpx.SliceError:
        return
    assert [len(part) for _, part in parts] == [3, 2], kind


@pytest.mark.host
@pytest.mark.parametrize("layout", ["coo", "csr", "strided", "jagged"])
@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors).*:UserWarning")
def test_case_23_sparse_and_nested_tensors_are_cut_or_refused_by_name(layout: str) -> None:
    if layout in ("coo", "csr"):
        odd = torch.eye(4).to_sparse(layout=getattr(torch, f"sparse_{layout}"))
    else:
        rows = [torch.full((count, 2), float(count)) for count in (1, 2, 3, 4)]
        odd = torch.nested.nested_tensor(rows, layout=getattr(torch, layout))
    batch = {"rows": torch.arange(4), "odd": odd}
    try:
        assert batch_size(batch) == 4
        parts = slice_batch(batch, [3, 1])
    except dpx.SliceError as error:
        assert "odd" in str(error)  # noqa: PT017  both outcomes are promised
        return
    assert parts[0]["odd"].size(0) == 3
    last = parts[1]["odd"].to_dense()[0] if layout in ("coo", "csr") else parts[1]["odd"].unbind()[0]
    torch.testing.assert_close(last, torch.eye(4)[3] if layout in ("coo", "csr") else rows[3])


def test_case_24_scalars_and_odd_strides_arrive_as_on_one_device(execution: str) -> None:
    class Odd(Plain):
        def loss(self, batch: Any) -> torch.Tensor:
            rows, labels, weight, temperature = batch
            assert {rows.device, labels.device, weight.device} == {self.device}
            assert (weight.ndim, temperature) == (0, 2.0)
            return F.cross_entropy(self.net(rows) / temperature, labels) * weight

    rows, labels = rows_and_labels(8)
    loader = batches((rows.t().contiguous().t(), labels.repeat_interleave(2)[::2], torch.tensor(0.5), 2.0))
    assert_equal(fitted(Odd(), loader, 3, execution=execution), fitted(Odd(), loader))


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_case_24_batches_that_are_on_a_device_already(hardware: str, execution: str) -> None:
    if hardware == "cpu":
        pytest.skip("one memory")
    rows, labels = rows_and_labels(8)
    here, there = (rows.to("sim:1"), labels.to("sim:1")), (rows.to("sim:0"), labels.to("sim:2"))
    ours = fitted(Plain(), batches(here, there), 3, execution=execution)
    assert_equal(ours, fitted(Plain(), batches((rows, labels), (rows, labels))))


class TimeMajor(Plain):
    """Rows (8, B), labels (B,)."""

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.net(batch["x"].t()), batch["y"])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"time major": batch["x"] * 2, "rows": self.net(batch["x"].t())}


@pytest.mark.parametrize("num_rows", [16, 13])  # 16: every slice of two has as many rows as there are time steps
def test_case_25_time_major_batches_train_and_predict_as_on_one_device(num_rows: int, execution: str) -> None:
    rows, labels = rows_and_labels(num_rows)
    loader = batches({"x": rows.t().contiguous(), "y": labels})
    options = {"execution": execution, "batch_dim": {"x": 1}}
    assert_equal(fitted(TimeMajor(), loader, 2, **options), fitted(TimeMajor(), loader))


@pytest.mark.parametrize("num_rows", [16, 12, 13])  # 16: every slice of two has as many rows as there are time steps
def test_case_25_time_major_predictions_are_those_of_one_device_or_refused(num_rows: int) -> None:
    rows, labels = rows_and_labels(num_rows)
    loader = batches({"x": rows.t().contiguous(), "y": labels})
    strategy = dpx.DPXStrategy(execution="inline", batch_dim={"x": 1})
    try:
        (ours,) = make_trainer(strategy=strategy, devices=2).predict(TimeMajor(), loader)
    except dpx.GatherError:
        return
    torch.testing.assert_close(ours["rows"].cpu(), TimeMajor().net(rows))
    torch.testing.assert_close(ours["time major"].cpu(), rows.t() * 2)


@pytest.mark.parametrize("dim", [2, -2, 7])
def test_case_25_a_dim_out_of_range_is_refused_with_the_shape(dim: int) -> None:
    with pytest.raises(dpx.SliceError, match=rf"batch_dim={dim} is out of range for 0 of shape \(8, 8\)"):
        fitted(Plain(), batches(rows_and_labels()), 2, batch_dim={"0": dim}, execution="inline")


def test_case_25_a_batch_that_has_no_batch_dim_at_all_goes_whole_to_the_first_replica() -> None:
    loader = batches(rows_and_labels())
    with pytest.warns(UserWarning, match=r"training_step gets a batch whole.*has a batch dim"):
        ours = fitted(Plain(), loader, 2, batch_dim=-1, execution="inline")
    assert_equal(ours, fitted(Plain(), loader))


class HookedData(LightningDataModule):
    """Notes who was asked for what."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, str]] = []

    def train_dataloader(self) -> Any:
        return make_loader(16, 16)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("before", len(batch[0]), str(batch[0].device)))
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.calls.append(("transfer", len(batch[0]), str(device)))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("after", len(batch[0]), str(batch[0].device)))
        return batch


def test_case_26_transfer_hooks_of_a_data_module_run_once_per_replica(execution: str) -> None:
    data = HookedData()
    strategy = dpx.DPXStrategy(workload=[2, 1, 1], execution=execution)
    trainer = make_trainer(max_epochs=1, strategy=strategy, devices=3)
    with pytest.warns(UserWarning, match=r"trainer\.datamodule\.calls is \+2 items on one device, \+6 items in slices"):
        trainer.fit(Plain(), datamodule=data)
    expected = [("before", 16, "cpu")]
    for rows, device in zip((8, 4, 4), places(3), strict=True):
        expected += [("transfer", rows, device), ("after", rows, device)]
    assert sorted(data.calls) == sorted(expected)
    assert data.calls[0] == expected[0]


@pytest.mark.host
@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ([1, 1, 1], "workload has 3 entries"),
        ([], "workload has 0 entries"),
        ([0, 0], r"workload\[0\]=0"),
        ([1, -1], r"workload\[1\]=-1"),
        ([1, float("nan")], r"workload\[1\]=nan"),
        ([1, float("inf")], r"workload\[1\]=inf"),
        (["1", "1"], r"workload\[0\]='1'"),
        ("fast", "workload='fast'.*'even', 'auto'"),
        (None, "workload=None"),
        (2, "workload=2"),
    ],
)
def test_case_27_workloads_that_make_no_sense_are_refused_before_a_step(workload: Any, message: str) -> None:
    with pytest.raises(dpx.ConfigurationError, match=message):
        fitted(Plain(), batches(rows_and_labels()), 2, workload=workload)


@pytest.mark.parametrize("workload", [[100, 1], [1e-9, 1e9], [np.float64(2), 1]])
def test_case_27_extreme_shares_lose_no_row(workload: Any, execution: str) -> None:
    loader = batches(rows_and_labels(8), rows_and_labels(3))
    ours = fitted(Plain(), loader, 2, workload=workload, execution=execution)
    assert_equal(ours, fitted(Plain(), loader))


class Stream(IterableDataset[Any]):
    """No length."""

    def __iter__(self) -> Iterator[Any]:
        rows, labels = rows_and_labels(21)
        return zip(rows, labels, strict=True)


@pytest.mark.parametrize("batch_size", [4, 8, 64])
def test_case_29_streams_and_loaders_shorter_than_a_batch(batch_size: int, execution: str) -> None:
    loader = DataLoader(Stream(), batch_size)
    assert_equal(fitted(Plain(), loader, 3, execution=execution), fitted(Plain(), loader))


@pytest.mark.filterwarnings("ignore:.*No `(train|val)_dataloader.*", "ignore:.*`fit_loop` will be skipped.*")
def test_case_29_an_empty_stream_trains_nothing() -> None:
    empty = DataLoader(Stream(), 64, drop_last=True)
    trainer = make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    trainer.fit(Plain(), empty)
    assert trainer.global_step == 0


class Normalizes(Plain):
    """Changes its rows in place before it uses them, as augmentations do."""

    def loss(self, batch: Any) -> torch.Tensor:
        batch[0].mul_(0.5).add_(1)
        return super().loss(batch)


class PopsAndAppends(Plain):
    """Changes the containers."""

    def loss(self, batch: Any) -> torch.Tensor:
        labels = batch[2].pop("labels")
        batch[2]["names"].append("more")
        batch[2]["more"] = 1
        assert len(batch[2]["names"]) == len(labels) + 1
        return F.cross_entropy(self.net(batch[0]), labels)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        (Normalizes, lambda labels: 0),
        (PopsAndAppends, lambda labels: {"labels": labels, "names": ["row"] * len(labels)}),
    ],
)
def test_case_30_a_step_that_changes_its_batch(kind: type[Plain], extra: Any, execution: str) -> None:
    def made() -> Any:
        rows, labels = rows_and_labels(8)
        return batches((rows, labels, extra(labels)))

    ours = fitted(kind(), made(), 3, execution=execution)
    assert_equal(ours, fitted(kind(), made()))
