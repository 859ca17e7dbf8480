"""Every reducer trains to the weights of one device; colocated owners; gradients that travel during backward."""

import doctest
import inspect
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lightning_dpx as dpx
from lightning_dpx.reducers import REDUCERS
from lightning_dpx.reducers.naive import NaiveReducer
from lightning_dpx.simulate import clear_traffic, traffic
from tests.conftest import (
    ADDITIONS,
    SIMULATED,
    Classifier,
    assert_equal,
    make_loader,
    make_trainer,
    run,
    seeded,
    strategy_in,
)
from tests.lightning.manual.test_manual import GAN, Manual
from tests.test_parity import strip_rows

MODES = [name for name in REDUCERS if name != "nccl"]
sim_only = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
on_sim = {"accelerator": "sim"}


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
    ids=["plain", "accumulated-clipped", "clipped-by-value"],
)
def test_trains_to_the_weights_of_one_device(name: str, options: dict[str, Any], execution: str) -> None:
    strategy = strategy_in(execution, reducer=name, workload=[2.0, 1.0, 1.0])
    ours = run(seeded(optimizer="adam"), strategy=strategy, devices=3, **options)
    assert_equal(strip_rows(ours), strip_rows(run(seeded(optimizer="adam"), **options)))


WRITTEN = "sum_between_devices"  # the one method that all examples of a reducer write


def documented_reducers() -> dict[str, str]:
    """The code of all examples of a reducer, by where it stands."""
    root = Path(__file__).parent.parent.parent
    examples = {}
    for page in ("lightning_dpx/reducers/README.md", "examples/guide/write_your_own.md"):
        for block in re.findall(r"```python\n(.*?)```", (root / page).read_text(), re.DOTALL):
            if "register_reducer" in block:
                examples[page] = block
    for documented in (dpx.GradientReducer, dpx.register_reducer):
        examples_of_help = doctest.DocTestParser().get_examples(inspect.getdoc(documented) or "")
        examples[documented.__name__] = "".join(example.source for example in examples_of_help)
    return examples


@pytest.mark.parametrize("place", documented_reducers())
def test_a_reducer_that_is_written_as_documented_trains_to_the_weights_of_one_device(
    place: str, execution: str, hardware: str
) -> None:
    before = set(REDUCERS)
    exec(documented_reducers()[place], {"dpx": dpx, "lightning_dpx": dpx, "torch": torch, "__name__": "example"})
    (name,) = set(REDUCERS) - before
    kind = REDUCERS[name]
    sums = vars(kind)[WRITTEN]
    calls: list[int] = []

    def counted(reducer: Any, lists: Any, targets: Any) -> Any:
        calls.append(len(targets))
        return sums(reducer, lists, targets)

    try:
        setattr(kind, WRITTEN, counted)
        ours = run(seeded(), strategy=strategy_in(execution, reducer=name), devices=2)
    finally:
        REDUCERS.unregister(name)
    assert_equal(strip_rows(ours), strip_rows(run(seeded())))
    # Two replicas on the host are one device, where there is nothing to move.
    assert bool(calls) is (hardware == "sim")


@sim_only
@pytest.mark.parametrize("name", MODES)
def test_eight_replicas_on_four_devices(name: str) -> None:
    devices = [torch.device("sim", index // 2) for index in range(8)]
    strategy = dpx.DPXStrategy(reducer=name, parallel_devices=devices, accelerator=dpx.lightning.SimAccelerator())
    loader = make_loader(batch_size=32)
    ours = run(seeded(), loader, strategy=strategy, accelerator="auto", devices="auto")
    assert_equal(strip_rows(ours), strip_rows(run(seeded(), loader)))


@sim_only
@pytest.mark.parametrize("kind", [Manual, GAN])
def test_colocated_owners_with_manual_optimization(kind: type[LightningModule], execution: str) -> None:
    def train(**options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = kind()
        make_trainer(**options).fit(model, make_loader())
        return {name: value.cpu() for name, value in model.state_dict().items()}

    ours = train(strategy=strategy_in(execution, reducer="colocate"), devices=3, **on_sim)
    assert_equal(ours, train())


class Wide(LightningModule):
    """Sixteen equal layers and Adam, whose state is twice the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0].repeat(1, 8)), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-4, foreach=False)


class StateBytes(Callback):
    """What the optimizer's state holds on every device, before Lightning takes it to the host."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.held: dict[str, int] = {}
        for state in trainer.optimizers[0].state.values():
            for value in state.values():
                if value.ndim:
                    self.held[str(value.device)] = self.held.get(str(value.device), 0) + value.nbytes


@sim_only
def test_the_state_of_adam_is_spread_over_the_owners() -> None:
    state, model = StateBytes(), Wide()
    make_trainer(strategy="dpx_colocate", devices=4, max_epochs=1, callbacks=[state], **on_sim).fit(
        model, make_loader()
    )
    held = state.held
    quarter = 2 * sum(parameter.nbytes for parameter in model.parameters()) / 4
    assert sorted(held) == [f"sim:{index}" for index in range(4)]
    for size in held.values():
        assert size == pytest.approx(quarter, rel=0.1)


@sim_only
def test_colocated_files_resume_on_one_device_and_back(tmp_path) -> None:
    state = StateBytes()

    def fit(model: LightningModule, epochs: int, path: Any = None, **options: Any) -> Any:
        trainer = make_trainer(max_epochs=epochs, callbacks=[state], **options)
        trainer.fit(model, make_loader(), ckpt_path=path)
        return trainer

    colocated = {"strategy": "dpx_colocate", "devices": 4, **on_sim}
    torch.manual_seed(0)
    whole = Wide()
    start = {name: value.clone() for name, value in whole.state_dict().items()}
    fit(whole, 3)
    for first, then in (({}, colocated), (colocated, {}), (colocated, {**colocated, "devices": 2})):
        model, resumed = Wide(), Wide()
        model.load_state_dict(start)
        fit(model, 2, **first).save_checkpoint(tmp_path / "half.ckpt")
        fit(resumed, 3, tmp_path / "half.ckpt", **then)
        assert len(state.held) == then.get("devices", 1)
        ours = {name: value.cpu() for name, value in resumed.state_dict().items()}
        assert_equal(ours, whole.state_dict(), additions=16 * ADDITIONS)  # three epochs, rounded once in between


@sim_only
def test_freezing_and_writing_weights_reach_colocated_owners() -> None:
    class Surgery(Classifier):
        def on_train_epoch_start(self) -> None:
            self.net[0].requires_grad_(self.current_epoch == 0)
            with torch.no_grad():
                self.net[2].weight.mul_(0.5)

    def build() -> Surgery:
        torch.manual_seed(0)
        return Surgery()

    ours = run(build(), strategy="dpx_colocate", devices=3, **on_sim)
    assert_equal(strip_rows(ours), strip_rows(run(build())))


@sim_only
def test_lbfgs_has_all_parameters_on_one_device() -> None:
    double = {"precision": "64-true"}
    with pytest.warns(UserWarning, match="all on sim:0: LBFGS keeps all parameters in one vector"):
        ours = run(seeded(optimizer="lbfgs"), strategy="dpx_colocate", devices=2, **on_sim, **double)
    # Its steps divide by differences of gradients, which blows rounding up.
    assert_equal(strip_rows(ours), strip_rows(run(seeded(optimizer="lbfgs"), **double)), additions=100 * ADDITIONS)


def note(events: list[str], event: str, _: torch.Tensor) -> None:
    """A hook of every replica; no closure, which would hold the module."""
    events.append(event)


class Deep(Classifier):
    """Eight layers; notes the order in which gradients appear."""

    def __init__(self, events: list[str], recompute: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), *(nn.Linear(32, 32) for _ in range(6)), nn.Linear(32, 3))
        self.events, self.recompute = events, recompute
        for number, layer in enumerate(self.net):
            layer.weight.register_hook(partial(note, events, f"gradient {number}"))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = batch[0]
        for layer in self.net:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.recompute else layer(hidden)
        return F.cross_entropy(hidden, batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.events.append(f"step {batch_idx}")


class Noting(NaiveReducer):
    """Notes the number of gradients of every call."""

    def __init__(self, devices: Any, events: list[str]) -> None:
        super().__init__(devices)
        self.events = events

    def reduce(self, grads: Any, **options: Any) -> Any:
        self.events.append(f"reduce {len(grads[0])}")
        return super().reduce(grads, **options)


@sim_only
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_travel_while_backward_runs(recompute: bool, execution: str) -> None:
    events: list[str] = []
    devices = [torch.device("sim", index) for index in range(2)]
    # Unchecked, as hooks that note something do so once for each slice.
    options = {"execution": execution, "gradient_buckets": 4, "verify": "off"}
    strategy = dpx.DPXStrategy(reducer=Noting(devices, events), **options)
    model = Deep(events, recompute)
    trainer = make_trainer(strategy=strategy, devices=2, max_epochs=1, limit_train_batches=3, **on_sim)
    trainer.fit(model, make_loader(), make_loader())
    start = events.index("step 1")
    first, later = events[:start], events[start : events.index("step 2")]
    assert sum(int(event.split()[1]) for event in first[-4:]) == 16, "the first step learns, and reduces at its end"
    reduced = [event for event in later if "reduce" in event]
    assert sum(int(event.split()[1]) for event in reduced) == 16
    assert len(reduced) == 4, "nothing is left for the end"
    last = len(later) - 1 - later[::-1].index("gradient 0")
    assert later.index(reduced[0]) < last, "packs travel before the last replica has its last gradient"


@sim_only
def test_zero_packs_send_everything_after_backward() -> None:
    events: list[str] = []
    reducer = Noting([torch.device("sim", index) for index in range(2)], events)
    trainer = make_trainer(
        strategy=dpx.DPXStrategy(reducer=reducer, gradient_buckets=0, verify="off"), devices=2, max_epochs=1, **on_sim
    )
    trainer.fit(Deep(events), make_loader(), make_loader())
    assert [event for event in events if "reduce" in event] == ["reduce 16"] * 3, "the last rows are too few to share"


@sim_only
def test_hooks_leave_the_parameters_after_fit() -> None:
    model = seeded()
    make_trainer(strategy="dpx", devices=3, max_epochs=1, **on_sim).fit(model, make_loader(), make_loader())
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@sim_only
def test_the_communication_dtype_of_the_strategy_halves_the_traffic_of_gradients() -> None:
    def moved(dtype: str | None) -> int:
        strategy = dpx.DPXStrategy(communication_dtype=dtype, reducer="naive", gradient_buckets=0)
        clear_traffic()
        make_trainer(strategy=strategy, devices=2, max_epochs=1, **on_sim).fit(Wide(), make_loader())
        return sum(t.num_bytes for t in traffic() if t.maker.startswith("reducers"))

    assert moved("bfloat16") == moved(None) / 2


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(dpx.ConfigurationError, match="communication_dtype='int8' is not allowed"):
        dpx.DPXStrategy(communication_dtype="int8")
    with pytest.raises(dpx.ConfigurationError, match="gradient_buckets=-1 is not allowed"):
        dpx.DPXStrategy(gradient_buckets=-1)
