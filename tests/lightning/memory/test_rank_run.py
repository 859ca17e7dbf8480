"""What is predicted of a rank is what it allocates: among ranks that are not there, and in two real processes."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import lightning_dpx as dpx
from lightning_dpx.bench.allocations import peak_of_everything
from lightning_dpx.lightning import DeviceForecast, Settings, dry_run
from lightning_dpx.lightning.memory.rank_run import ShardRanks, rank_run
from lightning_dpx.memory.absent_ranks import absent_ranks
from tests.conftest import make_trainer
from tests.lightning.memory.rank_program import InHalves, Sharded, Whole, Words, life, sharded
from tests.programs import start

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
UNITS = ("model.layers.*", "model")


def rank(
    model: Any = None, ranks: int = 2, units: tuple[str, ...] = (), device: torch.device = CUDA, **options: Any
) -> DeviceForecast:
    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=options.pop("accumulate", 1))
    settings = Settings((device,), reducer="naive", **options)
    (forecast,) = rank_run(trainer, model or Sharded(), Words(), settings, ShardRanks(ranks, units)).forecasts
    assert not distributed.is_initialized()
    return forecast


@pytest.fixture(scope="module")
def predicted() -> dict[str, DeviceForecast]:
    """For this machine's CPU, as two processes are about to be measured there."""
    return {
        "fsdp2": rank(device=CPU),
        "kept": rank(device=CPU, accumulate=2),
        "halves": rank(InHalves(), device=CPU),
        "planned": rank(device=CPU, budget=0.8),
        "planned_halves": rank(InHalves(), device=CPU, budget=0.8),
    }


@pytest.fixture(scope="module")
def measured(predicted: dict[str, DeviceForecast], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    """What two processes print, one of whose runs follows the predicted plan."""
    folder = tmp_path_factory.mktemp("ranks")
    plan = predicted["planned"].plan
    assert plan is not None
    plan.save(folder / "plan.yaml")
    program = Path(__file__).with_name("rank_program.py")
    processes = [start(program, one, folder / "store", folder) for one in range(2)]
    printed = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, printed, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in printed]


KINDS = ["fsdp2", "kept", "halves", "planned"]


@pytest.mark.host
@pytest.mark.parametrize("kind", [*KINDS, "planned_halves"])
def test_real_steps_of_a_rank_take_what_was_predicted(predicted: dict[str, DeviceForecast], kind: str) -> None:
    """The other rank is not there, but all that this one allocates is."""
    plan = predicted[kind].plan if kind.startswith("planned") else None
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)} if kind.endswith("halves") else {}
    with absent_ranks(2) as mesh:
        run = partial(life, lambda model: sharded(model, mesh["data_parallel"], **policy), plan, keeps=kind == "kept")
        run()  # what a process makes once
        assert predicted[kind].peak == pytest.approx(peak_of_everything(run), rel=0.01)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_of_fsdp2_takes_what_was_predicted(
    predicted: dict[str, DeviceForecast], measured: list[dict[str, int]], kind: str
) -> None:
    for one in measured:
        assert predicted[kind].peak == pytest.approx(one[kind], rel=0.01)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_rank_of_ddp_takes_what_was_predicted(measured: list[dict[str, int]]) -> None:
    settings = Settings((CPU,), reducer="naive")
    for kind, keeps_buckets in (("ddp_views", False), ("ddp", True)):
        of_kind = replace(settings, keeps_buckets=keeps_buckets)
        (forecast,) = dry_run(make_trainer(max_epochs=1), Whole(), Words(), of_kind).forecasts
        # Gradients count all through the step; DDP's own go between steps, and buckets stay.
        gone = forecast.gradients if keeps_buckets else 0
        for one in measured:
            assert forecast.peak - gone == pytest.approx(one[kind], rel=0.01)


def test_buckets_of_ddp_hold_each_gradient_once_more() -> None:
    found = []
    for keeps_buckets in (False, True):
        settings = Settings((CUDA,), reducer="naive", keeps_buckets=keeps_buckets)
        found += dry_run(make_trainer(max_epochs=1), Whole(), Words(), settings).forecasts
    views, buckets = found
    assert views.communication == 0
    assert buckets.communication == buckets.gradients == views.gradients
    assert buckets.peak == views.peak + views.gradients


@pytest.mark.parametrize(("whole", "planned"), [("fsdp2", "planned"), ("halves", "planned_halves")])
def test_a_plan_makes_the_predicted_peak_smaller(
    predicted: dict[str, DeviceForecast], whole: str, planned: str
) -> None:
    found = predicted[planned]
    assert found.plan is not None
    assert found.plan.num_recomputed > 0
    assert found.fits
    assert found.peak <= found.budget < 0.81 * predicted[whole].peak


def test_units_of_the_command_line_are_those_of_configure_model() -> None:
    # Plans name the model that they are for.
    ours, theirs = (replace(one, plan=None) for one in (rank(Whole(), units=UNITS), rank()))
    assert ours == theirs


def test_more_ranks_hold_less_each_with_padding_and_gather_as_much() -> None:
    few, many = rank(), rank(ranks=64)
    shards = 0
    for parameter in Whole().parameters():
        shards += -(-parameter.size(0) // 64) * parameter[0].numel() * 4
    assert many.parameters == shards > few.parameters / 32
    assert many.device == "rank 0 of 64"
    assert many.unplanned == few.unplanned
    assert many.communication >= 0.9 * few.communication


@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_offloaded_to_the_host_takes_nothing_of_the_device(pins: bool, accumulate: int) -> None:
    """Also where there is no accelerator, for which memory would be pinned."""

    class OnHost(Whole):
        def configure_model(self) -> None:
            sharded(self.model, self.device_mesh["data_parallel"], offload_policy=CPUOffloadPolicy(pin_memory=pins))

    found, usual = rank(OnHost(), accumulate=accumulate), rank(accumulate=accumulate)
    assert (found.parameters, found.gradients, found.optimizer) == (0, 0, 0)
    assert found.unplanned == usual.unplanned
    assert found.unplanned < found.peak <= usual.peak - usual.parameters - usual.gradients - usual.optimizer


def test_a_budget_that_cannot_be_met_says_what_is_needed() -> None:
    forecast = rank(budget=2**20)
    assert not forecast.fits
    assert forecast.smallest > 2**20


@pytest.mark.parametrize(
    ("model", "units", "said"),
    [
        (
            Whole,
            (),
            "not known what fully_shard is called on: configure_model.. of Whole is not there. Name the modules",
        ),
        (Sharded, UNITS, "configure_model.. of Sharded has called fully_shard already; leave out --shard-units"),
        (Whole, ("model.layer.*",), r"--shard-units model.layer.\* names no module of Whole; it has model, model.emb"),
        (
            Whole,
            ("model.layers.*",),
            r"model.embedding.weight, .* are in no unit .*such as --shard-units model.embedding",
        ),
    ],
)
def test_what_is_not_known_is_asked_for(model: Any, units: tuple[str, ...], said: str) -> None:
    with pytest.raises(dpx.ConfigurationError, match=said):
        rank(model(), units=units)


class ByHand(Sharded):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Looks(Sharded):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() < 1e9 else loss * 0


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (ByHand, {}, "steps with automatic optimization only"),
        (Looks, {}, r"fake tensors, and they cannot run this step of Looks .*Take what needs numbers out"),
    ],
)
def test_steps_that_cannot_be_predicted_say_why(model: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(dpx.PlanError, match=said):
        rank(model(), **options)
