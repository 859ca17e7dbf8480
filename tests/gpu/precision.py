"""Half precision with a gradient scaler, where one replica's gradients overflow."""

from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.conftest import make_trainer
from tests.gpu.place import Place
from tests.lightning.test_precision import InfinityInOneSlice

_TOLERANCE = 5e-3  # float16, as far as two orders of additions are apart
_SCALE = 1024.0


def one_replica_overflows(place: Place) -> dict[str, Any]:
    """The step is skipped once, for all; scales and weights are those of one device."""
    ours, our_scale = _fit(place, replicas=2)
    theirs, their_scale = _fit(place, replicas=1)
    assert our_scale == their_scale == _SCALE / 2, f"scale {our_scale}, on one device {their_scale}"
    worst = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    assert worst <= _TOLERANCE, f"off by {worst:.1e}"
    return {"largest difference": worst, "scale": our_scale}


def _fit(place: Place, *, replicas: int) -> tuple[dict[str, torch.Tensor], float]:
    kind = place.kind if place.is_real else "cpu"
    precision = MixedPrecision("16-mixed", kind, torch.amp.GradScaler(kind, init_scale=_SCALE))
    strategy = dpx.DPXStrategy(parallel_devices=[place.device] * replicas, execution="inline", verify="off")
    torch.manual_seed(0)
    model = InfinityInOneSlice()
    trainer = make_trainer(
        strategy=strategy, accelerator=place.accelerator, plugins=[precision], max_epochs=1, limit_val_batches=0
    )
    trainer.fit(model, _loader())
    scale = float(trainer.precision_plugin.scaler.get_scale())
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}, scale


def _loader() -> DataLoader[Any]:
    """Four batches; the last row of the second is marked, so that the last replica alone overflows."""
    generator = torch.Generator().manual_seed(2)
    rows, labels = torch.randn(64, 8, generator=generator), torch.randint(3, (64,), generator=generator)
    rows[31, 0] = 77
    return DataLoader(TensorDataset(rows, labels), batch_size=16)
