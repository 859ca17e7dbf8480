"""A plan knows what its decisions come to, and belongs to one model."""

import json
from dataclasses import replace

import pytest
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.memory.plan.plan import Decision, MemoryPlan, fingerprint_of, format_plan, from_mapping, to_mapping

DECISIONS = (
    Decision("a:0", "Tanh", 100, 0.5, "keep"),
    Decision("a:1", "Tanh", 100, 0.5, "recompute", ("a",)),
    Decision("b#2:0", "Mul", 200, 0.25, "compress each time"),
    Decision("c:0", "Exp", 300, 0.125, "offload"),
    Decision("d", "a call of Block", 400, 1.0, "replay"),
    Decision("d:0", "Mm", 400, 1.0, "replay", ("d",)),
)
PLAN = MemoryPlan("Net", "0123", "by hand", 1000, 2000, 900, 800, 0.1, 0.05, DECISIONS, prefetch_depth=2)


def test_what_the_decisions_come_to() -> None:
    assert PLAN.dropped == {"a:1", "b#2:0", "c:0"}
    assert PLAN.uncached == {"b#2:0"}
    assert PLAN.replayed == {"d"}, "a call, and not the values within it"
    assert PLAN.calls == {"a"}
    assert not PLAN.keeps_all
    assert replace(PLAN, decisions=DECISIONS[:1]).keeps_all
    assert [decision.module for decision in DECISIONS] == ["a", "a", "b", "c", "d", "d"]


def test_only_what_is_dropped_has_a_table() -> None:
    assert format_plan(PLAN).splitlines()[0].split() == ["module", "values", "saves", "KiB", "costs", "ms"]
    (line,) = format_plan(replace(PLAN, decisions=DECISIONS[:1])).splitlines()
    assert line.startswith("activations: peak ")


def test_a_plan_becomes_plain_values_and_a_plan_again() -> None:
    assert from_mapping(json.loads(json.dumps(to_mapping(PLAN))), "here") == PLAN
    twice = to_mapping(replace(PLAN, decisions=(DECISIONS[0], DECISIONS[0])))
    with pytest.raises(dpx.PlanError, match="here decides twice about 'a:0'"):
        from_mapping(json.loads(json.dumps(twice)), "here")
    with pytest.raises(dpx.PlanError, match="micro_batches=0 is not allowed"):
        from_mapping({**json.loads(json.dumps(to_mapping(PLAN))), "micro_batches": 0}, "here")
    with pytest.raises(dpx.PlanError, match="here is not a plan of version"):
        from_mapping({"version": 0}, "here")


def test_the_fingerprint_is_that_of_names_shapes_and_dtypes() -> None:
    one = fingerprint_of(nn.Linear(2, 3))
    assert one == fingerprint_of(nn.Linear(2, 3)), "not of the numbers"
    others = [nn.Linear(3, 2), nn.Linear(2, 3, bias=False), nn.Linear(2, 3).double(), nn.Sequential(nn.Linear(2, 3))]
    assert one not in map(fingerprint_of, others)


def test_a_misspelled_field_of_a_file_is_told() -> None:
    content = json.loads(json.dumps(to_mapping(PLAN)))
    content["micro_batch"] = content.pop("micro_batches")
    with pytest.raises(dpx.PlanError, match=r"p\.yaml: 'micro_batch' is no field of a plan; the fields are model, .*"):
        from_mapping(content, "p.yaml")


@pytest.mark.parametrize("given", ["plan.yaml", None])
def test_a_file_is_no_plan_yet(given) -> None:
    for use in (dpx.apply_plan, dpx.estimate_cost):
        with pytest.raises(dpx.PlanError, match=r"is no plan; give a MemoryPlan, such as MemoryPlan\.load\(path\)"):
            use(nn.Linear(2, 2), given)
