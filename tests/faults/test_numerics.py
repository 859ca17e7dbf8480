"""Cases 46 to 51 of the fault table: numbers that overflow, differ or drift."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.reducers import REDUCERS, make_reducer
from tests.conftest import SIMULATED, Classifier, assert_equal, make_loader, make_trainer, places

MODES = [name for name in REDUCERS if name != "nccl"]
on_sim = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)


class _Multiplied(torch.autograd.Function):
    """Only the gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None


class Odd(LightningModule):
    """The gradients of its first layer become those times ``factor`` on one replica in step 1."""

    def __init__(self, factor: float, which: int = 1, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))
        self.factor, self.which = factor, which

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.net[0](batch[0])
        if batch_idx == 1 and self.global_rank == self.which:
            hidden = _Multiplied.apply(hidden, self.factor)
        return F.cross_entropy(self.net[1:](hidden), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class History(Callback):
    """The weights on every replica, and the loss scale, after every step."""

    def __init__(self) -> None:
        self.weights: list[list[dict[str, torch.Tensor]]] = []
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        states = [part.state_dict() for part in trainer.strategy.replica_modules]
        self.weights.append([{name: value.cpu().clone() for name, value in state.items()} for state in states])
        if (scaler := trainer.precision_plugin.scaler) is not None:
            self.scales.append(scaler.get_scale())


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_case_46_what_is_not_finite_on_one_replica_propagates(
    value: float, precision: Any, name: str, execution: str
) -> None:
    """As on one device: only the layer that has such gradients is lost."""
    model = Odd(value)
    strategy = dpx.DPXStrategy(reducer=name, execution=execution, communication_dtype="bfloat16")
    make_trainer(strategy=strategy, devices=3, max_epochs=1, limit_train_batches=2, precision=precision).fit(
        model, make_loader()
    )
    assert not model.net[0].weight.isfinite().any()
    assert model.net[2].weight.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*Error detected in.*", "ignore:.*anomaly.*:UserWarning")
def test_case_46_anomalies_name_the_replica_and_the_operator(execution: str, hardware: str) -> None:
    strategy = dpx.DPXStrategy(execution=execution)
    trainer = make_trainer(strategy=strategy, devices=3, max_epochs=1, detect_anomaly=True)
    with pytest.raises(RuntimeError, match=r"_MultipliedBackward.*nan") as caught:
        trainer.fit(Odd(float("nan")), make_loader())
    assert f"In replica 1 on {places(3)[1]}, during backward." in caught.value.__notes__


@on_sim
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("packs", [0, 8])
@pytest.mark.parametrize("wire", [None, "float16"])
def test_case_47_an_overflow_on_one_replica_skips_the_step_on_all(
    wire: Any, packs: int, name: str, execution: str
) -> None:
    history = History()
    strategy = dpx.DPXStrategy(reducer=name, execution=execution, communication_dtype=wire, gradient_buckets=packs)
    precision = MixedPrecision("16-mixed", "sim", torch.amp.GradScaler("sim", init_scale=256.0))
    trainer = make_trainer(
        strategy=strategy, devices=3, accelerator="sim", max_epochs=1, plugins=[precision], callbacks=[history]
    )
    trainer.fit(Odd(float("inf")), make_loader(48))
    assert history.scales == [256.0, 128.0, 128.0]
    first, second, third = (states[0] for states in history.weights)
    assert_equal(second, first, bitwise=True)
    assert not torch.equal(third["net.0.weight"], second["net.0.weight"])
    assert all(value.isfinite().all() for value in third.values())


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("num_replicas", [2, 4, 8])
def test_case_48_sums_up_to_the_largest_half_do_not_overflow(name: str, dtype: torch.dtype, num_replicas: int) -> None:
    devices = [torch.device(place) for place in places(num_replicas)]
    reducer = make_reducer(name, devices, torch.float16)
    part = 65504 / num_replicas
    total = reducer.reduce([[torch.full((64,), part, device=device, dtype=dtype)] for device in devices])[0]
    assert total is not None
    assert total.isfinite().all()
    torch.testing.assert_close(total.float().cpu(), torch.full((64,), 65504.0), rtol=2e-3, atol=0)


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("num_gradients", [1, 5])
def test_case_48_sums_of_floats_that_travel_as_halves_do_not_overflow(
    name: str, average: bool, num_gradients: int
) -> None:
    """Every gradient fits into a half, their sum does not; the gradients are floats, so nothing watches for that."""
    devices = [torch.device(place) for place in places(4)]
    reducer = make_reducer(name, devices, torch.float16)
    grads: Any = [[torch.full((64,), 4e4, device=device) for _ in range(num_gradients)] for device in devices]
    for total in reducer.reduce(grads, average=average):
        assert total is not None
        assert total.isfinite().all()
        torch.testing.assert_close(total.cpu(), torch.full((64,), 4e4 if average else 1.6e5), rtol=2e-3, atol=0)


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("num_replicas", [2, 3, 8])
def test_case_50_naive_sums_in_replica_order_to_the_bit(num_replicas: int) -> None:
    devices = [torch.device(place) for place in places(num_replicas)]
    generator = torch.Generator().manual_seed(0)
    grads: Any = [[torch.randn(size, generator=generator) for size in (700, 33, 1)] for _ in devices]
    expected = []
    for column in zip(*grads, strict=True):
        total = column[0].clone()
        for gradient in column[1:]:
            total += gradient
        expected.append(total)
    placed: Any = [[g.to(device) for g in row] for row, device in zip(grads, devices, strict=True)]
    for total, reference in zip(make_reducer("naive", devices).reduce(placed), expected, strict=True):
        assert total is not None
        assert torch.equal(total.cpu(), reference)


class Nudges(Callback):
    """Changes one parameter of the last replica by one unit in the last place, before step ``at``."""

    def __init__(self, at: int, how: str) -> None:
        self.at, self.how = at, how

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            weight = trainer.strategy.replica_modules[-1].net[0].weight
            value = torch.nextafter(weight.cpu(), torch.tensor(torch.inf)).to(weight.device)
            if self.how == "in place":
                weight.copy_(value)
            else:
                weight.data.copy_(value)


@on_sim
@pytest.mark.filterwarnings("ignore:.*net.0.weight on replica 1.* differed from replica 0 without a trace")
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}], ids=["each step", "accumulated"])
@pytest.mark.parametrize("how", ["in place", "data"])
@pytest.mark.parametrize("name", MODES)
def test_case_51_a_replica_that_drifted_by_one_ulp_is_repaired_or_named(
    name: str, how: str, options: dict[str, Any], execution: str
) -> None:
    """Better than a checksum: what a replica holds is that of its owner before every forward."""

    def weights(callbacks: list[Callback]) -> list[dict[str, torch.Tensor]]:
        history = History()
        strategy = dpx.DPXStrategy(
            reducer=name, execution=execution, gradient_buckets=0, check_replicas_every_n_steps=1
        )
        trainer = make_trainer(
            strategy=strategy, devices=2, accelerator="sim", callbacks=[*callbacks, history], max_epochs=1, **options
        )
        trainer.fit(Odd(1.0, width=64), make_loader(48))
        return history.weights[-1]

    try:
        ours = weights([Nudges(1, how)])
    except dpx.DPXError as error:
        assert "net.0.weight" in str(error)  # noqa: PT017
        assert "replica 1" in str(error)  # noqa: PT017
        return
    for mine, expected in zip(ours, weights([]), strict=True):
        assert_equal(mine, expected, bitwise=True)


@on_sim
def test_case_51_a_check_on_demand_names_parameter_and_replica() -> None:
    found: list[str] = []

    class Checks(Nudges):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            trainer.strategy.check_replicas()
            super().on_train_batch_start(trainer, module, batch, batch_idx)
            if batch_idx == self.at:
                with pytest.raises(dpx.ReplicationError, match=r"net\.0\.weight on replica 1, as where") as error:
                    trainer.strategy.check_replicas()
                found.append(str(error.value))

    strategy = dpx.DPXStrategy(reducer="colocate", execution="inline", check_replicas_every_n_steps=0)
    trainer = make_trainer(strategy=strategy, devices=2, accelerator="sim", callbacks=[Checks(2, "data")], max_epochs=1)
    trainer.fit(Odd(1.0, width=64), make_loader(48))
    assert len(found) == 1


class Root(nn.Module):
    """A square root, which has no value for what is negative."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


class RootInOneSlice(Classifier):
    """Only the second replica's rows are negative somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Sequential(nn.Identity(), Root()), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch[0].abs() + 1
        return F.cross_entropy(self.net(-rows if self.global_rank == 1 else rows), batch[1])


@pytest.mark.filterwarnings("ignore:.*Error detected in.*", "ignore:.*anomaly.*:UserWarning")
def test_case_46_anomalies_name_the_first_module_with_a_nan(execution: str, hardware: str) -> None:
    model = RootInOneSlice()
    trainer = make_trainer(
        strategy=dpx.DPXStrategy(execution=execution, verify="off"), devices=3, max_epochs=1, detect_anomaly=True
    )
    with pytest.raises(RuntimeError, match="nan") as caught:
        trainer.fit(model, make_loader(), make_loader())
    notes = caught.value.__notes__
    assert f"In replica 1 on {places(3)[1]}, during backward." in notes
    assert "The first module whose output held a NaN was net.0.1." in notes
    assert not any(child._forward_hooks for child in model.modules())
