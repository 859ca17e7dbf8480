"""An in-place operator across a shift's cut is refused, at setup where an example of the inputs is known."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import SIMULATED, Classifier, make_loader, make_trainer, sim_device

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
HOME, SPARE = sim_device(0), sim_device(1)
SHIFTS = {"sim:0": "sim:1"}
ROWS = (4, 8)


class Part(nn.Module):
    """Writes into its input first."""

    def __init__(self, write: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(8, 8), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(x)
        return self.layer(x)


class Model(nn.Module):
    """``b`` is what is shifted; ``use`` is the forward."""

    def __init__(self, use: Callable[[Any, torch.Tensor], Any], write: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.use = nn.Linear(8, 8), Part(write), nn.Linear(8, 8), use
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.forwards += 1
        return self.use(self, x)


def relu_(x: torch.Tensor) -> torch.Tensor:
    return x.relu_()


def nothing(x: torch.Tensor) -> torch.Tensor:
    return x


def returned(model: Any, x: torch.Tensor) -> Any:
    hidden = model.a(x) * 1
    return model.b(hidden), hidden


def read(model: Any, x: torch.Tensor) -> Any:
    hidden = model.a(x) * 1
    return model.b(hidden) + model.c(hidden)


def base_of_a_view(model: Any, x: torch.Tensor) -> Any:
    hidden = model.a(x) * 1
    model.b(hidden[:3])
    return model.c(hidden)


def another_view(model: Any, x: torch.Tensor) -> Any:
    hidden = model.a(x) * 1
    first, last = hidden[:3], hidden[2:]
    model.b(first)
    return model.c(last)


def detached(model: Any, x: torch.Tensor) -> Any:
    hidden = model.a(x) * 1
    model.b(hidden)
    return model.c(hidden.detach())


def as_numbers(model: Any, x: torch.Tensor) -> Any:
    hidden = model.a(x) * 1
    return model.b(hidden) * hidden.tolist()[0][0]


def passed_again(model: Any, x: torch.Tensor) -> Any:
    hidden = model.a(x) * 1
    return model.b(hidden) + model.b(hidden)


def written_at_home(model: Any, x: torch.Tensor) -> Any:
    hidden = model.b(x)
    hidden *= 2
    return model.c(hidden)


@pytest.mark.parametrize(
    ("use", "write", "reader"),
    [
        (returned, relu_, "Model's own code"),
        (returned, lambda x: F.relu(x, inplace=True), "Model's own code"),
        (returned, lambda x: x[:2].zero_(), "Model's own code"),
        (read, relu_, "c"),
        (base_of_a_view, relu_, "c"),
        (another_view, relu_, "c"),
        (detached, relu_, "c"),
        (as_numbers, relu_, "Model's own code"),
        (passed_again, relu_, "b"),
    ],
)
def test_what_reads_the_original_of_a_written_copy_is_named(use: Any, write: Any, reader: str) -> None:
    model = Model(use, write).to(HOME)
    dpx.shift_activations(model, "b", SHIFTS)
    message = (
        rf"shifts\['sim:0'\]='sim:1': a tensor of shape \[\d, 8\] is used on sim:0, by {reader}, after its copy on "
        "sim:1, for b, was written in place: an in-place operator cannot cross the cut at b"
    )
    with pytest.raises(dpx.UnsupportedError, match=message):
        model(torch.randn(ROWS).to(HOME))


def test_whoever_writes_across_the_cut_is_named() -> None:
    model = Model(written_at_home, nothing).to(HOME)
    dpx.shift_activations(model, "b", SHIFTS)
    message = r"shifts\['sim:0'\]='sim:1': torch.Tensor.mul_ writes into a tensor on sim:1 from Model's own code, which"
    with pytest.raises(dpx.UnsupportedError, match=message):
        model(torch.randn(ROWS).to(HOME))


def alone(model: Any, x: torch.Tensor) -> Any:
    """The written tensor is not read again."""
    return model.c(F.relu(model.b(model.a(x) * 1), inplace=True))


def halves(model: Any, x: torch.Tensor) -> Any:
    """Both halves interleave in one memory, and neither covers a byte of the other."""
    left, right = torch.cat([model.a(x), model.a(x)], 1).chunk(2, dim=1)
    return model.b(left) + model.c(right)


@pytest.mark.parametrize("use", [alone, halves])
def test_what_nobody_else_reads_may_be_written(use: Any) -> None:
    torch.manual_seed(0)
    plain = Model(use, relu_ if use is alone else lambda x: x.data.relu_()).to(HOME)
    shifted = copy.deepcopy(plain)
    rows = torch.randn(ROWS).to(HOME)
    dpx.shift_activations(shifted, "b", SHIFTS, rows)
    for model in (plain, shifted):
        model(rows).sum().backward()
    for ours, expected in zip(shifted.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.cpu(), expected.grad.cpu())


def test_a_forward_frees_its_copies_at_once() -> None:
    sim = torch.get_device_module("sim")
    model = Model(read, nothing).to(HOME)
    rows = torch.randn(ROWS).to(HOME)
    dpx.shift_activations(model, "b", SHIFTS)
    gc.collect()
    before = [sim.memory_allocated(device) for device in (HOME, SPARE)]
    gc.disable()
    try:
        with torch.no_grad():
            model(rows)
        assert [sim.memory_allocated(device) for device in (HOME, SPARE)] == before
    finally:
        gc.enable()


@pytest.mark.parametrize("known_by", ["batch", "example_input_array"])
def test_with_an_example_it_is_refused_when_the_shift_is_made(known_by: str) -> None:
    model = Model(read, relu_).to(HOME)
    model.register_buffer("seen", torch.zeros(1, device=HOME))
    batch = [torch.randn(ROWS).to(HOME)]
    if known_by == "example_input_array":
        model.example_input_array = batch.pop().cpu()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(dpx.UnsupportedError, match=r"shifts\['sim:0'\]='sim:1': .* by c, after .* for b") as refused:
        dpx.shift_activations(model, "b", SHIFTS, *batch)
    assert refused.value.__notes__ == [
        "It happened in the run that checks shifts['sim:0']='sim:1' before training; nothing is shifted."
    ]
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {tensor.device for tensor in model.state_dict().values()} == {HOME}
    assert not any(child._forward_pre_hooks for child in model.modules())
    model.b.write = nothing
    dpx.shift_activations(model, "b", SHIFTS, *batch)
    assert model.b.layer.weight.device == SPARE


def test_a_batch_for_a_training_step_checks_the_step_itself() -> None:
    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            hidden = self.net(batch[0])
            hidden |= hidden
            return hidden.sum()

    model = Stepping().to(HOME)
    batch = torch.randn(ROWS).to(HOME), torch.zeros(4).to(HOME)
    with pytest.raises(dpx.UnsupportedError, match="__ior__ writes into a tensor on sim:1 from Stepping's own code"):
        dpx.shift_activations(model, "net", SHIFTS, batch)
    model = Stepping().to(HOME)
    Stepping.training_step = lambda self, batch, batch_idx: self.net(batch[0]).sum()
    dpx.shift_activations(model, "net", SHIFTS, batch)
    assert model.net[1].num_batches_tracked == 0, "buffers are put back"


class Writing(Classifier):
    """``head`` writes into what ``forward`` reads afterwards; counts what it ran."""

    def __init__(self, example: Any = None) -> None:
        super().__init__(norm=True)
        self.head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
        self.example_input_array = example
        self.steps, self.forwards = 0, 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        hidden = self.net(rows)
        return self.head(hidden) + hidden

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        return F.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize(("devices", "shifts"), [(1, {"sim:0": "sim:5"}), (2, {"sim:1": "sim:5"})])
def test_a_trainer_refuses_at_setup_where_the_module_has_an_example(devices: int, shifts: dict[str, str]) -> None:
    source = next(iter(shifts))
    message = rf"shifts\['{source}'\]='sim:5': a tensor of shape \[1, 3\] is used on {source}, by Writing's own code"
    strategy = dpx.DPXStrategy(shifts=shifts, shift_activations=["head"])
    model = Writing(torch.zeros(1, 8))
    trainer = make_trainer(strategy=strategy, accelerator="sim", devices=devices)
    with pytest.raises(dpx.UnsupportedError, match=message):
        trainer.fit(model, make_loader(), make_loader())
    assert (model.steps, model.forwards) == (0, 0), "a shadow module ran"
    model.head[0].inplace = False
    strategy = dpx.DPXStrategy(shifts=shifts, shift_activations=["head"])
    make_trainer(strategy=strategy, accelerator="sim", devices=devices, max_epochs=1).fit(
        model, make_loader(), make_loader()
    )
    assert model.steps == model.forwards > 0
    assert not any(child._forward_pre_hooks for child in model.modules())


def test_a_trainer_without_an_example_refuses_in_the_first_step_before_any_weight_changes() -> None:
    torch.manual_seed(0)
    model = Writing()
    before = {name: value.clone() for name, value in model.state_dict().items() if "num_batches" not in name}
    strategy = dpx.DPXStrategy(shifts={"sim:0": "sim:5"}, shift_activations=["head"])
    with pytest.raises(dpx.UnsupportedError, match=r"shifts\['sim:0'\]='sim:5': .* by Writing's own code, .* for head"):
        make_trainer(strategy=strategy, accelerator="sim", devices=1).fit(model, make_loader(), make_loader())
    assert model.steps == 1
    assert all(torch.equal(p.cpu(), before[name]) for name, p in model.named_parameters())


def test_a_module_that_cannot_be_copied_is_checked_in_the_first_step(caplog: Any) -> None:
    model = Writing(torch.zeros(1, 8))
    model.rest = (value for value in range(3))
    strategy = dpx.DPXStrategy(shifts={"sim:0": "sim:5"}, shift_activations=["head"])
    with caplog.at_level("INFO"), pytest.raises(dpx.UnsupportedError, match="by Writing's own code"):
        make_trainer(strategy=strategy, accelerator="sim", devices=1).fit(model, make_loader(), make_loader())
    assert any("checked in the first step" in record.message for record in caplog.records)
    assert model.steps == 1
