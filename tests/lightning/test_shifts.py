"""``DPXStrategy(shifts=..., shift_activations=...)`` trains to the weights of one device."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.simulate import clear_traffic, traffic
from tests.conftest import SIMULATED, Classifier, assert_equal, make_loader, make_trainer, run, strategy_in
from tests.test_parity import strip_rows

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)


class Stacked(Classifier):
    """Functional operators of the step use tensors of both sides."""

    def __init__(self) -> None:
        super().__init__(optimizer="adam")
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 3))
        self.extra = nn.Linear(8, 3)
        self.example_input_array = torch.zeros(1, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.net(rows) + F.gelu(self.extra(rows))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.log("train_loss", F.cross_entropy(logits, batch[1]))
        return F.cross_entropy(logits, batch[1])


def stacked() -> Stacked:
    torch.manual_seed(0)
    model = Stacked()
    model.net[3] = nn.LayerNorm(32)
    return model


PARTS = ["net.[1-3]", "extra"]


@pytest.mark.parametrize(
    ("devices", "shifts"),
    [
        (1, {"sim:0": "sim:5"}),
        (2, {"sim:0": "sim:4", "sim:1": "sim:5"}),
        (2, {"sim:0": "sim:5", "sim:1": "sim:5"}),
        (2, {"sim:1": "sim:5"}),
    ],
    ids=["one", "each its own", "one spare for both", "only the second"],
)
@pytest.mark.parametrize("reducer", ["naive", "collective", "colocate"])
def test_shifted_replicas_train_to_the_weights_of_one_device(
    devices: int, shifts: dict[str, str], reducer: str, execution: str
) -> None:
    strategy = strategy_in(execution, reducer=reducer, shifts=shifts, shift_activations=PARTS)
    clear_traffic()
    ours = run(stacked(), strategy=strategy, accelerator="sim", devices=devices)
    assert any(t.target == torch.device("sim:5") for t in traffic())
    assert_equal(strip_rows(ours), strip_rows(run(stacked())))


@pytest.mark.parametrize(
    "accelerator",
    [
        "sim",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
        ),
    ],
)
def test_parts_that_are_shifted_to_the_host_train_to_the_weights_of_one_device(accelerator: str) -> None:
    strategy = dpx.DPXStrategy(shifts={f"{accelerator}:0": "cpu"}, shift_activations=PARTS)
    ours = run(stacked(), strategy=strategy, accelerator=accelerator, devices=1)
    assert_equal(strip_rows(ours), strip_rows(run(stacked())))


@pytest.mark.parametrize(
    "options", [{"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}]
)
def test_with_mixed_precision_accumulation_and_clipping(options: dict[str, Any]) -> None:
    shifts = {"sim:0": "sim:4", "sim:1": "sim:5"}
    strategy = dpx.DPXStrategy(shifts=shifts, shift_activations=PARTS)
    ours = run(stacked(), strategy=strategy, accelerator="sim", devices=2, **options)
    expected = run(stacked(), strategy=dpx.DPXStrategy(), accelerator="sim", devices=2, **options)
    assert_equal(ours, expected)


def test_everything_is_back_after_fit_and_files_load_anywhere(tmp_path: Path) -> None:
    model = stacked()
    strategy = dpx.DPXStrategy(shifts={"sim:0": "sim:5"}, shift_activations=PARTS)
    trainer = make_trainer(strategy=strategy, accelerator="sim", devices=1, max_epochs=1)
    trainer.fit(model, make_loader(), make_loader())
    trainer.save_checkpoint(tmp_path / "shifted.ckpt")
    assert len({p.device for p in model.parameters()}) == 1
    assert not any(child._forward_pre_hooks for child in model.modules())
    straight = stacked()
    make_trainer(max_epochs=2).fit(straight, make_loader(), make_loader())
    again = dpx.DPXStrategy(shifts={"sim:0": "sim:5"}, shift_activations=PARTS)
    for options in ({}, {"strategy": again, "accelerator": "sim", "devices": 1}):
        resumed = stacked()
        trainer = make_trainer(max_epochs=2, **options)
        trainer.fit(resumed, make_loader(), make_loader(), ckpt_path=tmp_path / "shifted.ckpt")
        assert_equal({name: value.cpu() for name, value in resumed.state_dict().items()}, straight.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shifts": {"sim:0": "sim:4"}}, "shifts needs shift_activations"),
        ({"shift_activations": ["net"]}, "shift_activations needs shifts"),
        ({"shifts": {"sim:0": "sim:0"}, "shift_activations": ["net"]}, "shifts to itself"),
        ({"shifts": "sim:1", "shift_activations": ["net"]}, "shifts='sim:1' is not allowed"),
    ],
)
def test_bad_arguments_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(dpx.ConfigurationError, match=message):
        dpx.DPXStrategy(**options)


@pytest.mark.parametrize(
    ("shifts", "parts", "message"),
    [
        ({"sim:3": "sim:4"}, ["net"], "shifts names sim:3, but the replicas live on sim:0, sim:1"),
        ({"sim:0": "sim:1"}, ["net"], "a replica lives on sim:1"),
        ({"sim:0": "sim:4"}, ["next"], "'next', which matches no submodule; the nearest are: net"),
    ],
)
def test_bad_arguments_are_refused_at_setup(shifts: dict[str, str], parts: list[str], message: str) -> None:
    strategy = dpx.DPXStrategy(shifts=shifts, shift_activations=parts)
    with pytest.raises(dpx.ConfigurationError, match=message):
        make_trainer(strategy=strategy, accelerator="sim", devices=2).fit(stacked(), make_loader(), make_loader())


def test_a_shifted_fit_that_runs_out_of_memory_gives_everything_back() -> None:
    """Once the parts of the target were moved to the source, which was full: that error hid the first one."""

    class Grows(Stacked):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.ones(2**30, device=self.device).sum()

    model = Grows()
    gc.collect()
    before = [torch.get_device_module("sim").memory_allocated(index) for index in range(2)]
    held: list[torch.Tensor] = []

    class Fills(Callback):
        """Takes all that is left of the source."""

        def on_train_start(self, trainer: Any, module: Any) -> None:
            free = 2**20 - torch.get_device_module("sim").memory_allocated(0)
            held.append(torch.ones(free // 4, device="sim:0"))

    dpx.simulate(2, memory=2**20)
    try:
        strategy = dpx.DPXStrategy(shifts={"sim:0": "sim:1"}, shift_activations=PARTS)
        trainer = make_trainer(strategy=strategy, accelerator="sim", devices=1, callbacks=[Fills()])
        with pytest.raises(torch.OutOfMemoryError) as caught:
            trainer.fit(model, make_loader(), make_loader())
        assert any("would" in note or "memory_budget" in note for note in caught.value.__notes__)
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    finally:
        held.clear()
        dpx.simulate(8)
    del caught, trainer, strategy
    gc.collect()
    after = [torch.get_device_module("sim").memory_allocated(index) for index in range(2)]
    assert all(now <= then for now, then in zip(after, before, strict=True)), (after, before)


class UsesBothSides(Classifier):
    """Between the steps it uses the second layer, its parameters, and all gradients at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(torch.stack([parameter.grad.norm() for parameter in self.parameters()]).norm())
        for parameter in self.parameters():
            parameter.grad.mul_(0.5).add_(parameter.detach(), alpha=1e-3)

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, **_: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def on_train_batch_end(self, *_: Any) -> None:
        rows = torch.ones(2, 16, device=self.device)
        with torch.no_grad():
            self.net[2].bias.add_(self.net[0].bias.mean(), alpha=1e-2)  # the written one is on the other side
            self.seen.append(self.net[2](rows).sum() + sum(parameter.sum() for parameter in self.parameters()))
            self.seen.append(F.linear(rows, self.net[2].weight, self.net[2].bias).mean())

    on_train_epoch_end = on_fit_start = on_train_batch_end


class UsesBothSidesToo(Callback):
    """Callbacks do so as well."""

    def on_train_batch_end(self, trainer: Any, module: UsesBothSides, *_: Any) -> None:
        module.seen.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).norm())


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "lbfgs"])
def test_hooks_between_the_steps_use_both_sides_of_the_cut(devices: int, optimizer: str) -> None:
    shifts = {f"sim:{index}": f"sim:{index + 4}" for index in range(devices)}
    strategy = dpx.DPXStrategy(shifts=shifts, shift_activations=["net.2"])
    seen = []
    for options in ({"strategy": strategy, "accelerator": "sim", "devices": devices}, {}):
        torch.manual_seed(0)
        model = UsesBothSides()
        model.optimizer = optimizer
        trainer = make_trainer(max_epochs=1, callbacks=[UsesBothSidesToo()], **options)
        trainer.fit(model, make_loader(32), make_loader(16))
        seen.append([*model.seen, *model.state_dict().values()])
    for ours, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs, rtol=1e-4, atol=1e-5)
    assert not torch.overrides._get_current_function_mode_stack(), "the run has taken its mode along"
