"""Statistics of what submodules return, by replica."""

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.monitor import TensorMonitor, root_mean_square


def test_observations_come_by_replica_each_in_order_and_once() -> None:
    monitor = TensorMonitor(pattern="net.*")
    for replica, name, value in ((1, "net.0", 3.0), (0, "net.0", 1.0), (1, "net.1", 5.0), (0, "head", 7.0)):
        monitor(replica, name, torch.full((2,), value))
    seen = monitor.collect()
    assert [(one.replica, one.name, one.value) for one in seen] == [(0, "net.0", 1), (1, "net.0", 3), (1, "net.1", 5)]
    assert monitor.collect() == []


def test_the_usual_statistic_shows_what_is_not_finite() -> None:
    assert root_mean_square(torch.tensor([3.0, 4.0])) == pytest.approx(12.5**0.5)
    assert root_mean_square(torch.tensor([1.0, float("nan")])).isnan()
    assert root_mean_square(torch.tensor([1, 1])) == 1


def test_a_statistic_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(dpx.ConfigurationError, match="statistic='mean' is not a function"):
        TensorMonitor("mean")
