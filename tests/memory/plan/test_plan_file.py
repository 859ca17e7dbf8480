"""A plan on disk is the old one or the new one, whole, and what was saved is loaded."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_dpx as dpx
from lightning_dpx.memory import Decision, MemoryPlan
from lightning_dpx.memory.plan.plan import Action

ACTIONS: tuple[Action, ...] = ("keep", "recompute", "recompute each time", "compress", "offload")


def plan_of(*decisions: Decision, **head: Any) -> MemoryPlan:
    empty = MemoryPlan("Model", "0123", "auto", None, 10, 5, 3, 0.1, 0.05, decisions)
    return replace(empty, **head)


def many(count: int) -> MemoryPlan:
    rows = [
        Decision(
            f"blocks.{n}.norm#2:1", "AddmmBackward0", 4096 * n, 1.5e-5 * n, ACTIONS[n % 5], ("a.b", "a.c#2") * (n % 2)
        )
        for n in range(count)
    ]
    return plan_of(*rows)


TEXTS = st.text(min_size=1) | st.sampled_from(
    ["null", "yes", "1", "1e3", ".inf", "~", "a: b", "- a", "#", "''", "0x1", "1:2"]
)
NUMBERS = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
ROWS = st.tuples(TEXTS, TEXTS, st.integers(0, 2**70), NUMBERS, st.sampled_from(ACTIONS), st.lists(TEXTS, max_size=2))


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS), TEXTS, NUMBERS)
def test_what_can_be_saved_can_be_loaded(tmp_path_factory: Any, rows: Any, model: str, share: float) -> None:
    unique = {row[0]: Decision(*row[:5], tuple(row[5])) for row in rows}
    plan = plan_of(*unique.values(), model=model, recompute_share=share)
    path = tmp_path_factory.mktemp("plans") / "plan.yaml"
    plan.save(path)
    assert MemoryPlan.load(path) == plan
    content = yaml.safe_load(path.read_text())  # by anybody
    assert [row["name"] for row in content["decisions"]] == [decision.name for decision in plan.decisions]


def test_a_file_that_is_cut_at_any_line_is_refused(tmp_path: Path) -> None:
    many(6).save(tmp_path / "plan.yaml")
    lines = (tmp_path / "plan.yaml").read_text().splitlines(keepends=True)
    for end in range(len(lines)):
        (tmp_path / "cut.yaml").write_text("".join(lines[:end]))
        with pytest.raises(dpx.PlanError, match=r"cut\.yaml"):
            MemoryPlan.load(tmp_path / "cut.yaml")
    for gone in range(len(lines) - 6, len(lines)):
        (tmp_path / "cut.yaml").write_text("".join(lines[:gone] + lines[gone + 1 :]))
        with pytest.raises(dpx.PlanError, match=r"lists 5 decisions, and num_decisions is 6: lines are missing"):
            MemoryPlan.load(tmp_path / "cut.yaml")


@pytest.mark.parametrize(
    "bad",
    [
        {"decisions": (Decision("a:1", "", -1, 0.0, "keep"),)},
        {"decisions": (Decision("a:1", "", 1, float("inf"), "keep"),)},
        {"decisions": (Decision("a:1", "", 1, 0.0, "forget"),)},  # type: ignore[arg-type]
        {"decisions": (Decision("a:1", "", 1, 0.0, "keep"),) * 2},
        {"recompute_share": float("nan")},
    ],
)
def test_what_could_not_be_loaded_is_not_saved_and_the_plan_before_stays(bad: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    many(3).save(path)
    with pytest.raises(dpx.PlanError, match=r"plan\.yaml"):
        plan_of(**bad).save(path)
    assert MemoryPlan.load(path) == many(3)
    assert os.listdir(tmp_path) == ["plan.yaml"]


def test_a_save_that_fails_leaves_the_plan_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.yaml"
    many(3).save(path)
    path.chmod(0o640)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            many(5).save(path)
    assert MemoryPlan.load(path) == many(3)
    assert os.listdir(tmp_path) == ["plan.yaml"]
    many(5).save(path)
    assert MemoryPlan.load(path) == many(5)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("folder", ["nowhere", "plan.yaml"])
def test_where_nothing_can_be_written_the_error_names_the_path_that_was_given(folder: str, tmp_path: Path) -> None:
    many(3).save(tmp_path / "plan.yaml")
    path = tmp_path / folder / "new.yaml"
    with pytest.raises((FileNotFoundError, NotADirectoryError)) as caught:
        many(3).save(path)
    assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == ["plan.yaml"]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    (tmp_path / "link.yaml").symlink_to(tmp_path / "plan.yaml")
    many(2).save(tmp_path / "link.yaml")
    assert (tmp_path / "link.yaml").is_symlink()
    assert MemoryPlan.load(tmp_path / "plan.yaml") == many(2)
    many(2).save("/dev/null")
    assert not Path("/dev/null").is_file()


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    row = Decision("a:1", "", np.int64(7), np.float64(1e-5), "keep")  # type: ignore[arg-type]
    plan_of(row, recompute_share=np.float64(2e-9)).save(tmp_path / "plan.yaml")
    assert MemoryPlan.load(tmp_path / "plan.yaml") == plan_of(row, recompute_share=2e-9)


def test_twenty_thousand_decisions_are_loaded_at_once(tmp_path: Path) -> None:
    plan = many(20_000)
    plan.save(tmp_path / "plan.yaml")
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        loaded = MemoryPlan.load(tmp_path / "plan.yaml")
    finally:
        sys.setprofile(None)
    assert loaded == plan
    assert calls < 200 * 20_000, "calls and returns; a loader of any YAML has thousands a line"


def test_edited_lines_may_have_another_shape(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    many(4).save(path)
    lines = path.read_text().splitlines()
    at = len(lines) - 4
    lines[at] = (
        "  - {name: 'b.0.norm#2:1', operator: AddmmBackward0, num_bytes: 0, seconds: 0, action: 'offload'}  # mine"
    )
    lines[at + 1] = lines[at + 1].replace(", action", ",\n     action")
    path.write_text("\n".join(lines) + "\n\n# the end\n")
    edited = MemoryPlan.load(path)
    assert [decision.action for decision in edited.decisions] == ["offload", *[d.action for d in many(4).decisions[1:]]]
    assert edited.decisions[1] == many(4).decisions[1]
    assert edited.peak is None
