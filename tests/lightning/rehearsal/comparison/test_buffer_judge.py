"""Buffers: which rules make of the slices' buffers what one device has."""

import torch

from lightning_dpx.lightning.rehearsal.comparison.buffer_judge import BufferJudge
from lightning_dpx.replicas.merging.tolerance import Tolerance

PARTS = {"mean": 12.5, "sum": 14.0, "max": 13.0, "min": 11.0, "first": 11.0}


def value(rule: str) -> torch.Tensor:
    return torch.tensor([PARTS[rule]])


def test_each_rule_is_found_by_what_one_device_has() -> None:
    for rule in ("mean", "sum", "max"):
        judge = BufferJudge({"seen": torch.tensor([PARTS[rule]])}, Tolerance(1e-6))
        assert judge.rule("seen", value) == rule
        assert judge.fitting["seen"] == [rule]


def test_a_buffer_that_is_equal_everywhere_or_nowhere_is_the_first_replicas() -> None:
    judge = BufferJudge({"seen": torch.tensor([3.0]), "lost": None}, Tolerance(1e-6))
    assert judge.rule("seen", lambda _rule: torch.tensor([3.0])) == "first"
    assert judge.rule("lost", value) == "first"
    assert judge.rule("other", value) == "first"
    assert judge.fitting == {}


def test_what_all_slices_have_alike_adds_up_where_one_device_has_more() -> None:
    judge = BufferJudge({"seen": torch.tensor([3.0])}, Tolerance(1e-6))
    assert judge.rule("seen", lambda rule: torch.tensor([3.0 if rule == "sum" else 1.0])) == "sum"
    assert judge.rule("seen", lambda rule: torch.tensor([4.0 if rule == "sum" else 2.0])) == "first", "announced"
