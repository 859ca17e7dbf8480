"""The strategy beside other people's plugins, environments and exceptions."""

import copy
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision

import lightning_dpx as dpx
from tests.conftest import Classifier, make_loader, make_trainer, seeded
from tests.lightning.several_replicas import on_replicas


class Own(MixedPrecision):
    """A user's plugin with something of its own."""

    def __init__(self) -> None:
        super().__init__("bf16-mixed", "cpu")
        self.threshold = 3
        self.steps = 0

    def told(self) -> str:
        return f"{self.threshold} {self.precision}"

    def train_step_context(self) -> Any:
        self.steps += 1
        return super().train_step_context()


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        ("32-true", Precision),
        ("64-true", DoublePrecision),
        ("bf16-true", HalfPrecision),
        ("bf16-mixed", MixedPrecision),
    ],
)
def test_the_precision_plugin_is_of_the_class_that_it_wraps(precision: Any, kind: type) -> None:
    plugin = make_trainer(precision=precision, **on_replicas()).precision_plugin
    assert isinstance(plugin, kind)
    assert isinstance(plugin, dpx.DPXPrecision)
    assert isinstance(plugin, Precision)
    assert isinstance(plugin, MixedPrecision) == (kind is MixedPrecision)


def test_the_precision_plugin_shows_what_it_wraps() -> None:
    trainer = make_trainer(plugins=Own(), max_epochs=1, **on_replicas())
    plugin: Any = trainer.precision_plugin
    assert isinstance(plugin, Own)
    assert plugin.told() == "3 bf16-mixed"
    plugin.threshold = 4
    assert plugin.wrapped.threshold == 4
    with pytest.raises(AttributeError, match="missing"):
        _ = plugin.missing
    trainer.fit(seeded(), make_loader(16), make_loader(16))
    assert plugin.steps == 1


def test_the_precision_plugin_is_pickled_and_copied_as_what_it_is() -> None:
    plugin: Any = dpx.DPXPrecision("bf16-mixed", {"0": "float32"})
    for other in (pickle.loads(pickle.dumps(plugin)), copy.deepcopy(plugin)):
        assert type(other) is dpx.DPXPrecision
        assert isinstance(other, MixedPrecision)
        assert other.precision == "bf16-mixed"
        assert other.convert_input([torch.ones(1).double()])[0].dtype == torch.float32


class MuteError(Exception):
    """Cannot be told."""

    def __str__(self) -> str:
        raise ValueError("no words")


class FailsWithoutWords(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2:  # by then replicas in threads no longer take turns, and all of them fail
            raise MuteError
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("execution", ["inline", "threads", "auto"])
def test_an_exception_that_cannot_be_told_stays_the_one_that_is_raised(execution: Any) -> None:
    trainer = make_trainer(strategy=dpx.DPXStrategy(execution=execution), devices=2, accelerator="cpu")
    with pytest.raises(MuteError):
        trainer.fit(FailsWithoutWords(), make_loader(), make_loader())
