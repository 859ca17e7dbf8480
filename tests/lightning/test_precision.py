"""Every precision of Lightning on replicas gives Lightning's own result on one device at that precision."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.conftest import Classifier, make_loader, make_trainer, run, seeded, strategy_in

pytestmark = pytest.mark.usefixtures("hardware")

# Rounding of the format that is stored or multiplied in: slices of a batch are summed in another order.
TOLERANCES = {
    "32-true": 1e-5,
    "64-true": 1e-12,
    "bf16-mixed": 2e-2,
    "16-mixed": 2e-3,
    "bf16-true": 4e-2,
    "16-true": 5e-3,
}


def mixed_16(init_scale: float = 1024.0) -> MixedPrecision:
    """Lightning's own plugin; by name it would turn float16 into bfloat16 on a CPU."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=init_scale))


def on_one_device(precision: str) -> dict[str, Any]:
    return {"plugins": [mixed_16()]} if precision == "16-mixed" else {"precision": precision}


def assert_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    """Same names, dtypes and values, but for the number of rows that a slice logged."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if name != "logged/rows":
            assert ours[name].dtype == value.dtype, name
            limits = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(ours[name], value, **limits, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize("precision", TOLERANCES)
def test_parity_with_one_device(precision: str, num_replicas: int, execution: str) -> None:
    options = {"gradient_clip_val": 0.5}
    expected = run(seeded(), **on_one_device(precision), **options)
    strategy = strategy_in(execution)
    ours = run(seeded(), **on_one_device(precision), strategy=strategy, devices=num_replicas, **options)
    assert_near(ours, expected, TOLERANCES[precision])


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("reducer", ["naive", "colocate"])
def test_clipping_over_owners_on_several_devices_after_unscaling(reducer: str, algorithm: str) -> None:
    options = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": algorithm}
    expected = run(seeded(), plugins=[mixed_16()], **options)
    strategy = dpx.DPXStrategy(execution="inline", reducer=reducer)
    ours = run(seeded(), plugins=[mixed_16()], strategy=strategy, devices=3, **options)
    assert_near(ours, expected, 2e-3)


class InfinityInOneSlice(Classifier):
    """The gradients of the slice that holds row 0 overflow in the second step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        loss = F.cross_entropy(self.net(rows), labels)
        marked = (rows[:, 0] == 77).any()
        return loss * torch.where(marked, math.inf, 1.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watch(Callback):
    """Scale and weights after every step."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.weights: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: LightningModule, *_: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())
        self.weights.append(torch.cat([parameter.detach().flatten().cpu() for parameter in module.parameters()]))


@pytest.mark.parametrize("reducer", ["naive", "colocate", "collective"])
@pytest.mark.parametrize("communication_dtype", [None, "float16"])
@pytest.mark.parametrize("marked_row", [0, 15])
def test_infinity_in_one_replica_skips_once_and_halves_once(
    reducer: str, communication_dtype: Any, marked_row: int, execution: str
) -> None:
    rows, labels = torch.randn(48, 8), torch.randint(3, (48,))
    rows[16 + marked_row, 0] = 77
    watch = Watch()
    strategy = strategy_in(execution, reducer=reducer, communication_dtype=communication_dtype)
    trainer = make_trainer(
        strategy=strategy, devices=4, plugins=[mixed_16()], max_epochs=1, callbacks=[watch], limit_val_batches=0
    )
    torch.manual_seed(0)
    model = InfinityInOneSlice()
    loader = DataLoader(TensorDataset(rows, labels), 16)
    trainer.fit(model, loader, loader)
    assert watch.scales == [1024, 512, 512]
    assert torch.equal(watch.weights[0], watch.weights[1]), "nobody stepped"
    assert not torch.equal(watch.weights[1], watch.weights[2])
    assert watch.weights[2].isfinite().all()


@pytest.mark.parametrize(("saver", "loader"), [("dpx", "single"), ("single", "dpx"), ("dpx", "dpx")])
def test_the_loss_scale_survives_a_change_of_strategy(saver: str, loader: str, tmp_path: Any) -> None:
    class Own(MixedPrecision):
        """A subclass has a key of its own in Lightning's files."""

    def fit(kind: str, plugin: MixedPrecision, epochs: int, **options: Any) -> float:
        own = {"strategy": dpx.DPXStrategy(execution="inline"), "devices": 2} if kind == "dpx" else {}
        trainer = make_trainer(plugins=[plugin], max_epochs=epochs, **own)
        trainer.fit(seeded(), make_loader(), make_loader(), **options)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return float(trainer.precision_plugin.scaler.get_scale())

    plugin = mixed_16(512.0) if saver == "single" else Own("16-mixed", "cpu", torch.amp.GradScaler("cpu", 512.0))
    assert fit(saver, plugin, 1) == 512
    assert fit(loader, mixed_16(128.0), 2, ckpt_path=tmp_path / "1.ckpt") == 512


class SeesDtypes(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen = [str(batch[key].dtype).removeprefix("torch.") for key in ("rows", "weights", "labels")]
        return F.cross_entropy(self.net(batch["rows"]), batch["labels"])


def dictionaries() -> DataLoader[Any]:
    rows = [{"rows": torch.randn(8), "weights": torch.rand(1), "labels": index % 3} for index in range(16)]
    return DataLoader(rows, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["dpx", "auto"])
def test_inputs_have_dtypes_of_their_own(strategy: str) -> None:
    model = SeesDtypes()
    own = {"strategy": strategy, "devices": 2} if strategy == "dpx" else {}
    precision = dpx.DPXPrecision("64-true", input_dtypes={"weights": "float32", "labels": "int64"})
    make_trainer(plugins=[precision], max_epochs=1, limit_val_batches=0, **own).fit(
        model, dictionaries(), dictionaries()
    )
    assert model.seen == ["float64", "float32", "int64"]
    assert model.net[0].weight.dtype == torch.float64


def test_a_path_that_is_not_in_the_batch_is_refused() -> None:
    precision = dpx.DPXPrecision("32-true", input_dtypes={"images": "float16"})
    trainer = make_trainer(plugins=[precision], strategy="dpx", devices=2, limit_val_batches=0)
    with pytest.raises(dpx.ConfigurationError, match=r"input_dtypes names 'images', .* 'rows', 'weights', 'labels'"):
        trainer.fit(SeesDtypes(), dictionaries(), dictionaries())


@pytest.mark.host
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("8-mixed",), r"precision='8-mixed' is not allowed; choose one of '32-true'"),
        (("32-true", {"0": "float8"}), r"input_dtypes\['0'\]='float8' is not allowed"),
        ((dpx.DPXPrecision(),), "cannot wrap another one"),
    ],
)
def test_bad_arguments(arguments: Any, message: str) -> None:
    with pytest.raises(dpx.ConfigurationError, match=message):
        dpx.DPXPrecision(*arguments)


@pytest.mark.host
@pytest.mark.parametrize("name", ["32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"])
def test_names_are_lightnings(name: str) -> None:
    assert dpx.DPXPrecision(name).precision == name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.host
@pytest.mark.parametrize("precision", TOLERANCES)
def test_parity_on_cuda(precision: str) -> None:
    expected = run(seeded(), precision=precision, accelerator="cuda")
    strategy = dpx.DPXStrategy(execution="inline", parallel_devices=[torch.device("cuda:0")] * 2)
    ours = run(seeded(), precision=precision, accelerator="cuda", strategy=strategy)
    assert_near(ours, expected, 5e-2)
