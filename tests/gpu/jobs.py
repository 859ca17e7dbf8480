"""Models of libraries under a Trainer, with every option that touches the device, beside Lightning's own strategy."""

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from tests.gpu.models import OneOutput
from tests.gpu.place import Place

_EXACT = 2e-4  # of the largest weight: kernels of other shapes add up in another order, and steps blow that up
_HALF = 3e-2  # where activations have 8 or 11 bits
_STEPS = 3
_OVER = 1.02  # of a budget
_SHARE = 0.8  # of the bytes that the same job takes without a budget


@dataclass(frozen=True, slots=True)
class Job:
    """A run of ``dpx``, and what it may differ by from one on one device without it.

    Attributes:
        replicas: How many, on one device.
        strategy: Options of :class:`DPXStrategy`.
        trainer: Of both Trainers.
        tolerance: Of the largest weight; 0 for the same bits, where the run without ``dpx`` repeats its own.
    """

    replicas: int = 1
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    tolerance: float = _EXACT


_MONITORS = {"callbacks": [dpx.DeviceMemoryMonitor()]}
JOBS = {
    "one device": Job(tolerance=0.0),
    "budget": Job(strategy={"memory_budget": _SHARE, "micro_batches": 1}, tolerance=0.0),
    "budget, M chosen": Job(strategy={"memory_budget": _SHARE}),
    "budget, monitors": Job(strategy={"memory_budget": _SHARE}, trainer=_MONITORS),
    "micro-batches": Job(strategy={"micro_batches": 4}),
    "two in line": Job(replicas=2, strategy={"execution": "inline"}),
    "two in threads": Job(replicas=2, strategy={"execution": "threads"}),
    "two, colocate, buckets": Job(replicas=2, strategy={"execution": "threads", "reducer": "colocate"}),
    "two, budget": Job(replicas=2, strategy={"execution": "threads", "memory_budget": _SHARE}),
    "three, unequal, micro-batches": Job(
        replicas=3, strategy={"execution": "threads", "workload": [3, 2, 1], "micro_batches": 2}
    ),
    "would be replanned": Job(strategy={"on_oom": "replan"}, tolerance=0.0),
    "bf16": Job(trainer={"precision": "bf16-mixed"}, tolerance=0.0),
    "bf16, two, budget": Job(
        replicas=2,
        strategy={"execution": "threads", "memory_budget": _SHARE},
        trainer={"precision": "bf16-mixed"},
        tolerance=_HALF,
    ),
    "fp16, two": Job(replicas=2, strategy={"execution": "threads"}, trainer={"precision": "16-mixed"}, tolerance=_HALF),
    "bf16 true, budget": Job(strategy={"memory_budget": _SHARE}, trainer={"precision": "bf16-true"}, tolerance=_HALF),
    "clipped, accumulated": Job(
        replicas=2,
        strategy={"execution": "threads"},
        trainer={"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
    ),
}


def gpt2(place: Place) -> dict[str, Any]:
    """Language modelling, on the device itself."""
    return _all(place, lambda: _gpt2(place), _alone())


def gpt2_replicas(place: Place) -> dict[str, Any]:
    """Language modelling, by several replicas."""
    return _all(place, lambda: _gpt2(place), _replicated())


def vit(place: Place) -> dict[str, Any]:
    """Attention over patches of images, on the device itself."""
    return _all(place, lambda: _vit(place), _alone())


def vit_replicas(place: Place) -> dict[str, Any]:
    """Attention over patches of images, by several replicas."""
    return _all(place, lambda: _vit(place), _replicated())


def convnext(place: Place) -> dict[str, Any]:
    """Convolutions, on the device itself."""
    return _all(place, lambda: _convnext(place), _alone())


def convnext_replicas(place: Place) -> dict[str, Any]:
    """Convolutions, by several replicas."""
    return _all(place, lambda: _convnext(place), _replicated())


def _alone() -> dict[str, Job]:
    return {name: job for name, job in JOBS.items() if job.replicas == 1}


def _replicated() -> dict[str, Job]:
    return {name: job for name, job in JOBS.items() if job.replicas > 1}


def _all(place: Place, make: Callable[[], "Foreign"], jobs: dict[str, Job]) -> dict[str, Any]:
    """These jobs; what went wrong is told together at the end."""
    figures: dict[str, Any] = {}
    faults: list[str] = []
    plain = _Plain(place, make)
    for name, job in jobs.items():
        try:
            found = _run(place, make, job, plain)
        except dpx.PlanError as error:  # nothing takes less: what small models are mostly told
            found = {"refused": str(error)[:300]}
        except Exception as error:  # noqa: BLE001  the others are tried, too, and this is told below
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        figures[name] = found
        place.tell(figures)
        is_over = found.get("peak over budget", 0.0) > _OVER
        if "error" in found or is_over or not found.get("difference", 0.0) <= found.get("tolerance", 0.0):
            faults.append(f"{name}: {found}")
    assert not faults, "; ".join(faults)
    return figures


class _Plain:
    """The runs without ``dpx``, by the options of their Trainer."""

    def __init__(self, place: Place, make: Callable[[], "Foreign"]) -> None:
        self._place = place
        self._make = make
        self._runs: dict[str, tuple[dict[str, Tensor], int]] = {}
        self._repeats: dict[str, bool] = {}

    def run(self, options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
        """Weights and peak."""
        key = str(options)
        if key not in self._runs:
            self._runs[key] = self._fit(options)
        return self._runs[key]

    def tolerance(self, job: Job, options: dict[str, Any]) -> float:
        """That of the job; of its precision where the same run twice has other bits: GPUs add up in any order."""
        key = str(options)
        if job.tolerance == 0.0 and key not in self._repeats:
            self._repeats[key] = _difference(self._fit(options)[0], self.run(options)[0]) == 0.0
        if job.tolerance > 0.0 or self._repeats[key]:
            return job.tolerance
        return _HALF if "16" in options.get("precision", "") else _EXACT

    def _fit(self, options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
        # Lightning's own strategies know no simulated devices.
        strategy = "auto" if self._place.is_real else "dpx"
        return _fit(self._place, self._make, strategy=strategy, devices=1, **options)


def _difference(given: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest one, of the largest weight."""
    largest = max(float(value.abs().max()) for value in expected.values())
    return max(float((given[name] - expected[name]).abs().max()) for name in expected) / largest


def _run(place: Place, make: Callable[[], "Foreign"], job: Job, plain: _Plain) -> dict[str, Any]:
    trainer_options = {name: value for name, value in job.trainer.items() if name != "callbacks"}
    expected, plain_peak = plain.run(trainer_options)

    def fit(**options: Any) -> tuple[dict[str, Tensor], int]:
        strategy = dpx.DPXStrategy(parallel_devices=[place.device] * job.replicas, plan_cache=False, **options)
        return _fit(place, make, strategy=strategy, **job.trainer)

    options = dict(job.strategy)
    if "memory_budget" in options:
        share = options.pop("memory_budget")
        # Replicas on one device have several copies of the weights: its own peak is the yardstick.
        unplanned = fit(**options | {"micro_batches": 1})[1]
        options["memory_budget"] = int(share * unplanned)
    given, peak = fit(**options)
    found = {
        "difference": _difference(given, expected),
        "tolerance": plain.tolerance(job, trainer_options),
        "peak over plain": round(peak / plain_peak, 3),
    }
    if "memory_budget" in options:
        found["peak over budget"] = round(peak / options["memory_budget"], 3)
    return found


def _fit(place: Place, make: Callable[[], "Foreign"], **options: Any) -> tuple[dict[str, Tensor], int]:
    """Weights after a few steps, and the most bytes on the device."""
    seed_everything(0, verbose=False)
    model = make()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    peaks = _StepPeaks(place)
    callbacks = [*options.pop("callbacks", []), peaks]
    trainer = Trainer(
        accelerator=place.accelerator,
        max_epochs=1,
        enable_model_summary=False,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        **quiet,
        **options,
    )
    loader = DataLoader(model.items(), batch_size=model.rows)
    gc.collect()  # what the run before has left would be freed in the middle of this one
    place.module.empty_cache()
    before = int(place.module.memory_allocated(place.device))
    trainer.fit(model, loader, loader)
    weights = {name: value.detach().float().cpu() for name, value in model.state_dict().items()}
    return weights, peaks.most - before


class _StepPeaks(Callback):
    """The most bytes in any step but the first; planners and monitors have the device's own figure begin anew."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.most = 0
        self.is_planned = False

    def note(self, *_: Any) -> None:
        """What the device says by now."""
        if self.is_planned:
            self.most = max(self.most, int(self.place.module.max_memory_allocated(self.place.device)))

    on_before_zero_grad = on_before_optimizer_step = on_train_batch_end = note

    def on_train_batch_start(self, _trainer: Trainer, _module: LightningModule, _batch: Any, index: int) -> None:
        """The first batch is profiled, in steps that keep no budget."""
        self.is_planned = index > 0
        self.place.module.reset_peak_memory_stats(self.place.device)


class Foreign(LightningModule):
    """A library's model; subclasses tell its loss and its items.

    Attributes:
        rows: Of a batch.
    """

    rows: int = 12

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def items(self) -> list[Any]:
        """A few batches."""
        raise NotImplementedError

    def loss_of(self, batch: Any) -> Tensor:
        """A mean over rows."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class Language(Foreign):
    """Token ids to the loss of the library's own head."""

    def __init__(self, net: nn.Module, length: int) -> None:
        super().__init__(net)
        self.length = length

    def items(self) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(200, (_STEPS * self.rows, self.length), generator=generator)
        return [{"input_ids": row, "labels": row} for row in ids]

    def loss_of(self, batch: Any) -> Tensor:
        loss: Tensor = self.net(**batch).loss
        return loss


class Pictures(Foreign):
    """Images to the cross entropy of ten classes."""

    def __init__(self, net: nn.Module, size: int) -> None:
        super().__init__(net)
        self.size = size

    def items(self) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(_STEPS * self.rows, 3, self.size, self.size, generator=generator)
        labels = torch.randint(10, (len(images),), generator=generator)
        return list(zip(images, labels, strict=True))

    def loss_of(self, batch: Any) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)


def _sizes(place: Place) -> tuple[int, int]:
    """Width and depth."""
    return (256, 6) if place.is_real else (32, 2)


def _gpt2(place: Place) -> Foreign:
    import transformers

    width, depth = _sizes(place)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(n_embd=width, n_layer=depth, n_head=4, vocab_size=200, **off)
    return Language(transformers.GPT2LMHeadModel(config), 256 if place.is_real else 16)


def _vit(place: Place) -> Foreign:
    import transformers

    width, depth = _sizes(place)
    size = 128 if place.is_real else 32
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": 4, "num_labels": 10}
    config = transformers.ViTConfig(image_size=size, patch_size=8, intermediate_size=2 * width, **sizes)
    return Pictures(OneOutput(transformers.ViTForImageClassification(config), "logits"), size)


def _convnext(place: Place) -> Foreign:
    import transformers

    config = transformers.ConvNextConfig(hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2], num_labels=10)
    return Pictures(
        OneOutput(transformers.ConvNextForImageClassification(config), "logits"), 128 if place.is_real else 32
    )
