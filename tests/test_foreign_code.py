"""Models and modules that were not written for this package: all stages, twice, against one device."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MetricCollection, MinMaxMetric, RunningMean
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
from torchmetrics.wrappers import ClasswiseWrapper

import lightning_dpx as dpx
from tests.conftest import make_loader, make_trainer

transformers = pytest.importorskip("transformers")
geometric = pytest.importorskip("torch_geometric")

pytestmark = [pytest.mark.usefixtures("hardware"), pytest.mark.xdist_group("foreign")]


class Rows(Dataset[Any]):
    """Items that somebody made before."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def token_rows(num_rows: int = 9, length: int = 6) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 32, (num_rows, length), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 3} for row in tokens]


class Foreign(LightningModule):
    """Subclasses give ``self.net`` and what a batch's loss and predictions are."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def loss_of(self, batch: Any) -> Any:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss_of(batch))


class BertClassifier(Foreign):
    """Returns the library's own ModelOutput from predict_step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=8, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.net = transformers.BertForSequenceClassification(config)

    def loss_of(self, batch: Any) -> torch.Tensor:
        return self.net(**batch).loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])


class TinyLlama(Foreign):
    """A language model whose rotary embeddings and caches are its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=8,
        )  # fmt: skip
        self.net = transformers.LlamaForCausalLM(config)

    def loss_of(self, batch: Any) -> torch.Tensor:
        return self.net(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(input_ids=batch["input_ids"], use_cache=False).logits


class GraphClassifier(Foreign):
    """Batches of graphs, cut by graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.out = geometric.nn.GCNConv(3, 8), nn.Linear(8, 3)

    def logits(self, batch: Any) -> torch.Tensor:
        hidden = self.conv(batch.x, batch.edge_index).relu()
        return self.out(geometric.nn.global_mean_pool(hidden, batch.batch))

    def loss_of(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.logits(batch), batch.y)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.logits(batch)


class Autoencoder(Foreign):
    """Two networks and a loss over pixels; predictions as NumPy arrays."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 8))

    def loss_of(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.encoder(batch[0]).cpu().numpy()


class Measured(Foreign):
    """torchmetrics, wrapped and not, updated with logits that have a history."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, 3)
        self.train_metrics = MetricCollection([MulticlassAccuracy(3), MulticlassAUROC(3)], prefix="train_")
        self.by_class = ClasswiseWrapper(MulticlassAccuracy(3, average=None))
        self.smallest = MinMaxMetric(MulticlassAccuracy(3))
        self.running = RunningMean(window=3)

    def loss_of(self, batch: Any) -> torch.Tensor:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        if self.training:
            self.train_metrics.update(logits, batch[1])
            self.running(loss)
            self.log("running", self.running)
        else:
            self.by_class.update(logits, batch[1])
            self.smallest.update(logits, batch[1])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.train_metrics.compute())
        self.train_metrics.reset()

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.by_class.compute())
        self.log_dict({f"accuracy_{name}": value for name, value in self.smallest.compute().items()})
        self.by_class.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).argmax(1)


class AdversarialPair(LightningModule):
    """A GAN, by hand, without noise from a generator that devices have each their own of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(8, 8), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        rows = batch[0]
        make, judge = self.optimizers()
        self.toggle_optimizer(make)
        loss = F.binary_cross_entropy_with_logits(self.judge(self.maker(rows)), rows.new_ones(len(rows), 1))
        self.manual_backward(loss)
        make.step()
        make.zero_grad()
        self.untoggle_optimizer(make)
        self.toggle_optimizer(judge)
        real = F.binary_cross_entropy_with_logits(self.judge(rows), rows.new_ones(len(rows), 1))
        fake = F.binary_cross_entropy_with_logits(self.judge(self.maker(rows).detach()), rows.new_zeros(len(rows), 1))
        self.manual_backward((real + fake) / 2)
        judge.step()
        judge.zero_grad()
        self.untoggle_optimizer(judge)
        self.log_dict({"make": loss, "judge": (real + fake) / 2})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_score", self.judge(batch[0]).mean())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.maker(batch[0])

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.maker, self.judge)]


class Report(BoringModel):
    """Lightning's own template for bug reports."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch)


def token_loader() -> DataLoader[Any]:
    return DataLoader(Rows(token_rows()), batch_size=5)


def graph_loader() -> Any:
    generator = torch.Generator().manual_seed(4)
    graphs = []
    for index in range(12):
        nodes = 3 + index % 3
        edges = torch.randint(nodes, (2, 6), generator=generator)
        label = torch.tensor([index % 3])
        graphs.append(geometric.data.Data(x=torch.randn(nodes, 3, generator=generator), edge_index=edges, y=label))
    return geometric.loader.DataLoader(graphs, batch_size=5)


def report_loader() -> DataLoader[Any]:
    torch.manual_seed(5)
    return DataLoader(RandomDataset(32, 12), batch_size=5)


CASES: list[Any] = [
    (BertClassifier, token_loader), (TinyLlama, token_loader), (GraphClassifier, graph_loader),
    (Autoencoder, make_loader), (Measured, make_loader), (AdversarialPair, make_loader), (Report, report_loader),
]  # fmt: skip


def everything(kind: Any, make_batches: Any, **options: Any) -> dict[str, Any]:
    """Fit, validate, test, predict, fit again: all that a user sees."""
    model, loader = kind(), make_batches()
    trainer = make_trainer(max_epochs=1, **options)
    seen: dict[str, Any] = {}
    trainer.fit(model, loader, loader)
    seen["fit"] = dict(trainer.callback_metrics)
    seen["validate"] = trainer.validate(model, loader, verbose=False)
    seen["test"] = trainer.test(model, loader, verbose=False)
    seen["predict"] = trainer.predict(model, loader)
    again = make_trainer(max_epochs=1, **{**options, **_again(options)})
    again.fit(model, loader, loader)
    seen["fit again"] = dict(again.callback_metrics)
    seen["weights"] = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    return seen


def _again(options: dict[str, Any]) -> dict[str, Any]:
    given = options.get("strategy")
    return {"strategy": dpx.DPXStrategy(execution=given.options.execution)} if given is not None else {}


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize(("kind", "make_batches"), CASES)
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
def test_other_peoples_code_is_as_on_one_device(
    kind: Any, make_batches: Any, num_replicas: int, request: pytest.FixtureRequest
) -> None:
    execution = "inline" if num_replicas == 2 else "threads"
    one = everything(kind, make_batches)
    ours = everything(kind, make_batches, strategy=dpx.DPXStrategy(execution=execution), devices=num_replicas)
    assert ours.keys() == one.keys()
    for name, expected in one.items():
        torch.testing.assert_close(
            ours[name], expected, rtol=1e-4, atol=1e-5, check_device=False, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("execution", ["inline", "threads"])
def test_caches_that_language_models_return_are_those_of_the_whole_batch(
    execution: Any, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    class Returns(TinyLlama):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(input_ids=batch["input_ids"])

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = dpx.DPXStrategy(execution=execution)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, **quiet)
    predicted = trainer.predict(Returns(), token_loader())
    expected = Trainer(accelerator="cpu", devices=1, **quiet).predict(Returns(), token_loader())
    assert not any("whole" in str(warning.message) for warning in recwarn)
    for ours, theirs in zip(predicted, expected, strict=True):
        assert type(ours.past_key_values) is type(theirs.past_key_values)
        for one, two in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
            torch.testing.assert_close(one.keys, two.keys)
            torch.testing.assert_close(one.values, two.values)
        torch.testing.assert_close(ours.logits, theirs.logits)
