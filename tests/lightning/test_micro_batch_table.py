"""Other tests' small modules, each in micro-batches: equal to one device, or announced and then equal.

The modules are those of the tests of replicas: hooks, gradients, writes into batches, steps by hand, Python state,
iterators, metrics. Every second one meets one setting here, and all meet all of them under ``-m slow``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.nn import functional as F

import lightning_dpx as dpx
import tests.conftest as shared
from tests.conftest import SIMULATED, Classifier, assert_equal, make_loader, make_trainer
from tests.lightning import test_gradient_hooks as hooks
from tests.lightning.batch_writes import test_batch_writes as writes
from tests.lightning.manual import test_manual_gradients as by_hand
from tests.lightning.manual.test_manual import GAN, SAMByTwoSteps, WithSAM
from tests.lightning.metrics.test_metrics import Measured
from tests.lightning.test_iterators import InAnObject, OfAGenerator, OfAList
from tests.lightning.test_python_state import ClosesOverItself, Schedules
from tests.lightning.test_unregistered_tensors import Temperature, TwoOptimizers

Values = dict[str, torch.Tensor]
Trained = Callable[..., Values]  # called with a class of modules and a trainer's options

# Said of micro-batches that are not run as such; what the run gives is compared all the same.
pytestmark = [
    pytest.mark.filterwarnings("ignore:dpx. micro_batches cuts no slices here"),
    pytest.mark.filterwarnings("ignore:dpx. micro-batches wait for each other"),
    pytest.mark.filterwarnings("ignore:dpx. micro-batches have waited for each other"),
    pytest.mark.filterwarnings("ignore:.*gets all of its batches whole"),
    pytest.mark.filterwarnings("ignore:.*gets a batch whole"),
]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where micro-batches run."""

    micro_batches: int
    num_devices: int
    execution: str
    hardware: str = "cpu"

    def __str__(self) -> str:
        return f"M{self.micro_batches}-K{self.num_devices}-{self.execution}-{self.hardware}"


SETTINGS = [
    Setting(micro_batches=2, num_devices=1, execution="auto"),
    Setting(micro_batches=2, num_devices=2, execution="threads"),
    Setting(micro_batches=3, num_devices=1, execution="auto", hardware="sim"),
    Setting(micro_batches=3, num_devices=2, execution="inline"),
    Setting(micro_batches=3, num_devices=1, execution="inline"),
    Setting(micro_batches=2, num_devices=2, execution="auto", hardware="sim"),
]


def fitted(kind: type[LightningModule], **options: Any) -> Values:
    """Weights, buffers and logged values after two epochs with batches of 13, 13 and 5 rows."""
    torch.manual_seed(0)
    model = kind()
    trainer = make_trainer(**options)
    evaluates = kind.validation_step is not LightningModule.validation_step
    trainer.fit(model, make_loader(31, 13), make_loader(31, 13) if evaluates else None)
    seen = {**model.state_dict(), **trainer.callback_metrics}
    return {name: torch.as_tensor(value).detach().cpu().clone() for name, value in seen.items()}


def fitted_by_hand(kind: type[LightningModule], **options: Any) -> Values:
    """The same of what is optimized by hand, of 21 rows."""
    return by_hand.trained(kind, 21, **options)


class Squares(Classifier):
    """The root of a mean, which is no mean of roots."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1]).sqrt()


class RemembersAMean(Classifier):
    """A hidden state that goes from step to step; that of the batch is the mean of those of slices."""

    state = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits + self.state, batch[1])
        self.state = self.summary(logits.detach())
        return loss

    def summary(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.mean(0)


class Remembers(RemembersAMean):
    """A hidden state that is that of a slice."""

    def summary(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.amax(0) * logits.mean(0)


KINDS: list[tuple[Trained, type[LightningModule]]] = [
    *((hooks.trained, kind) for kind in hooks.KINDS),
    *((writes.outcome, kind) for kind in writes.KINDS),
    *((fitted_by_hand, kind) for kind in by_hand.KINDS),
    *((fitted, kind) for kind in (GAN, WithSAM, SAMByTwoSteps)),
    *((fitted, kind) for kind in (Measured, Temperature, TwoOptimizers, ClosesOverItself, Schedules, RemembersAMean)),
    *((fitted, kind) for kind in (OfAList, InAnObject, OfAGenerator)),
]


def _cases(kinds: Sequence[tuple[Trained, type[LightningModule]]]) -> list[Any]:
    """Every second module in one of the settings, and all in all of them where there is time."""
    cases = []
    for place, (trained, kind) in enumerate(kinds):
        for index, setting in enumerate(SETTINGS):
            is_quick = place % 2 == 0 and index == place // 2 % len(SETTINGS)
            marks = () if is_quick else pytest.mark.slow
            name = f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}-{setting}"
            cases.append(pytest.param(trained, kind, setting, id=name, marks=marks))
    return cases


@cache
def of_one_device(trained: Trained, kind: type[LightningModule]) -> Values:
    return trained(kind)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """A trainer's options for a setting."""

    def options(setting: Setting, **own: Any) -> dict[str, Any]:
        if setting.hardware == "sim" and SIMULATED:
            pytest.skip(SIMULATED)
        monkeypatch.setattr(shared, "_hardware", setting.hardware)
        strategy = dpx.DPXStrategy(execution=setting.execution, micro_batches=setting.micro_batches, **own)
        return {"strategy": strategy, "devices": setting.num_devices}

    return options


@pytest.mark.parametrize(("trained", "kind", "setting"), _cases(KINDS))
def test_micro_batches_give_what_one_device_gives(trained, kind, setting, on) -> None:
    expected = of_one_device(trained, kind)
    assert_equal(trained(kind, **on(setting)), expected)


@pytest.mark.parametrize(
    ("trained", "kind", "setting"),
    _cases([(fitted, Squares), (fitted, Remembers)]),
)
def test_what_micro_batches_cannot_give_is_announced_and_falls_back(trained, kind, setting, on) -> None:
    expected = of_one_device(trained, kind)
    options = on(setting, verify="first")
    with pytest.warns(UserWarning, match="training_step gets all of its batches whole"):
        ours = trained(kind, **options)
    assert_equal(ours, expected)
