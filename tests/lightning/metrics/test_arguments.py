"""What replicas give to a metric is put together as one device would have given it, and rules are learned."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torchmetrics import MaxMetric, MeanMetric, SumMetric

import lightning_dpx as dpx
from lightning_dpx.errors import GatherError
from lightning_dpx.lightning.metrics.arguments import (
    LARGEST,
    SMALLEST,
    JoinRules,
    JoinSettings,
    join,
    join_calls,
    learn_calls,
)
from tests.conftest import Classifier, make_loader, make_trainer

UNEVEN = JoinSettings(rows=(3, 2))
EVEN = JoinSettings(rows=(2, 2))


class Pair(NamedTuple):
    left: torch.Tensor
    right: str


def rows(num: int, *shape: int, start: float = 0.0) -> torch.Tensor:
    size = num * int(np.prod(shape)) if shape else num
    return torch.arange(size, dtype=torch.float32).reshape(num, *shape) + start


@pytest.mark.parametrize(
    ("parts", "settings", "expected"),
    [
        ([rows(3, 2), rows(2, 2)], UNEVEN, torch.cat([rows(3, 2), rows(2, 2)])),
        ([rows(6), rows(4)], UNEVEN, torch.cat([rows(6), rows(4)])),  # tokens
        ([rows(1), rows(0)], UNEVEN, rows(1)),  # masked rows
        ([rows(4, 3).T, rows(4, 2).T], UNEVEN, torch.cat([rows(4, 3).T, rows(4, 2).T])),
        ([rows(5), rows(5)], UNEVEN, rows(5)),  # weights of classes
        ([torch.tensor(1.0), torch.tensor(2.0)], UNEVEN, torch.tensor(1.4)),
        ([torch.tensor(4), torch.tensor(1)], UNEVEN, torch.tensor(5)),
        ([3, 2], UNEVEN, 5),
        ([2, 2], EVEN, 4),
        ([0.5, 0.5], UNEVEN, 0.5),
        ([True, True], UNEVEN, True),
        ([["a", "b", "c"], ["d", "e"]], UNEVEN, ["a", "b", "c", "d", "e"]),
        ([[{"x": 1}], [{"x": 2}, {"x": 3}]], UNEVEN, [{"x": 1}, {"x": 2}, {"x": 3}]),
        ([{"x": rows(3)}, {"x": rows(2)}], UNEVEN, {"x": torch.cat([rows(3), rows(2)])}),
        ([Pair(rows(3), "s"), Pair(rows(2), "s")], UNEVEN, Pair(torch.cat([rows(3), rows(2)]), "s")),
        ([np.ones(3), np.zeros(2)], UNEVEN, np.array([1.0, 1, 1, 0, 0])),
    ],
    ids=str,
)
def test_values_are_joined(parts: list[Any], settings: JoinSettings, expected: Any) -> None:
    if isinstance(expected, torch.Tensor) and parts[0].ndim == 2 and parts[0].shape[0] == 4:
        settings, expected = JoinSettings(rows=(3, 2), dim=1), torch.cat(parts, 1)
    joined = join(parts, settings, JoinRules(), "value")
    assert type(joined) is type(expected)
    torch.testing.assert_close(joined, expected) if not isinstance(expected, list | Pair) else None
    if isinstance(expected, list):
        assert joined == expected
    if isinstance(expected, Pair):
        torch.testing.assert_close(joined.left, expected.left)


@pytest.mark.parametrize("parts", [["a", "b"], [rows(3), "b"], [rows(3, 2), rows(2, 3, 1)]], ids=str)
def test_values_that_do_not_fit_together_are_named(parts: list[Any]) -> None:
    with pytest.raises(GatherError, match="as argument 0, which do not fit together"):
        join_calls([((part,), {}) for part in parts], UNEVEN, JoinRules())


def test_a_rehearsal_tells_means_from_sums_and_constants_from_rows() -> None:
    def call(mean: float, total: float, constant: torch.Tensor) -> Any:
        return (torch.tensor(mean), torch.tensor(total)), {"constant": constant}

    rules = JoinRules()
    parts = [call(1.0, 3.0, rows(3)), call(2.0, 4.0, rows(3))]
    assert learn_calls(call(1.4, 7.0, rows(3)), parts, UNEVEN, rules) == []
    (mean, total), named = join_calls([call(0.0, 1.0, rows(2)), call(4.0, 2.0, rows(2))], EVEN, rules)
    torch.testing.assert_close((mean.item(), total.item()), (2.0, 3.0))
    assert torch.equal(named["constant"], rows(2))
    assert rules.guessed == {}
    assert learn_calls(call(9.0, 7.0, rows(3)), parts, UNEVEN, JoinRules()) == ["argument 0"]


@pytest.mark.parametrize(
    ("extreme", "parts", "whole", "later", "expected"),
    [
        (
            LARGEST,
            [torch.tensor(1.0), torch.tensor(3.0)],
            torch.tensor(3.0),
            [torch.tensor(9.0), torch.tensor(4.0)],
            9.0,
        ),
        (SMALLEST, [torch.tensor(1), torch.tensor(3)], torch.tensor(1), [torch.tensor(9), torch.tensor(4)], 4),
        (LARGEST, [1.0, 3.0], 3.0, [9.0, 4.0], 9.0),
        (SMALLEST, [np.float64(1.0), np.float64(3.0)], np.float64(1.0), [np.float64(9.0), np.float64(4.0)], 4.0),
        (
            LARGEST,
            [rows(4), rows(4).flip(0)],
            torch.tensor([3.0, 2, 2, 3]),
            [rows(4), rows(4, start=1)],
            [1.0, 2, 3, 4],
        ),
    ],
    ids=str,
)
def test_a_metric_of_extremes_may_be_given_them(
    extreme: str, parts: list[Any], whole: Any, later: list[Any], expected: Any
) -> None:
    rules = JoinRules()
    settings = replace(UNEVEN, extreme=extreme)
    assert learn_calls(((whole,), {}), [((part,), {}) for part in parts], settings, rules) == []
    (joined,), _ = join_calls([((part,), {}) for part in later], settings, rules)
    assert torch.equal(torch.as_tensor(joined), torch.as_tensor(expected, dtype=torch.as_tensor(joined).dtype))
    assert rules.guessed == {"argument 0": extreme}


@pytest.mark.parametrize("whole", [torch.tensor(1.0), torch.tensor(3.0)], ids=["the first", "the last"])
def test_what_is_of_one_row_is_no_extreme(whole: torch.Tensor) -> None:
    parts = [((torch.tensor(1.0),), {}), ((torch.tensor(3.0),), {})]
    assert learn_calls(((whole,), {}), parts, UNEVEN, JoinRules()) == ["argument 0"]


def test_complex_numbers_have_no_extremes() -> None:
    parts = [((torch.tensor(number),), {}) for number in (1j, 3j)]
    settings = replace(UNEVEN, extreme=LARGEST)
    assert learn_calls(parts[1], parts, settings, JoinRules()) == ["argument 0"]


def test_zeros_fit_many_rules_and_decide_nothing() -> None:
    rules = JoinRules()

    def call(value: float) -> Any:
        return (torch.tensor(value),), {}

    assert learn_calls(call(0.0), [call(0.0), call(0.0)], UNEVEN, rules) == []
    assert learn_calls(call(5.0), [call(2.0), call(3.0)], UNEVEN, rules) == []
    (joined,), _ = join_calls([call(4.0), call(4.0)], EVEN, rules)
    assert joined == 8.0, "the sum is the only rule that fitted both times"


class Totals(Classifier):
    """Metrics that are given a sum, a mean with its weight, a constant and an extreme."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.mean, self.steps = SumMetric(), MeanMetric(), SumMetric()
        self.worst = MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self.total(losses.sum().detach())
        self.mean.update(losses.mean().detach(), len(losses))
        self.steps.update(1.0)
        self.worst.update(losses.max().detach())
        return losses.mean()

    def on_train_epoch_end(self) -> None:
        self.log_dict({"total": self.total.compute(), "mean": self.mean.compute(), "steps": self.steps.compute()})
        self.log("worst", self.worst.compute())


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_the_check_before_the_first_step_tells_metrics_sums_from_means(num_replicas: int, execution: str) -> None:
    def fit(**options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        trainer = make_trainer(max_epochs=1, limit_val_batches=0, **options)
        trainer.fit(Totals(), make_loader(), make_loader())
        return trainer.callback_metrics

    ours = fit(strategy=dpx.DPXStrategy(execution=execution), devices=num_replicas)
    for name, value in fit().items():
        torch.testing.assert_close(ours[name].cpu(), value)


class MeanOfFirst(Classifier):
    """A metric is given what is of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self.first.update(losses[0].detach())
        return losses.mean()


def test_what_a_metric_is_given_of_one_row_is_announced(recwarn: Any) -> None:
    torch.manual_seed(0)
    strategy = dpx.DPXStrategy(execution="inline")
    make_trainer(max_epochs=1, strategy=strategy, devices=2).fit(MeanOfFirst(), make_loader())
    assert any("what steps add up in self.first.mean_value" in str(warning.message) for warning in recwarn)
