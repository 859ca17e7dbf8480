"""What Lightning's old ``dp`` and ``nn.DataParallel`` were known to get wrong; every case trains as on one device.

Each case names the failure. Most are a module whose run (weights, logs, predictions) must equal that of one device with
three replicas, in line and in threads, on the host and on simulated devices.
"""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_dpx as dpx
from tests import programs
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer, run, seeded, strategy_in

pytestmark = pytest.mark.usefixtures("hardware")


class Base(Classifier):
    """Logits of rows (B, 8) by ``logits``; subclasses say what is special."""

    def __init__(self) -> None:
        super().__init__()
        self.build()

    def build(self) -> None:
        """Submodules and parameters."""

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self.net(rows)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.logits(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.logits(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.logits(batch[0])


class ParameterLists(Base):
    """Replicas of ParameterList and ParameterDict were empty (pytorch 36035)."""

    def build(self) -> None:
        self.list = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))])
        self.dict = nn.ParameterDict({"scale": nn.Parameter(torch.ones(3))})

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self.net(rows * self.list[0] + self.list[1]) * self.dict["scale"]


class FlatWeights(Base):
    """RNN weights were not one chunk of memory, or not the replica's own (pytorch 21108)."""

    def build(self) -> None:
        self.rnn = nn.LSTM(2, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, 3)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        self.rnn.flatten_parameters()
        return self.out(self.rnn(rows.view(-1, 4, 2))[0][:, -1])


class Tied(Base):
    """Tied weights came apart (lightning 1.x dp; huggingface)."""

    def build(self) -> None:
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(8, 8)
        self.decode.weight = self.encode.weight

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self.net(self.decode(self.encode(rows).tanh()))


class WeightNorm(Base):
    """Hooks that compute the weight kept the first replica's (pytorch 7568)."""

    def build(self) -> None:
        self.net[0] = parametrizations.weight_norm(self.net[0])
        self.net[2] = parametrizations.orthogonal(self.net[2])


class OldWeightNorm(Base):
    """The same, by the forward pre-hook of ``torch.nn.utils.weight_norm``."""

    def build(self) -> None:
        with pytest.warns(FutureWarning):
            self.net[0] = nn.utils.weight_norm(self.net[0])


class HooksWithSelf(Base):
    """Bound hooks fired on the original module instead of the replica (pytorch 8637)."""

    def build(self) -> None:
        self.net[0].register_forward_hook(self.double)

    def double(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        assert module is self.net[0]
        return output * self.net[2].weight.mean()


class SelfDevice(Base):
    """``self.device`` named the first device on every replica (lightning 1.x dp)."""

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        assert rows.device == self.device == self.net[0].weight.device
        return self.net(rows + torch.ones(8, device=self.device))


class TrainerInStep(Base):
    """``self.trainer`` and ``current_epoch`` were gone on the replicas (lightning 1.x dp)."""

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.trainer.model is not None
        return self.net(rows) * (1 + self.current_epoch) / (1 + self.global_step)


class UnusedParameters(Base):
    """Parameters without a gradient needed a flag (DDP), or zeros where one device has None."""

    def build(self) -> None:
        self.unused, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0]) + (self.sometimes(batch[0]) if batch_idx % 2 else 0)
        return F.cross_entropy(logits, batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.unused.weight.grad is None


class UsedByOneReplica(Base):
    """A branch taken on some replicas only made DDP wait for ever; here it depends on the rows."""

    def build(self) -> None:
        self.extra = nn.Linear(8, 3)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        large = rows[:, 0] > 1
        logits = self.net(rows)
        if large.any():
            logits = torch.where(large[:, None], self.extra(rows), logits)
        return logits


class SparseGradients(Base):
    """Sparse gradients of embeddings were refused or densified."""

    def build(self) -> None:
        self.embed = nn.Embedding(50, 8, sparse=True)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self.net(self.embed((rows[:, 0].abs() * 10).long()) + rows)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Frozen(Base):
    """Freezing in the middle of the run did not reach the replicas."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch == 0)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.net[0].weight.requires_grad == (self.current_epoch == 0 or not self.training)
        return self.net(rows)

    def on_validation_start(self) -> None:
        self.net[0].requires_grad_(True)

    def on_predict_start(self) -> None:
        self.on_validation_start()


class SpectralNorm(Base):
    """Power-iteration vectors, buffers that forward writes, were lost with the replicas (pytorch 20672)."""

    def build(self) -> None:
        self.net[0] = parametrizations.spectral_norm(self.net[0], n_power_iterations=1)


class Counter(Base):
    """Buffers and attributes written in forward were lost (pytorch 1051, 9461)."""

    def build(self) -> None:
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("nothing", None)
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.calls += 1
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("steps", self.steps.float())
        self.log("calls", float(self.calls))


class Collected(Base):
    """``self.outputs.append`` in a step, read at the epoch's end, kept one replica's rows or none."""

    def build(self) -> None:
        self.outputs: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.outputs.append(batch[0].sum(1))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        rows = torch.cat(self.outputs)
        self.log("num_rows", float(len(rows)))
        self.log("order", (rows.cpu() * torch.arange(len(rows))).sum())
        self.outputs.clear()


class BatchHooks(Base):
    """``on_before_batch_transfer`` and ``on_after_batch_transfer`` were skipped (lightning 1.x dp)."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert batch[0].device == self.device
        return [batch[0] + 1, batch[1]]


class ScalarOutputs(Base):
    """Scalars warned or failed in gather ("was asked to gather along dimension 0")."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "scalar": loss.detach(), "number": 1.5, "none": None, "text": "x", "tuple": (1, loss)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["scalar"].ndim == 0
        self.log("scalar", outputs["scalar"] + outputs["number"])
        assert outputs["none"] is None
        assert outputs["text"] == "x"


class Result(NamedTuple):
    logits: torch.Tensor
    kind: str


@dataclasses.dataclass
class Record:
    logits: torch.Tensor
    names: list[str]


class StructuredOutputs(Base):
    """Named tuples and dataclasses came back as tuples, or not at all (pytorch 41327)."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        return Result(logits, "logits"), Record(logits, [f"row {x:.3f}" for x in batch[0][:, 0].tolist()])


class NoneFromAll(Base):
    """A step that returned None failed in gather; it is skipped as on one device (some replicas: test_strategy)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        keep = batch[1] > 5  # no row has such a label: one device skips the second batch, and so do all replicas
        return None if batch_idx == 1 and not keep.any() else super().training_step(batch, batch_idx)


class Attention(Base):
    """Key padding masks (B, T) must be cut with the rows, causal masks (T, T) must not."""

    def build(self) -> None:
        self.register_buffer("causal", torch.triu(torch.full((4, 4), float("-inf")), 1))
        self.attend, self.out = nn.MultiheadAttention(2, 1, batch_first=True), nn.Linear(8, 3)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        x = rows.view(-1, 4, 2)
        return self.out(self.attend(x, x, x, attn_mask=self.causal, need_weights=False)[0].flatten(1))


class GradientPenalty(Base):
    """Gradients of gradients inside the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = batch[0].clone().requires_grad_()
        (grad,) = torch.autograd.grad(self.net(rows).sum(), rows, create_graph=True)
        return F.cross_entropy(self.net(rows), batch[1]) + grad.square().sum(1).mean()

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self.net(rows)


class Metrics(Base):
    """States of metrics updated on replicas were lost."""

    def build(self) -> None:
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)


class AutocastInStep(Base):
    """Autocast did not reach the threads (pytorch 36428)."""

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(rows.device.type, dtype=torch.bfloat16):
            hidden = self.net[0](rows)
        assert hidden.dtype == torch.bfloat16
        return self.net[1:](hidden.float())


class WrittenInPlace(Base):
    """A step that changes its batch in place changed other replicas' rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(0.5)
        return super().training_step([batch[0].clone(), batch[1]], batch_idx)


CASES = [
    ParameterLists, FlatWeights, Tied, WeightNorm, OldWeightNorm, HooksWithSelf, SelfDevice, TrainerInStep,
    UnusedParameters, UsedByOneReplica, SparseGradients, Frozen, SpectralNorm, Counter, Collected, BatchHooks,
    ScalarOutputs, NoneFromAll, Attention, GradientPenalty, Metrics, AutocastInStep,
    WrittenInPlace,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`.*", "ignore:.*draws random numbers.*")
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_trains_as_on_one_device(case: type[Base], execution: str, hardware: str) -> None:
    if case is SparseGradients and hardware == "sim":
        pytest.skip("simulated devices have no sparse tensors")

    def build() -> Base:
        torch.manual_seed(0)
        return case()

    expected = run(build(), make_loader())
    ours = run(build(), make_loader(), strategy=strategy_in(execution), devices=3)
    loose = {"rtol": 2e-2, "atol": 2e-2} if case is AutocastInStep else {}
    if loose:
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value, **loose)
    else:
        assert_equal(ours, expected)


def test_structured_outputs_keep_their_types(execution: str) -> None:
    model, loader = StructuredOutputs(), make_loader()
    predictions = make_trainer(strategy=strategy_in(execution), devices=3).predict(model, loader)
    expected = make_trainer().predict(model, loader)
    for (result, record), (plain_result, plain_record) in zip(predictions, expected, strict=True):
        assert isinstance(result, Result)
        assert isinstance(record, Record)
        assert result.kind == "logits"
        assert record.names == plain_record.names
        torch.testing.assert_close(result.logits.cpu(), plain_result.logits)
        torch.testing.assert_close(record.logits.cpu(), plain_record.logits)


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        return {"row": torch.full((8,), float(index)), "name": str(index), "scale": torch.tensor(2.0)}


class ReadsNames(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert [float(name) for name in batch["name"]] == batch["row"][:, 0].tolist()
        return self.net(batch["row"]).mean()

    validation_step = None

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch["name"], batch["row"].sum(1)


def test_lists_of_strings_are_cut_with_their_rows(execution: str) -> None:
    """DataParallel hands the whole list to every replica."""
    trainer = make_trainer(strategy=strategy_in(execution), devices=3, max_epochs=1)
    loader = DataLoader(Texts(), 8)
    trainer.fit(ReadsNames(), loader)
    predictions = trainer.predict(ReadsNames(), loader)
    assert [name for names, _ in predictions for name in names] == [str(index) for index in range(22)]
    assert torch.cat([sums for _, sums in predictions]).cpu().tolist() == [8.0 * index for index in range(22)]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5])
def test_batches_smaller_than_the_number_of_replicas(num_rows: int, execution: str) -> None:
    """DataParallel fails where a replica has nothing (pytorch 15161, 52260)."""
    loader = make_loader(num_rows, 16)
    ours = run(seeded(), loader, strategy=strategy_in(execution), devices=4)
    expected = run(seeded(), loader)
    for seen in (ours, expected):
        del seen["logged/rows"], seen["logged/largest"]
    assert_equal(ours, expected)


class RefusedError(ValueError):
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(code)
        self.detail = detail


class Raises(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise RefusedError(17, detail="the user's own")


def test_errors_keep_their_type_attributes_and_identity(execution: str) -> None:
    """DataParallel rebuilds errors from their message, which a custom constructor does not survive."""
    with pytest.raises(RefusedError) as caught:
        make_trainer(strategy=strategy_in(execution), devices=3).fit(Raises(), make_loader(), make_loader())
    assert caught.value.detail == "the user's own"
    assert any("replica" in note.lower() for note in caught.value.__notes__)


def test_files_have_bare_names_and_load_on_one_device(tmp_path, execution: str) -> None:
    """DataParallel prefixes every name with ``module.``."""
    trainer, model = (
        make_trainer(strategy=strategy_in(execution), devices=3),
        seeded(),
    )
    trainer.fit(model, make_loader(), make_loader())
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == seeded().state_dict().keys()
    plain = seeded()
    plain.load_state_dict(saved)
    assert_equal(plain.state_dict(), {name: value.cpu() for name, value in model.state_dict().items()}, bitwise=True)


@pytest.mark.host
def test_a_batch_size_is_found() -> None:
    """Lightning refuses to look for one under DDP."""

    class Tunable(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.batch_size = nn.Linear(8, 3), 2

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def train_dataloader(self) -> DataLoader[Any]:
            return make_loader(53, self.batch_size)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model, trainer = Tunable(), make_trainer(strategy=dpx.DPXStrategy(execution="inline"), devices=3, max_epochs=1)
    assert Tuner(trainer).scale_batch_size(model, max_trials=3) == 8


@pytest.mark.host
def test_it_runs_where_there_is_no_main_module_to_import() -> None:
    """DDP starts processes, which a notebook, or a program read from a pipe, cannot do."""
    program = (
        "import torch, lightning.pytorch as pl, lightning_dpx\n"
        "from torch.utils.data import DataLoader\n"
        "class M(pl.LightningModule):\n"
        "    def __init__(self):\n        super().__init__(); self.net = torch.nn.Linear(4, 1)\n"
        "    def training_step(self, batch, i): return self.net(batch).square().mean()\n"
        "    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)\n"
        "trainer = pl.Trainer(strategy='dpx_naive', accelerator='cpu', devices=2, max_steps=3, logger=False,\n"
        "                     enable_checkpointing=False, enable_progress_bar=False)\n"
        "trainer.fit(M(), DataLoader(torch.randn(16, 4), 4))\n"
        "print('steps', trainer.global_step)\n"
    )
    done = programs.run("-c", program)
    assert "steps 3" in done.stdout, done.stderr
