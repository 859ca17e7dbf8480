"""What steps append to lists is what one device appends, whatever the number of slices; what is not is announced."""

import warnings
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.conftest import make_trainer

WAYS = [
    pytest.param({"execution": "inline"}, 2, id="inline-2"),
    pytest.param({"execution": "threads"}, 3, id="threads-3"),
    pytest.param({"micro_batches": 3}, 1, id="micro-batches"),
    pytest.param({"micro_batches": 2, "execution": "inline"}, 2, id="both"),
]


class Collects(LightningModule):
    """Rows (B, 8) to logits (B, 3); keeps what its epochs' ends need, as has been usual since Lightning 2.0."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.step_outputs: dict[str, list[Any]] = {"train": [], "val": []}
        self.losses: list[torch.Tensor] = []
        self.numbers = defaultdict[str, list[float]](list)
        self.latest: deque[torch.Tensor] = deque(maxlen=16)
        self.made_later: list[float] | None = None
        self.figures: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, "val")

    def step(self, batch: Any, stage: str) -> torch.Tensor:
        rows, labels = batch
        logits = self.net(rows)
        loss = F.cross_entropy(logits, labels)
        hits = (logits.argmax(1) == labels).sum()
        self.step_outputs[stage].append({"loss": loss.detach(), "hits": hits, "rows": len(rows), "stage": stage})
        self.losses.append(loss)
        self.latest.append(loss.detach())
        self.numbers[stage].append(loss.item())
        if self.made_later is None:
            self.made_later = []
        self.made_later.append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        self.gather("train")

    def on_validation_epoch_end(self) -> None:
        self.gather("val")

    def gather(self, stage: str) -> None:
        outputs = self.step_outputs[stage]
        self.figures += [
            float(torch.stack([output["loss"] for output in outputs]).mean()),
            float(sum(output["hits"] for output in outputs)) / sum(output["rows"] for output in outputs),
            float(torch.stack(self.losses).sum().detach()),
            float(torch.stack(list(self.latest)).sum()),
            sum(self.numbers[stage]),
            sum(self.made_later or []),
            float(len(outputs)),
            float(len(self.losses)),
        ]
        outputs.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(kind: type[LightningModule], **options: Any) -> Any:
    torch.manual_seed(0)
    model = kind()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(53, 8, generator=generator), torch.arange(53) % 3)
    make_trainer(max_epochs=2, **options).fit(model, DataLoader(data, 20), DataLoader(data, 30))
    return model


@pytest.mark.parametrize(("own", "num_devices"), WAYS)
def test_an_epochs_end_finds_the_items_of_one_device(hardware: str, own: Any, num_devices: int, caplog: Any) -> None:
    with caplog.at_level("INFO"), warnings.catch_warnings():
        warnings.filterwarnings("error", message="dpx")
        ours = fitted(Collects, strategy=dpx.DPXStrategy(**own), devices=num_devices, accelerator=hardware)
    theirs = fitted(Collects)
    assert "8 kept values" in caplog.text
    torch.testing.assert_close(torch.tensor(ours.figures), torch.tensor(theirs.figures))
    assert len(ours.latest) == len(theirs.latest)
    assert len(ours.made_later) == len(theirs.made_later)


class Netted(LightningModule):
    """Whose class, as many have it, holds the lists that steps append to; a class of its own for each run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.figures: list[float] = []


def with_lists_of_the_class() -> type[Netted]:
    class CollectsOnClass(Netted):
        losses: list[torch.Tensor] = []  # noqa: RUF012  a class attribute is what this is about
        by_stage: tuple[list[Any], list[Any]] = ([], [])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            logits = self.net(batch[0])
            loss = F.cross_entropy(logits, batch[1])
            self.losses.append(loss.detach())
            self.by_stage[0].append((logits.detach(), batch[1]))
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.by_stage[1].append(self.net(batch[0]).sum())

        def on_train_epoch_end(self) -> None:
            logits = torch.cat([both[0] for both in self.by_stage[0]])
            labels = torch.cat([both[1] for both in self.by_stage[0]])
            ends = [
                torch.stack(self.losses).mean(),
                F.cross_entropy(logits, labels),
                torch.stack(self.by_stage[1]).sum(),
            ]
            # The order of the rows counts as well.
            weights = torch.arange(len(logits), dtype=torch.float)
            self.figures += [*map(float, ends), float(weights @ logits.sum(1)), float(len(self.losses))]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return CollectsOnClass


@pytest.mark.parametrize(("own", "num_devices"), WAYS)
def test_lists_of_a_class_have_the_items_of_one_device(own: Any, num_devices: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dpx")
        ours = fitted(with_lists_of_the_class(), strategy=dpx.DPXStrategy(**own), devices=num_devices)
    theirs = fitted(with_lists_of_the_class())
    torch.testing.assert_close(torch.tensor(ours.figures), torch.tensor(theirs.figures))


class TabledCollects(Collects):
    """Beside the tables of its class, which are no lists that steps append to, its own list lies deep."""

    LABELS: ClassVar = {number: (f"class {number}", number) for number in range(1000)}
    COLORS: ClassVar = {number: (number % 255, 0, 0) for number in range(1000)}

    def __init__(self) -> None:
        super().__init__()
        self.outs: dict[str, dict[str, list[torch.Tensor]]] = {"train": {"loss": []}}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.outs["train"]["loss"].append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        losses = self.outs["train"]["loss"]
        self.figures += [float(torch.stack(losses).mean()), float(len(losses))]


@pytest.mark.parametrize(("own", "num_devices"), WAYS)
def test_tables_of_a_class_hide_no_list_of_the_module(own: Any, num_devices: int) -> None:
    ours = fitted(TabledCollects, strategy=dpx.DPXStrategy(**own), devices=num_devices)
    torch.testing.assert_close(torch.tensor(ours.figures), torch.tensor(fitted(TabledCollects).figures))


class CollectsDeeply(Collects):
    """Lists inside of what steps make as they need it, of what was there before, and of items themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.by_stage = defaultdict[str, list[torch.Tensor]](list)
        self.by_name = defaultdict[str, dict[str, list[torch.Tensor]]](lambda: {"loss": [], "logits": []})
        self.pair: tuple[list[Any], list[Any]] = ([], [])
        self.afresh: list[torch.Tensor] | None = None

    def step(self, batch: Any, stage: str) -> torch.Tensor:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.by_stage[stage].append(loss.detach())
        self.by_name[stage]["loss"].append(loss.detach())
        self.by_name[stage]["logits"].append(logits.detach())
        self.pair[1].append({"both": [logits.detach(), batch[1]]})
        if self.afresh is None:
            self.afresh = []
        self.afresh.append(loss.detach())
        return loss

    def gather(self, stage: str) -> None:
        self.figures += [
            float(torch.stack(self.by_stage[stage]).sum()),
            float(torch.stack(self.by_name[stage]["loss"]).sum()),
            float(torch.cat(self.by_name[stage]["logits"]).sum()),
            float(sum(item["both"][0].sum() for item in self.pair[1])),
            float(torch.stack(self.afresh or []).sum()),
            float(len(self.pair[1])),
        ]
        del self.by_stage[stage]
        if stage == "train":
            self.afresh = None


@pytest.mark.parametrize(("own", "num_devices"), WAYS)
def test_lists_of_any_depth_have_the_items_of_one_device(hardware: str, own: Any, num_devices: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dpx")
        ours = fitted(CollectsDeeply, strategy=dpx.DPXStrategy(**own), devices=num_devices, accelerator=hardware)
    theirs = fitted(CollectsDeeply)
    torch.testing.assert_close(torch.tensor(ours.figures), torch.tensor(theirs.figures), atol=3e-5, rtol=1e-5)


class LooksAtDevices(Collects):
    def gather(self, stage: str) -> None:
        assert {loss.device for loss in self.losses} == {self.device}, "one cannot stack losses of several devices"
        assert not any(loss.requires_grad for loss in self.losses)


def test_items_are_on_the_first_device_and_keep_no_graph(sim: Any) -> None:
    ours = fitted(LooksAtDevices, strategy="dpx", devices=3, accelerator="sim")
    assert len(ours.losses) == 12


class KeepsSpread(Collects):
    """A standard deviation is that of a slice, and nothing puts those of slices together."""

    def step(self, batch: Any, stage: str) -> torch.Tensor:
        self.losses.append(batch[0].std())
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def gather(self, stage: str) -> None:
        self.figures.append(float(len(self.losses)))


def test_what_does_not_come_together_is_told_with_its_numbers_and_stays_apart() -> None:
    with pytest.warns(UserWarning, match=r"kept value 'self\.losses\.0': \S+ on one device, \S+ and \S+ from slic"):
        ours = fitted(KeepsSpread, strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    assert len(ours.losses) == 2 * len(fitted(KeepsSpread).losses)
    with pytest.raises(dpx.ParityError, match="kept value"):
        fitted(KeepsSpread, strategy=dpx.DPXStrategy(execution="inline", verify="raise"), devices=2)
    with pytest.warns(UserWarning, match="gets all of its batches whole"):
        first = fitted(KeepsSpread, strategy=dpx.DPXStrategy(execution="inline", verify="first"), devices=2)
    torch.testing.assert_close(first.losses, fitted(KeepsSpread).losses)


class AppendsAtTimes(LightningModule):
    """Appends while its list is short; later, a slice with a large number in its first row does, and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if batch_idx == 0 or bool(batch[0][0, 0] > 10):
            self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_another_number_of_items_than_was_seen_is_announced_and_left() -> None:
    rows = torch.randn(80, 8, generator=torch.Generator().manual_seed(1))
    rows[40] = 20.0  # the first row of the third batch
    data = DataLoader(TensorDataset(rows, torch.arange(80) % 3), 20)
    torch.manual_seed(0)
    model = AppendsAtTimes()
    trainer = make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    with pytest.warns(UserWarning, match=r"self\.losses has one item of each slice from here on.*1 items were"):
        trainer.fit(model, data)
    assert len(model.losses) == 2


class CollectsByHooks(LightningModule):
    """Hooks keep what they see in variables that they capture, two of which are attributes as well."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        means = self.means = list[float]()
        features = self.features = dict[str, torch.Tensor]()
        num_rows = 0

        def count(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            nonlocal num_rows
            num_rows += len(output)

        def keep(module: nn.Module, args: Any, output: torch.Tensor, kept: list[float] = means) -> None:
            kept.append(output.mean().item())
            features["logits"] = output

        self.net.register_forward_hook(count)
        self.net.register_forward_hook(keep)
        self.read = lambda: num_rows
        self.figures: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        self.net(rows)
        loss = F.cross_entropy(self.features["logits"], labels)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.figures += [float(outputs["loss"]), self.means[-1], float(len(self.means)), float(self.read())]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("own", "num_devices"), [*WAYS, pytest.param({"execution": "inline"}, 3, id="inline-3")])
def test_what_hooks_keep_in_their_closures_is_that_of_one_device(hardware: str, own: Any, num_devices: int) -> None:
    data = TensorDataset(torch.randn(40, 8, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3)

    def figures(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = CollectsByHooks()
        make_trainer(**options).fit(model, DataLoader(data, 8))
        return torch.tensor(model.figures)

    ours = figures(strategy=dpx.DPXStrategy(**own), devices=num_devices, accelerator=hardware)
    torch.testing.assert_close(ours, figures())


class Configuration(Mapping[str, Any]):
    """As libraries have it: keeps what it has worked out, and refuses values that are missing."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content
        self._worked_out: dict[str, Any] | None = None

    def __getitem__(self, key: str) -> Any:
        if self._content[key] == "???":
            raise LookupError(f"missing mandatory value: {key}")
        self._worked_out = self._worked_out or {}
        self._worked_out[key] = self._content[key]
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


class Configured(LightningModule):
    other: Any = "???"

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.options = Configuration({"scale": 2.0, "other": self.other})
        self.scale = self.options["scale"]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.scale * F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ConfiguredFully(Configured):
    other = "nothing is missing"


@pytest.mark.parametrize("kind", [Configured, ConfiguredFully])
def test_a_configuration_is_left_as_it_is_and_its_module_is_checked(kind: Any, hardware: str, caplog: Any) -> None:
    """What the search for lists made it work out counted as the step's, and what it refused ended the rehearsal."""
    with caplog.at_level("INFO"), warnings.catch_warnings():
        warnings.filterwarnings("error", message="dpx")
        ours = fitted(kind, strategy=dpx.DPXStrategy(execution="inline"), devices=2, accelerator=hardware)
    assert "dpx: checked on" in caplog.text
    torch.testing.assert_close(ours.net.weight.cpu(), fitted(kind).net.weight)


class KeepsGradients(LightningModule):
    """A tensor's hook appends a layer's gradient, as for saliency; a hook of the run looks at that of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.gradients: list[torch.Tensor] = []
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch[0])
        logits.register_hook(self.gradients.append)
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.norms.append(float(self.gradients[-1].norm()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("options", "devices"), WAYS)
def test_what_a_backward_appends_and_hooks_read_is_of_the_whole_batch(options, devices, hardware) -> None:
    """Lists come together after a forward; the hook found the last slice's, and an epoch's end those of K devices."""
    strategy = dpx.DPXStrategy(verify="first", **options)
    with pytest.warns(UserWarning, match=r"self\.gradients is \+1 items on one device"):
        ours = fitted(KeepsGradients, strategy=strategy, devices=devices, accelerator=hardware)
    assert ours.norms == pytest.approx(fitted(KeepsGradients).norms, rel=1e-5)


class KeepsGradientsForLater(KeepsGradients):
    def on_train_batch_end(self, *_: Any) -> None:
        """Nothing is read during the run."""


def test_what_a_backward_appends_and_no_hook_reads_is_told_to_be_of_slices(hardware: str, caplog: Any) -> None:
    with caplog.at_level("INFO"):
        fitted(KeepsGradientsForLater, strategy=dpx.DPXStrategy(verify="warn"), devices=2, accelerator=hardware)
        fitted(KeepsGradientsForLater, strategy=dpx.DPXStrategy(micro_batches=2), accelerator="cpu")
    assert "self.gradients gets items of each slice, not of the whole batch" in caplog.text
