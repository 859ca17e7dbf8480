"""Combinations of settings: each trains to the weights of one device, or is refused at setup with clear words."""

from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import lightning_dpx as dpx
from tests.conftest import SIMULATED, Classifier, make_loader, make_trainer, seeded

TOLERANCES = {"32-true": 2e-5, "64-true": 1e-10, "bf16-mixed": 4e-2, "16-true": 2e-2}
refused: list[str] = []


@cache
def on_one_device(precision: str, accumulate: int, clip: float | None) -> dict[str, torch.Tensor]:
    return trained({}, precision, accumulate, clip)


def trained(options: dict[str, Any], precision: str, accumulate: int, clip: float | None) -> dict[str, torch.Tensor]:
    model = seeded()
    trainer = make_trainer(
        precision=precision, accumulate_grad_batches=accumulate, gradient_clip_val=clip, max_epochs=1, **options
    )
    trainer.fit(model, make_loader(48), make_loader(16))
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


@cache
def plan() -> dpx.MemoryPlan:
    return dpx.search_plan(Classifier(), next(iter(make_loader())))


settings_of_a_run = st.fixed_dictionaries(
    {
        "num_replicas": st.integers(1, 4),
        "hardware": st.sampled_from(["cpu"] if SIMULATED else ["cpu", "sim"]),
        "workload": st.sampled_from(["even", "auto", "a list", "a list", "a list that is too long"]),
        "shares": st.lists(st.integers(1, 5), min_size=5, max_size=5),
        "reducer": st.sampled_from(["auto", "naive", "collective", "hierarchical", "colocate", "nccl"]),
        "execution": st.sampled_from(["auto", "inline", "threads"]),
        "gradient_buckets": st.sampled_from([0, 1, 8]),
        "communication_dtype": st.sampled_from([None, None, "bfloat16"]),
        "buffers": st.sampled_from(["broadcast", "mean"]),
        "verify": st.sampled_from(["warn", "off", "off"]),  # a check takes as long as the run
        "planned": st.sampled_from([False, False, True]),
        "shifted": st.sampled_from([False, False, True]),
        "precision": st.sampled_from(list(TOLERANCES)),
        "accumulate": st.sampled_from([1, 2]),
        "clip": st.sampled_from([None, 0.1]),
    }
)


def check(chosen: dict[str, Any]) -> None:
    chosen = dict(chosen)
    numerics = {key: chosen.pop(key) for key in ("precision", "accumulate", "clip")}
    num_replicas, hardware = chosen.pop("num_replicas"), chosen.pop("hardware")
    if chosen.pop("shifted"):
        chosen |= {"shifts": {f"{hardware}:0": "sim:7"}, "shift_activations": ["net.2"]}
    shares, planned = chosen.pop("shares"), chosen.pop("planned")
    if chosen["workload"].startswith("a list"):
        chosen["workload"] = shares if "long" in chosen["workload"] else shares[:num_replicas]
    coarse = 2e-2 if chosen["communication_dtype"] else 0
    tolerance = max(TOLERANCES[numerics["precision"]], coarse)
    try:
        strategy = dpx.DPXStrategy(**chosen, plan=plan() if planned else None)
        ours = trained({"strategy": strategy, "devices": num_replicas, "accelerator": hardware}, **numerics)
    except dpx.DPXError as error:
        refused.append(str(error))
        return
    for name, value in on_one_device(**numerics).items():
        assert ours[name].dtype == value.dtype
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:dpx. the activations")
@pytest.mark.parametrize("number", [80, pytest.param(250, marks=pytest.mark.slow)])
def test_combinations_train_to_the_weights_of_one_device_or_are_refused(number: int) -> None:
    refused.clear()
    options = settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    options(given(settings_of_a_run)(check))()
    assert 0 < len(refused) < number // 2
    reasons = ("workload has", "needs CUDA devices", "nccl", "shifts", "made for")
    for message in refused:
        assert any(reason in message for reason in reasons), message
