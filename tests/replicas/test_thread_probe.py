"""What speaks for threads on one CPU, and what against."""

from collections import UserDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_dpx.replicas import Trial
from lightning_dpx.replicas.thread_probe import OperatorCensus, first_loss

ROWS = torch.randn(16, 512, 64, generator=torch.Generator().manual_seed(0))


def judge(net: nn.Module, loss_of=lambda net, rows: net(rows).square().mean()):
    trial = Trial(net, num_replicas=2)
    whole = trial.watch(lambda: loss_of(net, ROWS))
    return trial.verdict(whole, lambda: torch.stack([loss_of(net, part) for part in ROWS.chunk(2)]).mean())


def large(*layers: nn.Module) -> nn.Module:
    """About 7 MFLOP per operator of a slice and 16,000 per parameter."""
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), *layers)


def test_the_census_counts_multiplications_and_additions() -> None:
    with OperatorCensus() as census:
        torch.randn(3, 4) @ torch.randn(4, 5)
    assert census.flops == 2 * 3 * 4 * 5
    assert census.num_operators == 3


@pytest.mark.parametrize("kind", [dict, UserDict, MappingProxyType])
def test_the_loss_is_found_in_any_mapping(kind: Any) -> None:
    loss = torch.ones(())
    assert first_loss(kind({"loss": loss, "rows": 2})) is loss
    assert first_loss(kind({"rows": 2})) is None
    assert first_loss(loss) is loss
    assert first_loss(None) is None


def test_large_operators_run_in_threads() -> None:
    verdict = judge(large())
    assert verdict.threads
    assert "operators are large" in verdict.reason


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(rows))
        return rows


class NeedsAllRows(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(16, 512, 64)


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (nn.Sequential(nn.Linear(64, 2), nn.ReLU()), "operators are small"),
        (nn.Sequential(nn.Flatten(), nn.Linear(512 * 64, 256)), "little to compute per parameter"),
        (large(nn.Dropout(0.1)), "random numbers"),
        (large(nn.BatchNorm1d(512)), "writes 2.num_batches_tracked"),
        (large(Counts()), "writes 2.seen"),
        (large(NeedsAllRows()), "fails on a slice"),
    ],
)
def test_what_speaks_against_threads(net, reason) -> None:
    verdict = judge(net)
    assert not verdict.threads
    assert reason in verdict.reason


def test_a_loss_that_is_no_mean_over_rows_keeps_the_batch_whole() -> None:
    verdict = judge(large(), lambda net, rows: F.normalize(net(rows), dim=0).square().sum(-1).std())
    assert not verdict.threads
    assert "no mean over rows" in verdict.reason
