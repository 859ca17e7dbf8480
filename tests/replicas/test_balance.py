"""Shares by measured speed: they settle, stay bounded, and shrug off noise."""

import random

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.replicas.balance import SMALLEST_SHARE, WINDOW, WorkloadBalancer
from lightning_dpx.replicas.slicing import split_sizes
from tests.conftest import SIMULATED, assert_equal, make_loader, run, seeded

DEVICES = [torch.device("cuda", index) for index in range(4)]


def settle(per_row, fixed=0.0, noise=0.0, rows=256, steps=400, devices=DEVICES):
    """The sizes of every step, on devices with these seconds per row and per step."""
    balancer, generator, seen = WorkloadBalancer(devices), random.Random(0), []
    for _ in range(steps):
        sizes = split_sizes(rows, balancer.shares, rows)
        seen.append(sizes)
        noises = [1 + noise * generator.random() for _ in sizes]
        times = [(fixed + cost * size) * jitter for cost, size, jitter in zip(per_row, sizes, noises, strict=True)]
        balancer.observe(sizes, times)
    return seen


@pytest.mark.parametrize("fixed", [0.0, 50.0])
def test_shares_settle_where_all_devices_take_equally_long(fixed) -> None:
    costs = [1.0, 1.0, 2.0, 4.0]
    seen = settle(costs, fixed)
    times = [fixed + cost * size for cost, size in zip(costs, seen[-1], strict=True)]
    assert max(times) < 1.1 * min(times)
    assert len(set(seen[len(seen) // 4 :])) == 1, "and stay"


def test_a_device_a_hundred_times_slower_keeps_a_small_share() -> None:
    seen = settle([1.0, 1.0, 1.0, 100.0])
    assert seen[-1][3] == 256 * SMALLEST_SHARE / 4
    assert settle([1.0, 1.0, 1.0, 100.0], rows=12)[-1] == (4, 3, 3, 2), "batch norm needs two rows"


def test_noise_moves_nothing() -> None:
    assert set(settle([1.0] * 4, noise=0.05)) == {(64, 64, 64, 64)}
    late = settle([1.0, 2.0, 1.0, 1.0], noise=0.05)[200:]
    assert all(abs(one - other) <= 1 for sizes in late for one, other in zip(sizes, late[0], strict=True))


def test_a_short_batch_that_comes_first_is_no_measure_of_those_that_follow() -> None:
    balancer = WorkloadBalancer(DEVICES[:2])
    balancer.observe([20, 20], [1.0, 3.0])
    for _ in range(WINDOW):
        balancer.observe([32, 32], [1.0, 3.0])
    assert balancer.shares[0] > 0.5


def test_batches_that_have_become_shorter_are_compared_among_themselves() -> None:
    balancer = WorkloadBalancer(DEVICES[:2])
    balancer.observe([32, 32], [1.0, 3.0])
    for _ in range(WINDOW - 1):
        balancer.observe([20, 20], [1.0, 3.0])
    balancer.observe([32, 32], [1.0, 3.0])
    assert balancer.shares == (0.5, 0.5), "short ones between full ones count for nothing"
    for _ in range(2 * WINDOW):
        balancer.observe([20, 20], [1.0, 3.0])
    assert balancer.shares[0] > 0.5


def test_steps_without_time_or_rows_are_ignored() -> None:
    balancer = WorkloadBalancer(DEVICES)
    for _ in range(3 * WINDOW):
        balancer.observe([8, 8, 8, 8], [0.0, 0.0, 0.0, 0.0])
        balancer.observe([8, 8, 0, 0], [1.0, 1.0, 1.0, 1.0])
    assert balancer.shares == (0.25,) * 4


def test_replicas_on_one_device_share_alike() -> None:
    seen = settle([1.0, 3.0, 1.0, 4.0], devices=[DEVICES[0], DEVICES[0], DEVICES[1], DEVICES[1]])
    assert abs(seen[-1][0] - seen[-1][1]) <= 1
    assert abs(seen[-1][2] - seen[-1][3]) <= 1


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_training_on_devices_of_unequal_speed_converges_and_equals_one_device(execution) -> None:
    loader = make_loader(64 * 12, 64)
    sizes = []

    class Watched(dpx.DPXStrategy):
        def training_step(self, *args, **kwargs):
            output = super().training_step(*args, **kwargs)
            sizes.append(self.session.replicas.sizes(64))
            return output

    dpx.simulate(3, speed=[1, 0.5, 0.25])
    try:
        strategy = Watched(workload="auto", execution=execution, verify="off")
        ours = run(seeded(), loader, strategy=strategy, accelerator="sim", devices=3, max_epochs=8)
    finally:
        dpx.simulate(8)
    assert sizes[0] == (22, 21, 21)
    fast, middle, slow = sizes[-1]
    assert fast > 1.5 * middle > 2.2 * slow
    # By one row in line; in threads copies wait for each other in any order, which takes modelled time.
    assert all(abs(rows - last) <= 2 for late in sizes[-20:] for rows, last in zip(late, sizes[-1], strict=True))
    one = run(seeded(), loader, max_epochs=8)
    assert ours.pop("logged/rows") < one.pop("logged/rows"), "of a slice, and of the whole batch"
    assert_equal(ours, one)


def test_speeds_are_checked() -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"speed=\[1, 0\]"):
        dpx.simulate(2, speed=[1, 0])
