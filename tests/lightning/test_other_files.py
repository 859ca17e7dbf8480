"""What a step keeps in another file of the user's: as on one device, or announced and then so."""

import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import make_loader, make_trainer

ROWS = 13
ELSEWHERE: Any = types.ModuleType("elsewhere")
WHOLE = "gets all of its batches whole"


@pytest.fixture(autouse=True)
def _elsewhere() -> None:
    """The file begins anew."""
    begin()


def begin() -> None:
    path = Path(__file__).parent.parent / "other_file.py"
    exec(compile(path.read_text(), str(path), "exec"), vars(ELSEWHERE))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]) * self.factor(batch), batch[1])

    def factor(self, batch: Any) -> float:
        raise NotImplementedError

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class KeyedByAPart(Model):
    def on_fit_start(self) -> None:
        ELSEWHERE.RATES[self.net.weight] = 2.0

    def factor(self, batch: Any) -> float:
        return float(ELSEWHERE.rate(self.net.weight))


class KeyedByItsText(Model):
    def on_fit_start(self) -> None:
        ELSEWHERE.RATES[f"{id(self.net.weight)}_rate"] = 2.0

    def factor(self, batch: Any) -> float:
        return float(ELSEWHERE.RATES.get(f"{id(self.net.weight)}_rate", 1.0))


class Draws(Model):
    def factor(self, batch: Any) -> float:
        return 1.0 + float(ELSEWHERE.draw())


class Measures(Model):
    def factor(self, batch: Any) -> float:
        self.log("error", ELSEWHERE.note(batch[0][:, 0], batch[1].double()))
        return 1.0


@pytest.mark.parametrize(("options", "devices"), [({"execution": "inline"}, 2), ({"execution": "threads"}, 3)])
@pytest.mark.parametrize(
    ("kind", "is_whole"),
    [(KeyedByAPart, True), (KeyedByItsText, True), (Draws, False), (Measures, False)],
)
def test_what_is_kept_in_another_file_is_that_of_one_device(
    kind: type[Model], is_whole: bool, options: Any, devices: int
) -> None:
    expected, _ = fitted(kind)
    begin()
    found, said = fitted(kind, devices, **options)
    assert found == pytest.approx(expected, rel=1e-6)
    assert (WHOLE in said) == is_whole


def fitted(kind: type[Model], devices: int = 0, **options: Any) -> tuple[list[float], str]:
    """Weights, logged values and what the file has at the end, and what was warned of."""
    torch.manual_seed(0)
    model = kind()
    where = {"strategy": dpx.DPXStrategy(**options), "devices": devices} if devices else {}
    trainer = make_trainer(max_epochs=2, precision="64-true", **where)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, make_loader(4 * ROWS, ROWS))
    said = "\n".join(str(one.message) for one in caught if "dpx: " in str(one.message))
    weights = [number for weight in model.parameters() for number in weight.double().flatten().tolist()]
    logged = [float(value) for value in trainer.callback_metrics.values()]
    return [*weights, *logged, float(ELSEWHERE.ERROR.total), ELSEWHERE.draw()], said
