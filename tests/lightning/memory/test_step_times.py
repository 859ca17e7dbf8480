"""The time of a step that a dry run predicts is that of simulated devices with the same rates."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassF1Score

from lightning_dpx.errors import UnsupportedError
from lightning_dpx.lightning import Settings, dry_run
from lightning_dpx.lightning.memory.step_times import Machines, name_of_reducer
from lightning_dpx.memory.profile.roofline import Rates
from lightning_dpx.reducers import NaiveReducer
from lightning_dpx.step_time import Link, StepTime
from tests.conftest import SIMULATED, make_trainer
from tests.test_step_time import RATE, TOLERANCE, WIDTH, Wide, seconds_on_simulated

sim_only = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
# As a simulated device counts: only bytes, and nothing to start an operator.
RATES = Rates(flops=1e30, bytes=1e11, host_bytes=1e10, start=0.0)


def steps_of(
    module: LightningModule, num_devices: int = 4, reducer: Any = "collective", rows: int = 16, **options: Any
) -> list[StepTime]:
    devices = tuple(torch.device("cuda", index) for index in range(num_devices))
    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=options.pop("accumulate", 1))
    given = {"rates": RATES, "link": Link(bytes_per_second=RATE), "network": Link(bytes_per_second=1e9)}
    settings = Settings(devices, reducer=reducer, machines=Machines(**{**given, **options}))
    batches = [[torch.randn(rows * num_devices, WIDTH)]] * 3
    found = dry_run(trainer, module, DataLoader(batches, batch_size=None), settings)
    return list(found.steps)


@sim_only
@pytest.mark.parametrize(("num_devices", "reducer"), [(1, "naive"), (4, "collective"), (8, "colocate")])
def test_a_dry_run_predicts_the_clocks_of_simulated_devices(sim: Any, num_devices: int, reducer: str) -> None:
    measured = seconds_on_simulated(num_devices, reducer)
    (step,) = steps_of(Wide(), num_devices, reducer)
    # On one device, rows and what else is copied to it are a larger part of the step.
    assert step.seconds_in_line == pytest.approx(measured, rel=TOLERANCE if num_devices > 1 else 4 * TOLERANCE)
    assert step.seconds <= step.seconds_in_line


class Halves(Wide):
    """Parameters of half precision, whose gradients are summed, and travel, as float32."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([batch[0].to(torch.bfloat16)], batch_idx)


def test_halves_travel_as_floats_and_go_back_as_halves() -> None:
    whole = steps_of(Wide(), most_nodes=2)[1]
    half = steps_of(Halves(), most_nodes=2)[1]
    assert half.between_nodes == whole.between_nodes
    assert half.reduction + half.hidden == pytest.approx(whole.reduction + whole.hidden)
    assert half.parameters == pytest.approx(whole.parameters / 2)
    assert half.compute < whole.compute


def test_what_is_told_to_travel_in_less_does() -> None:
    whole = steps_of(Wide(), most_nodes=2)[1]
    narrow = steps_of(Wide(), most_nodes=2, wire_dtype=torch.bfloat16)[1]
    assert narrow.reduction + narrow.hidden == pytest.approx((whole.reduction + whole.hidden) / 2)
    assert narrow.between_nodes == pytest.approx(whole.between_nodes / 2, rel=0.01)
    hooked = steps_of(Wide(), most_nodes=2, communication_hook="bf16")[1]
    assert hooked.between_nodes == narrow.between_nodes
    with pytest.raises(UnsupportedError, match="communication_hook='powersgd' sends between nodes is not known"):
        steps_of(Wide(), communication_hook="powersgd")


def test_without_buckets_nothing_is_hidden() -> None:
    (early,) = steps_of(Wide())
    (late,) = steps_of(Wide(), gradient_buckets=0)
    assert early.hidden > 0
    assert late.hidden == 0
    assert late.reduction == pytest.approx(early.reduction + early.hidden)


class Frozen(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.net[:4].requires_grad_(False)


def test_frozen_parameters_have_no_gradients_that_travel() -> None:
    frozen, whole = steps_of(Frozen(), most_nodes=2)[1], steps_of(Wide(), most_nodes=2)[1]
    assert frozen.between_nodes == pytest.approx(whole.between_nodes / 2, rel=0.01)
    assert frozen.reduction + frozen.hidden == pytest.approx((whole.reduction + whole.hidden) / 2)


class Looks(Wide):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() < 1e9 else loss * 0


@pytest.mark.filterwarnings("ignore:Fake tensors cannot run this step of Looks .* a real one runs on few rows")
def test_a_step_that_looks_at_numbers_has_the_times_of_real_ones_on_few_rows() -> None:
    (usual,) = steps_of(Wide(), rows=64)
    with pytest.warns(UserWarning, match=r"this step of Looks .*: its time is that of .* few of its 64 rows"):
        (looks,) = steps_of(Looks(), rows=64)
    assert looks.compute == pytest.approx(usual.compute, rel=0.01)
    assert looks.reduction + looks.hidden == pytest.approx(usual.reduction + usual.hidden)
    assert looks.hidden > 0, "when each gradient is there is known as well"


class Classifies(Wide):
    """Logs a metric whose states are counts by class, of which fake tensors do not know how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.score = MulticlassF1Score(num_classes=WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scores = self.net(batch[0]).detach()
        self.score(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))
        self.log("score", self.score)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Fake tensors cannot run this step of Classifies")
def test_a_step_with_a_metric_of_classes_has_times() -> None:
    (usual,) = steps_of(Wide())
    (counts,) = steps_of(Classifies())
    assert counts.compute > usual.compute, "the metric's operators count"
    assert counts.reduction + counts.hidden == pytest.approx(usual.reduction + usual.hidden)


class ByHand(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_a_step_by_hand_hides_nothing() -> None:
    (step,) = steps_of(ByHand())
    assert step.hidden == 0
    assert step.reduction > 0


def test_names_of_reducers_are_those_that_a_run_would_have() -> None:
    cuda = [torch.device("cuda", index) for index in range(2)]
    assert name_of_reducer("auto", cuda) == "nccl"
    assert name_of_reducer("auto", [torch.device("cpu")] * 2) == "collective"
    assert name_of_reducer(NaiveReducer(cuda), cuda) == "naive"
    assert name_of_reducer("colocate", cuda) == "colocate"


def test_one_device_sends_nothing() -> None:
    (step,) = steps_of(Wide(), num_devices=1)
    assert step.reduction == step.hidden == step.parameters == step.between_nodes == 0
    assert step.efficiency == 1


def test_batches_that_accumulate_are_computed_one_after_the_other() -> None:
    (one,) = steps_of(Wide())
    (three,) = steps_of(Wide(), accumulate=3)
    assert 2 * one.compute < three.compute < 3 * one.compute, "the optimizer steps once"
    assert three.samples == 3 * one.samples
    assert three.reduction == pytest.approx(one.reduction)
