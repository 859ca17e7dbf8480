"""Weights, logs and predictions on the device beside those of the CPU."""

from typing import Any

import torch

import lightning_dpx as dpx
from tests.conftest import make_loader, make_trainer, seeded
from tests.gpu.place import Place

_TOLERANCE = 2e-5  # float32 without TF32: kernels add up in another order


def one_device(place: Place) -> dict[str, Any]:
    """``dpx`` with one device."""
    return {name: _largest_difference(place, optimizer=name, replicas=1) for name in ("sgd", "adam")}


def two_replicas_on_one_device(place: Place) -> dict[str, Any]:
    """Two replicas that share the device, one after the other and in threads, with every reducer that can."""
    figures = {}
    for execution in ("inline", "threads"):
        for reducer in ("naive", "collective", "colocate"):
            found = _largest_difference(place, optimizer="sgd", replicas=2, execution=execution, reducer=reducer)
            figures[f"{execution}, {reducer}"] = found
    return figures


def _largest_difference(place: Place, *, optimizer: str, replicas: int, **options: Any) -> float:
    strategy = dpx.DPXStrategy(parallel_devices=[place.device] * replicas, **options)
    ours = _fit_and_predict(optimizer, strategy=strategy, accelerator=place.accelerator)
    theirs = _fit_and_predict(optimizer)
    assert ours.keys() == theirs.keys()
    differences = [float((ours[name] - theirs[name]).abs().max()) for name in ours]
    worst = max(differences)
    assert worst <= _TOLERANCE, f"{optimizer}, {replicas} replicas, {options}: off by {worst:.1e}"
    return worst


def _fit_and_predict(optimizer: str, **options: Any) -> dict[str, torch.Tensor]:
    model, loader, trainer = seeded(optimizer=optimizer), make_loader(), make_trainer(**options)
    trainer.fit(model, loader, loader)
    found = {name: value.detach() for name, value in model.state_dict().items()}
    found["val_loss"] = torch.as_tensor(trainer.callback_metrics["val_loss"])
    found["predictions"] = torch.cat(trainer.predict(model, loader))
    return {name: value.cpu() for name, value in found.items()}
