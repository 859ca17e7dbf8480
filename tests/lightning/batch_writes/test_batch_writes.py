"""What a step writes into its batch is what hooks find there afterwards."""

import copy
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from lightning_dpx.replicas import slicers
from lightning_dpx.torch_compat import tree_map_only
from tests.conftest import SIMULATED, Classifier, StepsByHand, assert_equal, make_loader, make_trainer

pytestmark = pytest.mark.usefixtures("hardware")


class Writes(LightningModule):
    """Rows (B, 4) to scores (B,); notes what its hooks find in batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.found: list[torch.Tensor] = []

    def write(self, batch: Any) -> torch.Tensor:
        """Writes into the batch; returns rows."""
        raise NotImplementedError

    def look(self, batch: Any) -> list[Any]:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(self.write(batch)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.write(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(self.write(batch))

    def note(self, batch: Any) -> None:
        self.found += [torch.as_tensor(one).detach().cpu().float().clone() for one in self.look(batch)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(batch)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class IntoADict(Writes):
    def write(self, batch: Any) -> torch.Tensor:
        batch["x"].mul_(2)
        batch["mask"] = batch["x"][:, 0] > 0
        batch["more"] = {"rows": batch["x"] + 1, "names": [name + "!" for name in batch["name"]]}
        batch["sum"] = batch["x"].sum()
        batch["count"] = int(batch["mask"].sum())
        batch["scale"] = 2.0
        batch.pop("y")
        return batch["x"]

    def look(self, batch: Any) -> list[Any]:
        assert batch["more"]["names"] == [name + "!" for name in batch["name"]]
        assert "y" not in batch
        return [*(batch[key] for key in ("x", "mask", "sum", "count", "scale")), batch["more"]["rows"]]


class IntoATuple(Writes):
    """One of its tensors is written, the other one is what the loader gave."""

    def write(self, batch: Any) -> torch.Tensor:
        batch[0].add_(batch[1])
        return batch[0]

    def look(self, batch: Any) -> list[Any]:
        return list(batch)


class IntoATensor(IntoATuple):
    def write(self, batch: Any) -> torch.Tensor:
        return batch.add_(1)

    def look(self, batch: Any) -> list[Any]:
        return [batch]


class IntoRows(Writes):
    """A list of one dict per row."""

    def write(self, batch: Any) -> torch.Tensor:
        for row in batch["rows"]:
            row["boxes"].mul_(3)
            row["seen"] = row["boxes"].sum()
        return batch["x"] + torch.stack([row["boxes"] for row in batch["rows"]])

    def look(self, batch: Any) -> list[Any]:
        return [value for row in batch["rows"] for value in row.values()]


class OnItsWay(IntoATuple):
    """Written in the hook that gets the batch on its device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * 3, batch[1] - 1


class FromAList(OnItsWay):
    """The loader gives a list, as torch's own collate function does, and the hook a tuple."""


class WithAnItemMore(FromAList):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * 3, batch[1], batch[0] > 0

    def write(self, batch: Any) -> torch.Tensor:
        return batch[0] * batch[2]


class IntoAnotherKind(OnItsWay):
    """Hooks after the step do not find the dict, but the batch as loaded."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0] * 3}

    def write(self, batch: Any) -> torch.Tensor:
        return batch["x"]

    def look(self, batch: Any) -> list[Any]:
        return []


class WithAnItemLess(IntoAnotherKind):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch[0] * 3,)

    def write(self, batch: Any) -> torch.Tensor:
        return batch[0]


class ThroughACallback(IntoADict):
    """Its own hooks do not look, those of a callback do."""

    on_train_batch_end = LightningModule.on_train_batch_end
    on_validation_batch_end = LightningModule.on_validation_batch_end


class SeveralTimes(IntoATuple):
    """An optimizer that calls its closure again finds what was written the last time."""

    on_train_batch_end = LightningModule.on_train_batch_end

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class ByHand(StepsByHand, IntoADict):
    pass


class Largest(IntoADict):
    """A value of the whole batch that no two slices give."""

    def write(self, batch: Any) -> torch.Tensor:
        rows = super().write(batch)
        batch["scale"] = rows.std()
        return rows


class Looks(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.note(batch)

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        module.note(batch)


def batches(kind: type[Writes]) -> list[Any]:
    """Three batches, the last of which is short."""
    generator = torch.Generator().manual_seed(0)
    made: list[Any] = []
    for rows in (7, 7, 3):
        x, y = torch.randn(rows, 4, generator=generator), torch.randn(rows, 4, generator=generator)
        boxes = [{"boxes": torch.randn(4, generator=generator)} for _ in range(rows)]
        made.append({"x": x, "y": y, "name": [str(row) for row in range(rows)]} if issubclass(kind, IntoADict) else
                    {"x": x, "rows": boxes} if kind is IntoRows else x if kind is IntoATensor else
                    [x, y] if issubclass(kind, FromAList) else (x, y))  # fmt: skip
    return made


def outcome(kind: type[Writes], **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = kind()
    callbacks = [Looks()] if kind is ThroughACallback else []
    trainer = make_trainer(max_epochs=1, callbacks=callbacks, num_sanity_val_steps=1, **options)
    # A step on the host writes into what the loader gave, one on a device into a copy.
    loaders = [DataLoader(batches(kind), batch_size=None, collate_fn=copy.deepcopy) for _ in range(2)]
    trainer.fit(model, *loaders)
    seen = {**model.state_dict(), **{f"found {index}": value for index, value in enumerate(model.found)}}
    return {name: value.detach().cpu().clone() for name, value in seen.items()}


@cache
def of_one_device(kind: type[Writes]) -> dict[str, torch.Tensor]:
    return outcome(kind)


KINDS = [
    IntoADict,
    IntoATuple,
    IntoATensor,
    IntoRows,
    OnItsWay,
    FromAList,
    WithAnItemMore,
    ThroughACallback,
    SeveralTimes,
    ByHand,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_replicas", "execution"), [(2, "auto"), (3, "inline"), (2, "threads")])
def test_hooks_find_what_the_step_wrote(kind, num_replicas, execution) -> None:
    strategy = dpx.DPXStrategy(execution=execution, verify="raise")
    assert_equal(outcome(kind, strategy=strategy, devices=num_replicas), of_one_device(kind))


class IntoSomeRows(IntoATuple):
    """Most slices have none of them, and are not written."""

    def write(self, batch: Any) -> torch.Tensor:
        for row in batch[0]:
            if row[0] > 1:
                row.mul_(3)
        return batch[0]


class IntoSomeRowsOfADict(IntoSomeRows, IntoADict):
    def write(self, batch: Any) -> torch.Tensor:
        return super().write([batch["x"]])

    def look(self, batch: Any) -> list[Any]:
        return [batch["x"], batch["y"]]


@pytest.mark.parametrize("kind", [IntoSomeRows, IntoSomeRowsOfADict, IntoADict, OnItsWay, IntoRows])
@pytest.mark.parametrize(("num_replicas", "micro_batches"), [(1, 3), (2, 2), (3, 1)])
def test_slices_that_wrote_nothing_come_together_with_those_that_did(kind, num_replicas, micro_batches) -> None:
    strategy = dpx.DPXStrategy(execution="inline", micro_batches=micro_batches)
    assert_equal(outcome(kind, strategy=strategy, devices=num_replicas), of_one_device(kind))


class Wide(LightningModule):
    """Rows (B, 32768), of which it keeps nothing for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.peaks: list[int] = []  # from the first to the last micro-batch of a step
        self.sums: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sums.append(float(batch["x"].sum()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch["row"][0] == 0:
            torch.sim.reset_peak_memory_stats("sim:0")  # type: ignore[attr-defined]
        if batch["row"][-1] == 7:
            self.peaks.append(torch.sim.max_memory_allocated("sim:0"))  # type: ignore[attr-defined]
        return batch["x"].sum() * self.weight

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WideOnItsWay(Wide):
    """Made anew in the hook that gets it on its device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {key: value + 0 for key, value in batch.items()}


class WideWritten(Wide):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        batch["x"].mul_(1)
        return loss


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.parametrize("kind", [Wide, WideOnItsWay, WideWritten])
def test_micro_batches_are_on_the_device_one_after_the_other(kind: type[Wide], hardware: str) -> None:
    """Where hooks look at batches all of them stayed there until the last had run: 1.14 of a budget were taken."""
    if hardware == "cpu":
        pytest.skip("one memory")
    rows = [{"x": torch.ones(8, 32768), "row": torch.arange(8)} for _ in range(3)]
    model = kind()
    strategy = dpx.DPXStrategy(micro_batches=8, verify="off")
    make_trainer(strategy=strategy, devices=1, max_epochs=1).fit(model, DataLoader(rows, batch_size=None))
    assert len(model.peaks) == 3
    assert max(model.peaks) < 3 * 32768 * 4
    assert model.sums == [8.0 * 32768] * 3


class ChangesContainers(Writes):
    """Puts other containers into its batch, and gives its lists more items, or fewer."""

    def write(self, batch: Any) -> torch.Tensor:
        rows = batch["x"]
        getattr(self, self.way)(batch)
        return rows

    def look(self, batch: Any) -> list[Any]:
        self.shapes.append(
            tree_map_only(torch.Tensor, lambda tensor: (tuple(tensor.shape), float(tensor.sum())), batch)
        )
        return [0.0]

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.shapes: list[Any] = []

    def appends(self, batch: Any) -> None:
        batch["pair"].append(batch["x"] * 2)

    def appends_within(self, batch: Any) -> None:
        batch["more"]["pairs"][0].append(batch["x"] * 2)

    def inserts(self, batch: Any) -> None:
        batch["pair"].insert(0, batch["x"] * 2)

    def pops(self, batch: Any) -> None:
        batch["pair"].pop(0)

    def clears(self, batch: Any) -> None:
        batch["pair"].clear()

    def deletes_a_list(self, batch: Any) -> None:
        del batch["pair"]

    def deletes_names(self, batch: Any) -> None:
        del batch["name"]

    def deletes_a_dict(self, batch: Any) -> None:
        del batch["more"]

    def puts_a_longer_list(self, batch: Any) -> None:
        batch["pair"] = [*batch["pair"], batch["x"] * 3]

    def puts_a_tensor(self, batch: Any) -> None:
        batch["pair"] = batch["x"][:, 0]

    def puts_a_tuple(self, batch: Any) -> None:
        batch["fixed"] = (batch["x"] * 3, 5.0)

    def puts_nothing(self, batch: Any) -> None:
        batch["pair"] = None

    def puts_a_dict(self, batch: Any) -> None:
        batch["x"] = {"rows": batch["x"] * 2, "kind": "twice"}


def collated(samples: list[torch.Tensor]) -> dict[str, Any]:
    rows = torch.stack(samples)
    named = {"name": [f"{float(row.sum()):.5f}" for row in rows], "fixed": (rows + 3, 1.0)}
    return {"x": rows, "pair": [rows + 1, rows + 2], "more": {"pairs": [[rows + 4, rows + 5]]}, **named}


WAYS = [
    "appends", "appends_within", "inserts", "pops", "clears", "deletes_a_list", "deletes_names", "deletes_a_dict",
    "puts_a_longer_list", "puts_a_tensor", "puts_a_tuple", "puts_nothing", "puts_a_dict",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("num_replicas", "micro_batches"), [(2, 1), (2, 2)])
def test_hooks_find_containers_as_the_step_left_them(way: str, num_replicas: int, micro_batches: int) -> None:
    """A list with one item more was empty in the hook, a deleted one empty instead of gone, and a new dict was lost.

    The last batch is too short for several slices.
    """
    rows = torch.randn(13, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    models = []
    strategy = dpx.DPXStrategy(execution="inline", micro_batches=micro_batches, verify="raise")
    for options in ({}, {"strategy": strategy, "devices": num_replicas}):
        torch.manual_seed(0)
        model = ChangesContainers(way).double()
        trainer = make_trainer(max_epochs=1, num_sanity_val_steps=0, **options)
        loaders = [DataLoader(rows, 6, collate_fn=collated) for _ in range(2)]  # type: ignore[arg-type]
        trainer.fit(model, *loaders)
        models.append(model)
    one, other = (rounded(model.shapes) for model in models)
    assert one == other
    assert len(one) == 6


def rounded(found: list[Any]) -> list[str]:
    """Without the last digits, which slices may add up in another order."""
    return [re.sub(r"(\.\d{6})\d*", r"\1", str(batch)) for batch in found]


class GivesItAgain(Writes):
    """Its hooks give the batch to the module once more, and compare it with what the step returned."""

    def write(self, batch: Any) -> torch.Tensor:
        return batch[0]

    def look(self, batch: Any) -> list[Any]:
        with torch.no_grad():
            return [self.net(batch[0]).mean(), (batch[1] - self.net.weight).mean()]

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.found.append((outputs - batch[0]).mean().cpu())


def test_hooks_find_the_batch_on_the_device_of_the_module() -> None:
    """Online probes and pictures of predictions: on a device the batch was still on the host, and they failed."""
    strategy = dpx.DPXStrategy(execution="inline", verify="raise")
    assert_equal(outcome(GivesItAgain, strategy=strategy, devices=2), of_one_device(GivesItAgain))


def test_what_slices_cannot_write_is_named() -> None:
    """``batch["scale"]`` is the standard deviation of all rows."""
    with pytest.warns(UserWarning, match=r"'batch\.scale'"):
        outcome(Largest, strategy=dpx.DPXStrategy(execution="inline"), devices=2)


class OnSomeSlices(IntoADict):
    """A key that only one slice gets."""

    def write(self, batch: Any) -> torch.Tensor:
        rows = super().write(batch)
        if self.global_rank == 0:
            batch["rank"] = torch.zeros(len(rows))
        return rows

    def look(self, batch: Any) -> list[Any]:
        return [*super().look(batch), batch.get("rank", 1.0)]


@pytest.mark.filterwarnings("ignore:dpx. validation_step gets all of its batches whole")
def test_what_cannot_be_put_together_makes_batches_whole() -> None:
    message = r"hooks look at afterwards, and what slices write cannot be put together: batch\.rank is there on some"
    with pytest.warns(UserWarning, match=f"training_step gets all of its batches whole.*{message}"):
        ours = outcome(OnSomeSlices, strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    assert_equal(ours, of_one_device(OnSomeSlices))


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (IntoAnotherKind, "batch is a tuple as loaded, and hooks of its transfer make a dict"),
        (WithAnItemLess, "batch has 2 items as loaded, and 1 after the hooks of its transfer"),
    ],
)
@pytest.mark.filterwarnings("ignore:dpx. validation_step gets all of its batches whole")
def test_what_hooks_of_the_transfer_make_and_has_no_place_makes_batches_whole(kind: Any, problem: str) -> None:
    with pytest.warns(UserWarning, match=f"training_step gets all of its batches whole.*{problem}"):
        ours = outcome(kind, strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    assert_equal(ours, of_one_device(kind))


class Molecules:
    """Rows, in an object that only its slicer can cut."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def to(self, device: torch.device, **_: Any) -> "Molecules":
        self.x = self.x.to(device)
        return self


def molecules(rows: int) -> Molecules:
    return Molecules(torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)))


def graphs(rows: int) -> Any:
    data = pytest.importorskip("torch_geometric.data")
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
    return data.Batch.from_data_list([data.Data(x=row[None]) for row in x])


class IntoAnObject(Writes):
    def write(self, batch: Any) -> torch.Tensor:
        batch.more = batch.x * 2
        return batch.more

    def look(self, batch: Any) -> list[Any]:
        return [batch.more]


class InPlace(IntoAnObject):
    def write(self, batch: Any) -> torch.Tensor:
        return batch.x.mul_(2)

    def look(self, batch: Any) -> list[Any]:
        return [batch.x]


class Reads(InPlace):
    def write(self, batch: Any) -> torch.Tensor:
        return batch.x * 2


@pytest.fixture
def cuts_molecules() -> Iterator[None]:
    def cut(batch: Molecules, sizes: Any) -> list[Molecules]:
        return [Molecules(part) for part in batch.x.split(list(sizes))]

    dpx.register_slicer(Molecules, cut)
    yield
    slicers.unregister_slicer(Molecules)


def trained_on(make: Any, kind: type[Writes], **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = kind()
    loader = DataLoader([make(rows) for rows in (7, 7, 3)], batch_size=None, collate_fn=copy.deepcopy)
    make_trainer(max_epochs=1, num_sanity_val_steps=1, **options).fit(model, loader, loader)
    seen = {**model.state_dict(), **{f"found {index}": value for index, value in enumerate(model.found)}}
    return {name: value.detach().cpu().clone() for name, value in seen.items()}


@pytest.mark.filterwarnings("ignore:dpx. validation_step gets all of its batches whole")
@pytest.mark.usefixtures("cuts_molecules")
@pytest.mark.parametrize("make", [molecules, graphs])
@pytest.mark.parametrize("kind", [IntoAnObject, InPlace])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_what_is_written_into_objects_that_a_slicer_cuts_makes_batches_whole(make, kind, num_replicas) -> None:
    with pytest.warns(UserWarning, match=r"training_step gets all of its batches whole.*batch is a \w+\."):
        ours = trained_on(make, kind, strategy=dpx.DPXStrategy(execution="inline"), devices=num_replicas)
    assert_equal(ours, trained_on(make, kind))


@pytest.mark.usefixtures("cuts_molecules")
@pytest.mark.parametrize("make", [molecules, graphs])
def test_objects_that_are_only_read_are_cut(make) -> None:
    strategy = dpx.DPXStrategy(execution="inline", verify="raise")  # a warning would be an error
    assert_equal(trained_on(make, Reads, strategy=strategy, devices=2), trained_on(make, Reads))


class Augments(Classifier):
    """Makes something else of a batch on its way, and looks at it before and after its step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, float] = {}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 100.0, batch[1]]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen["start"] = float(batch[0].mean())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen["end"] = float(batch[0].mean())


def test_that_hooks_at_the_start_find_the_batch_as_loaded_is_told(caplog: Any) -> None:
    caplog.set_level("INFO")
    model = Augments()
    strategy = dpx.DPXStrategy(execution="inline", verify="off")
    loader = make_loader()
    make_trainer(strategy=strategy, devices=2).fit(model, loader, loader)
    assert model.seen["start"] < 10 < model.seen["end"], "on one device both are above"
    assert caplog.text.count("on_train_batch_start gets every batch as it was loaded") == 1


class LooksAgain(Classifier):
    """Keeps the batch that it gets at its start, and gives it to its net in a hook before the end of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kept = batch

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert batch is self.kept

    def look(self) -> None:
        with torch.no_grad():
            self.net(self.kept[0])


class BeforeBackward(LooksAgain):
    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.look()


class InItsOwnBackward(LooksAgain):
    def backward(self, loss: torch.Tensor) -> None:  # type: ignore[override]
        loss.backward()
        self.look()


class AfterBackward(LooksAgain):
    def on_after_backward(self) -> None:
        self.look()


@pytest.mark.parametrize("kind", [BeforeBackward, InItsOwnBackward, AfterBackward])
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_batch_that_is_kept_from_its_start_is_on_the_device_in_hooks(kind: Any, num_replicas: int) -> None:
    strategy = dpx.DPXStrategy(execution="inline", verify="off")
    make_trainer(strategy=strategy, devices=num_replicas, max_epochs=1).fit(kind(), make_loader(), make_loader())
