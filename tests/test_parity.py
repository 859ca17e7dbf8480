"""Any setting gives the result of one device: weights, logged values, validation and predictions."""

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

import lightning_dpx as dpx
from tests.conftest import ADDITIONS, Classifier, assert_equal, make_loader, run, seeded

pytestmark = pytest.mark.usefixtures("hardware")


def strip_rows(seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the one value that tells how many rows a replica saw."""
    return {name: value for name, value in seen.items() if name != "logged/rows"}


def inline() -> dpx.DPXStrategy:
    """Replicas that really run, one after the other."""
    return dpx.DPXStrategy(verify="off", execution="inline")


def check_parity(
    strategy: dpx.DPXStrategy,
    devices: int,
    *,
    optimizer: str = "sgd",
    batch: int = 16,
    additions: int = ADDITIONS,
    **options,
) -> None:
    loader = make_loader(batch_size=batch)
    one = run(seeded(optimizer=optimizer), loader, **options)
    ours = run(seeded(optimizer=optimizer), loader, strategy=strategy, devices=devices, **options)
    assert_equal(strip_rows(ours), strip_rows(one), additions=additions)
    assert ours["logged/rows"] < one["logged/rows"], "the replicas must have seen slices, not the whole batch"


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("workload", ["even", "uneven"])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_replicas_train_to_the_weights_of_one_device(devices, workload, optimizer, execution) -> None:
    shares = "even" if workload == "even" else [3.0, 1.0, 2.0, 1.5][:devices]
    check_parity(dpx.DPXStrategy(verify="off", workload=shares, execution=execution), devices, optimizer=optimizer)


@pytest.mark.parametrize("batch", [7, 13, 50])
def test_batches_that_do_not_divide_and_short_last_ones(batch, execution) -> None:
    check_parity(
        dpx.DPXStrategy(verify="off", execution=execution), 4, batch=batch
    )  # 53 rows: 4, 1 and 3 are left over


def test_gradient_accumulation_and_clipping(execution) -> None:
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}
    check_parity(dpx.DPXStrategy(verify="off", execution=execution), 3, **options)


def test_clipping_by_value(execution) -> None:
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    check_parity(dpx.DPXStrategy(verify="off", execution=execution), 2, **options)


def test_lbfgs_runs_its_closure_on_all_replicas(execution) -> None:
    # Its curvature estimates amplify rounding beyond any fp32 tolerance, so equality is asked for in fp64.
    options = {"optimizer": "lbfgs", "precision": "64-true", "additions": 100 * ADDITIONS}
    check_parity(dpx.DPXStrategy(verify="off", execution=execution), 2, **options)


def test_stochastic_weight_averaging() -> None:
    one = run(seeded(), callbacks=[StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)], max_epochs=3)
    swa = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    ours = run(
        seeded(), callbacks=[swa], max_epochs=3, strategy=dpx.DPXStrategy(verify="off", execution="inline"), devices=2
    )
    assert_equal(strip_rows(ours), strip_rows(one))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_one_device_is_bit_equal(optimizer) -> None:
    assert_equal(run(seeded(optimizer=optimizer), strategy="dpx"), run(seeded(optimizer=optimizer)), bitwise=True)


@pytest.mark.host
def test_auto_merges_replicas_of_one_device_bit_for_bit() -> None:
    assert_equal(run(seeded(norm=True), strategy="dpx", devices=4), run(seeded(norm=True)), bitwise=True)


@pytest.mark.parametrize("leftover", [1, 2, 3])
def test_batch_norm_survives_a_short_last_batch(leftover, execution) -> None:
    loader = make_loader(num_rows=32 + max(leftover, 2), batch_size=16)  # one row fails on one device too
    seen = run(seeded(norm=True), loader, strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=4)
    assert all(torch.isfinite(value).all() for value in seen.values())


def test_two_runs_are_bit_equal(execution) -> None:
    strategies = [dpx.DPXStrategy(verify="off", execution=execution) for _ in range(2)]
    first, second = (run(seeded(), strategy=strategy, devices=4) for strategy in strategies)
    assert_equal(first, second, bitwise=True)


def test_bf16_mixed_is_close_to_one_device(execution) -> None:
    one = run(seeded(), precision="bf16-mixed")
    ours = run(seeded(), precision="bf16-mixed", strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=2)
    torch.testing.assert_close(ours["predictions"], one["predictions"], rtol=0, atol=0.05)


def test_averaged_weights_of_a_callback() -> None:
    one = run(seeded(), callbacks=[EMAWeightAveraging(decay=0.8)])
    ours = run(seeded(), callbacks=[EMAWeightAveraging(decay=0.8)], strategy=inline(), devices=2)
    assert_equal(strip_rows(ours), strip_rows(one))


class Scheduled(Classifier):
    """A learning rate that halves every step, and is logged."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_schedulers_step_once_per_batch(execution) -> None:
    one = run(same_weights(Scheduled(), seeded()))
    ours = run(
        same_weights(Scheduled(), seeded()), strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=3
    )
    assert_equal(strip_rows(ours), strip_rows(one))


def same_weights(model, other):
    model.load_state_dict(other.state_dict())
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_a_compiled_submodule_trains_its_own_copy_on_every_replica() -> None:
    model = seeded()
    model.net = torch.compile(model.net, backend="eager")
    ours = run(model, strategy=inline(), devices=2)
    one = run(seeded())
    assert_equal(strip_rows({name.replace("._orig_mod", ""): value for name, value in ours.items()}), strip_rows(one))
