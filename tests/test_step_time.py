"""Times of steps are those of made-up numbers by hand, and those of the clocks of simulated devices."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.errors import UnsupportedError
from lightning_dpx.reducers import REDUCERS, least_loaded_placement
from lightning_dpx.step_time import (
    Bucket,
    Link,
    Node,
    Work,
    link_seconds,
    messages_of,
    node_counts,
    predict_step,
    predict_steps,
    reduction_copies,
    ring_seconds,
)
from tests.conftest import SIMULATED, make_trainer

sim_only = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
LINK = Link(bytes_per_second=100.0)
WORK = Work(forward=10.0, backward=20.0, optimizer=1.0, rows=32)


def bucket(ready: float, *gradients: float) -> Bucket:
    return Bucket(ready=ready, gradients=gradients, owners=[0] * len(gradients))


def test_one_device_only_computes() -> None:
    step = predict_step(WORK, Node(num_devices=1, buckets=[bucket(5.0, 400.0)]), 400.0, 1, None)
    assert (step.seconds, step.seconds_in_line, step.efficiency) == (31.0, 31.0, 1.0)
    assert step.samples_per_second == 32 / 31


def test_backward_hides_what_was_ready_in_time() -> None:
    # Of two devices the first one sends half of a bucket, and receives half of it twice.
    node = Node(num_devices=2, link=LINK, buckets=[bucket(2.0, 400.0), bucket(20.0, 200.0)], parameters=[(0, 600.0)])
    step = predict_step(WORK, node, 600.0, 1, None)
    assert step.reduction == pytest.approx(3.0), "the last bucket is there when backward ends"
    assert step.hidden == pytest.approx(6.0), "the first one has gone by then"
    assert step.parameters == pytest.approx(6.0)
    assert step.seconds == pytest.approx(31 + 3 + 6)
    assert step.seconds_in_line == pytest.approx(31 + 9 + 6)


def test_a_bucket_waits_for_the_one_before_it() -> None:
    node = Node(num_devices=2, link=LINK, buckets=[bucket(18.0, 400.0), bucket(19.0, 200.0)])
    assert predict_step(WORK, node, 0.0, 1, None).reduction == pytest.approx(18 + 6 + 3 - 20)


def test_latency_counts_for_each_copy() -> None:
    slow = Link(bytes_per_second=100.0, latency=1.0)
    node = Node(num_devices=2, link=slow, buckets=[bucket(20.0, 400.0)])
    # Of three copies both devices take part in all.
    assert predict_step(WORK, node, 0.0, 1, None).reduction == pytest.approx(6.0 + 3.0)


def test_batches_that_accumulate_are_reduced_once() -> None:
    node = Node(num_devices=2, link=LINK, buckets=[bucket(20.0, 400.0)], buffers=[10.0])
    accumulated = predict_step(Work(forward=10, backward=20, optimizer=1, rows=32, batches=3), node, 0.0, 1, None)
    assert accumulated.compute == 91
    assert accumulated.reduction == pytest.approx(6.0)
    assert accumulated.parameters == pytest.approx(3 * 0.1), "buffers go before every forward"
    assert accumulated.samples == 96


def test_a_ring_moves_less_than_twice_the_bytes_and_takes_a_latency_each_round() -> None:
    assert ring_seconds(1000.0, 1, LINK) == 0
    assert ring_seconds(1000.0, 2, LINK) == pytest.approx(10.0)
    assert ring_seconds(1000.0, 4, Link(bytes_per_second=100.0, latency=0.5)) == pytest.approx(15.0 + 3.0)


def test_nodes_wait_for_each_other_after_the_node_itself() -> None:
    node = Node(num_devices=1, buckets=[bucket(0.0, 1000.0)])
    steps = predict_steps(WORK, node, 1000.0, LINK, 4)
    assert [step.nodes for step in steps] == [1, 2, 4]
    # Beside the gradients, what nodes tell each other of one parameter: 8 bytes for it, each node, and the rows.
    assert [step.between_nodes for step in steps] == pytest.approx([0.0, 10.32, 15.72])
    assert steps[2].samples == 4 * 32
    assert steps[2].efficiency == pytest.approx(31 / (31 + 15.72))


def test_the_table_ends_with_what_was_asked_for() -> None:
    assert node_counts(1) == [1]
    assert node_counts(12) == [1, 2, 4, 8, 12]
    assert len(node_counts(1024)) == 11


def test_small_parameters_travel_together() -> None:
    assert messages_of([100.0, 3.0, 4.0, 5.0], [0, 0, 1, 0], 10.0) == [(0, 100.0), (0, 8.0), (1, 4.0)]


def test_reducers_that_are_not_known_are_refused_with_those_that_are() -> None:
    node = Node(num_devices=2, reducer="tree", link=LINK, buckets=[bucket(0.0, 1.0)])
    with pytest.raises(UnsupportedError, match=r"for the reducers collective, colocate, .*'tree'; choose one of them"):
        predict_step(WORK, node, 1.0, 1, None)


def test_a_chain_moves_each_gradient_over_every_link_once() -> None:
    node = Node(num_devices=3, reducer="nccl", link=LINK)
    assert link_seconds(reduction_copies(node, bucket(0.0, 50.0, 50.0)), node) == [1.0, 2.0, 1.0]


def busy(reducer: str, num_devices: int, *gradients: float) -> list[float]:
    node = Node(num_devices=num_devices, reducer=reducer, link=LINK)
    return link_seconds(reduction_copies(node, bucket(0.0, *gradients)), node)


def test_naive_deals_gradients_to_the_devices_from_the_last_one_on() -> None:
    # The last one is summed on the first device, which owns all; the first one on the second, and is handed over.
    assert busy("naive", 2, 100.0, 300.0) == [3.0 + 1.0 + 1.0, 3.0 + 1.0 + 1.0]
    assert busy("naive", 3, 100.0, 300.0) == [6.0 + 1.0 + 1.0, 3.0 + 2.0 + 1.0, 3.0 + 1.0]


def test_every_device_of_a_group_leads_a_part_of_a_bucket() -> None:
    # Groups 0, 1 and 2, 3: two gradients are led by 0 and 2, two by 1 and 3, which hand theirs to the owner, 0.
    assert busy("hierarchical", 4, 100.0, 100.0, 100.0, 100.0) == [2 * 2 + 2 * 2, 2 + 2 * 3, 2 * 2 + 2, 2 + 2 * 2]


# ---- against simulated devices, whose links work in line ----

RATE = 2e9
TOLERANCE = 0.05  # of a step: additions and flattening, which the prediction leaves out
WIDTH = 256


class Wide(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clocks(Callback):
    """What every device has done by the end of each step."""

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self.seconds: list[list[float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seconds.append([torch.ops.dpx_sim.busy(index) for index in range(self.num_devices)])


def seconds_on_simulated(num_devices: int, reducer: str, latency: float = 0.0) -> float:
    """A step of the device that works longest; the last one, in which everything is as it will be."""
    dpx.simulate(num_devices, link=str(int(RATE)) + "B", latency=latency)
    clocks = Clocks(num_devices)
    strategy = dpx.DPXStrategy(reducer=reducer, verify="off", check_replicas_every_n_steps=0)
    trainer = make_trainer(
        strategy=strategy, accelerator="sim", devices=num_devices, max_steps=3, max_epochs=1, callbacks=[clocks]
    )
    rows = 16 * num_devices
    trainer.fit(Wide(), DataLoader(TensorDataset(torch.randn(3 * rows, WIDTH)), rows))
    before, after = clocks.seconds[-2:]
    return max(late - early for early, late in zip(before, after, strict=True))


def predicted(num_devices: int, reducer: str, alone: float, latency: float = 0.0) -> float:
    """The same, of a module whose step takes so long on one device."""
    parameters = list(Wide().parameters())
    sizes = [parameter.nbytes for parameter in parameters]
    owners = [0] * len(sizes)
    if reducer == "colocate":
        owners = least_loaded_placement(sizes, list(range(num_devices)))
    buckets = []
    # Eight layers in eight buckets, of a weight and a bias each.
    for index in range(len(sizes) - 2, -1, -2):
        pair = [index + 1, index]
        found = Bucket(ready=0.0, gradients=[sizes[one] for one in pair], owners=[owners[one] for one in pair])
        buckets.append(found)
    node = Node(
        num_devices=num_devices,
        reducer=reducer,
        link=Link(bytes_per_second=RATE, latency=latency),
        buckets=buckets,
        parameters=messages_of(sizes, owners, WIDTH * WIDTH),
        times_shown=3 if reducer == "colocate" else 0,
    )
    work = Work(forward=alone, backward=0.0, optimizer=0.0, rows=1)
    return predict_step(work, node, 0.0, 1, None).seconds_in_line


@sim_only
@pytest.mark.parametrize("num_devices", [2, 4, 16])
@pytest.mark.parametrize("reducer", ["collective", "colocate", "hierarchical", "naive"])
def test_a_step_takes_what_the_clocks_of_simulated_devices_say(sim: Any, num_devices: int, reducer: str) -> None:
    alone = seconds_on_simulated(1, "naive")
    measured = seconds_on_simulated(num_devices, reducer)
    assert measured > 5 * alone, "what travels is most of the step"
    assert predicted(num_devices, reducer, alone) == pytest.approx(measured, rel=TOLERANCE)


@sim_only
def test_latency_is_that_of_simulated_devices(sim: Any) -> None:
    alone = seconds_on_simulated(1, "naive")
    measured = seconds_on_simulated(4, "collective", latency=1e-3)
    assert measured > 0.05, "most of it is latency"
    assert predicted(4, "collective", alone, latency=1e-3) == pytest.approx(measured, rel=2 * TOLERANCE)


def test_every_reducer_that_is_registered_here_can_be_predicted() -> None:
    ours = [name for name in REDUCERS if REDUCERS[name].__module__.startswith("lightning_dpx.")]
    assert len(ours) >= 5
    for name in ours:
        node = Node(num_devices=4, reducer=name, link=LINK)
        assert max(link_seconds(reduction_copies(node, bucket(0.0, 10.0, 20.0)), node)) > 0, name
