"""A step that does not fit is planned and repeated, and nothing differs."""

import gc
from functools import partial
from typing import Any

import torch

import lightning_dpx as dpx
from tests.conftest import make_trainer
from tests.gpu.place import Place
from tests.lightning.memory.test_planning import Tower, loader

_ROWS = {"cuda": 2**17, "sim": 2**11}


def replanned(place: Place) -> dict[str, Any]:
    """With half of what a step takes, ``on_oom="replan"`` trains to the same weights."""
    expected, peak = _fit(place, verify="off")
    room = _limit(place, peak // 2)
    try:
        given, planned_peak = _fit(place, verify="off", on_oom="replan")
    finally:
        _no_limit(place)
    worst = max(float((given[name] - expected[name]).abs().max()) for name in expected)
    assert worst == 0.0, f"off by {worst:.1e}"
    return {"unplanned MiB": peak / 2**20, "room MiB": room / 2**20, "planned MiB": planned_peak / 2**20}


def _fit(place: Place, **options: Any) -> tuple[dict[str, torch.Tensor], int]:
    torch.manual_seed(0)
    model = Tower(dropout=0.0)
    strategy = dpx.DPXStrategy(**options)
    trainer = make_trainer(strategy=strategy, accelerator=place.accelerator, max_epochs=1, devices=1)
    data = loader(rows=_ROWS[place.kind], batches=2)
    peak = place.peak_of(partial(trainer.fit, model, data))
    weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    model.cpu()
    gc.collect()
    place.module.empty_cache()
    return weights, peak


def _limit(place: Place, num_bytes: int) -> int:
    if place.is_real:
        total = torch.cuda.get_device_properties(place.device).total_memory
        torch.cuda.set_per_process_memory_fraction(num_bytes / total, place.device)
    else:
        dpx.simulate(2, memory=[num_bytes, num_bytes])
    return num_bytes


def _no_limit(place: Place) -> None:
    if place.is_real:
        torch.cuda.set_per_process_memory_fraction(1.0, place.device)
    else:
        dpx.simulate(2)
