"""Random programs that write Python state, in steps and between them, leave what one device leaves."""

import copy
import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_dpx import ReplicaGroup
from tests.conftest import SIMULATED

NAMES = ("items", "tensors", "table", "cache", "seen", "counts", "lists", "recent", "nested", "array", "number")
NEEDS_SIMULATION = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
# What a step does with each row, and what a hook does between two steps.
STEP_ACTS = ("add", "remove")
HOOK_ACTS = ("add", "clear", "replace", "rebind", "delete")
ACTS = st.one_of(
    st.tuples(st.just("step"), st.sampled_from(NAMES), st.sampled_from(STEP_ACTS)),
    st.tuples(st.just("hook"), st.sampled_from(NAMES), st.sampled_from(HOOK_ACTS)),
)


def fresh(name: str) -> Any:
    """An empty value of the attribute's kind."""
    kinds: dict[str, Any] = {
        "items": list, "tensors": list, "table": dict, "cache": OrderedDict, "seen": set, "counts": Counter,
        "lists": lambda: defaultdict(list), "recent": lambda: deque(maxlen=5), "nested": lambda: {"in": {"deep": []}},
        "array": lambda: np.zeros(8, dtype=np.int64), "number": int,
    }  # fmt: skip
    return kinds[name]()


class Program(nn.Module):
    """Rows (B, 1) with integers from 0 to 7; runs its acts for every row, as code that sees a whole batch would."""

    def __init__(self, acts: list[tuple[str, str, str]]) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.acts = acts
        self.step = 0
        for name in NAMES:
            setattr(self, name, fresh(name))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for row in rows:
            for where, name, act in self.acts:
                if where == "step":
                    self.on_row(name, act, row)
        return self.linear(rows)

    def on_row(self, name: str, act: str, row: torch.Tensor) -> None:
        value, held, key = int(row), getattr(self, name, None), f"key {int(row)}"
        if held is None:
            return
        if name == "number":
            self.number = self.step
        elif name in ("items", "recent"):
            held.append(value) if act != "remove" or value not in held else held.remove(value)
        elif name == "tensors":
            held.append(row.detach().clone())
        elif name == "table":
            held.pop(value, None) if act == "remove" else held.update({value: key})
        elif name == "cache":
            held.setdefault(key, row.detach() * 2)
        elif name == "seen":
            held.discard(value) if act == "remove" else held.add(value)
        elif name == "counts":
            held[value] += 1
        elif name == "lists":
            held[value].append(key)
        elif name == "nested":
            held.setdefault("in", {"deep": []})["deep"].append(value)
        elif name == "array":
            held[value] += 1

    def between_steps(self) -> None:
        """What hooks do, on the user's module only."""
        self.step += 1
        for where, name, act in self.acts:
            if where != "hook":
                continue
            if act in ("replace", "rebind"):
                setattr(self, name, fresh(name))
            elif act == "delete" and hasattr(self, name) and name not in ("number", "array"):
                delattr(self, name)
            elif act == "clear" and hasattr(getattr(self, name, None), "clear"):
                getattr(self, name).clear()
            elif act == "add" and hasattr(self, name):
                self.on_row(name, "add", torch.tensor([float(self.step % 8)]))


def state_of(module: Program) -> dict[str, Any]:
    """All attributes as plain values."""
    plain: dict[str, Any] = {}
    for name in NAMES:
        value = getattr(module, name, "deleted")
        if name == "tensors" and isinstance(value, list):
            value = [float(item) for item in value]
        elif name == "cache" and isinstance(value, dict):
            value = {key: float(item) for key, item in value.items()}
        elif isinstance(value, np.ndarray):
            value = value.tolist()
        plain[name] = copy.deepcopy(value)
    return plain


def check(acts: list[tuple[str, str, str]], devices: list[str], execution: Any) -> None:
    batches = [torch.randint(8, (rows, 1), generator=torch.Generator().manual_seed(rows)).float() for rows in (6, 4, 7)]
    one, ours = Program(acts), Program(acts)
    with ReplicaGroup(ours, devices, execution=execution) as group:
        for batch in batches:
            one(batch)
            group.forward(batch)
            assert state_of(ours) == state_of(one)
            one.between_steps()
            ours.between_steps()
    homes = {item.device for item in getattr(ours, "tensors", [])}
    assert homes <= {ours.linear.weight.device, torch.device("cpu")}, "moved to the first device"


@pytest.mark.filterwarnings("ignore:The forward writes Python state that its replicas share")
@pytest.mark.parametrize("execution", ["inline", "threads"])
@given(acts=st.lists(ACTS, min_size=1, max_size=6), num_replicas=st.sampled_from([2, 3]))
@settings(max_examples=25, deadline=None)
def test_random_programs_on_one_device(execution: str, acts: list[tuple[str, str, str]], num_replicas: int) -> None:
    check(acts, ["cpu"] * num_replicas, execution)


@NEEDS_SIMULATION
@pytest.mark.filterwarnings("ignore:The forward writes Python state that its replicas share")
@pytest.mark.parametrize("execution", ["inline", "threads"])
@given(acts=st.lists(ACTS, min_size=1, max_size=6), num_replicas=st.sampled_from([2, 3]))
@settings(max_examples=25, deadline=None)
def test_random_programs_on_devices(execution: str, acts: list[tuple[str, str, str]], num_replicas: int) -> None:
    check(acts, [f"sim:{index}" for index in range(num_replicas)], execution)


class Meter:
    """Counts in slots, as an object that is made often does."""

    __slots__ = ("average", "count")

    def __init__(self) -> None:
        self.count = 0.0
        self.average = 0.0


class ReadsItsMeter(nn.Module):
    """Rows (B, 1) become the number of rows so far; the slice that begins with 0 is the slowest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.meter = Meter()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if float(rows[0]) == 0:
            time.sleep(0.1)
        self.meter.count += len(rows)
        return self.linear(rows) * 0 + self.meter.count


@pytest.mark.parametrize("devices", [["cpu", "cpu"], pytest.param(["sim:0", "sim:1"], marks=NEEDS_SIMULATION)])
def test_a_stage_that_counts_in_slots_takes_turns(devices: list[str]) -> None:
    rows = torch.arange(6.0).view(6, 1)
    with ReplicaGroup(ReadsItsMeter(), devices, execution="threads") as group:
        for step in range(3):
            group.forward(rows)
            seen: Any = group.outputs_merged()
            assert seen.view(-1).tolist() == [6 * step + 3.0] * 3 + [6 * step + 6.0] * 3


class MakesItsList(nn.Module):
    """Rows (B, 1) go into a list that the first step makes; the slice that begins with 0 is the slowest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if float(rows[0]) == 0:
            time.sleep(0.1)
        self.seen = getattr(self, "seen", [])
        self.seen.append(float(rows[0]))
        return self.linear(rows)


@pytest.mark.parametrize("devices", [["cpu", "cpu"], pytest.param(["sim:0", "sim:1"], marks=NEEDS_SIMULATION)])
def test_a_stage_that_writes_what_its_first_step_has_made_takes_turns(devices: list[str]) -> None:
    rows = torch.arange(6.0).view(6, 1)
    module = MakesItsList()
    with ReplicaGroup(module, devices, execution="threads") as group:
        group.forward(rows)
        for _ in range(2):
            module.seen = []
            group.forward(rows)
            assert module.seen == [0.0, 3.0]


class MakesNewLists(MakesItsList):
    """Nothing of a step is written by another one."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.latest = [threading.current_thread() is threading.main_thread()]
        return self.linear(rows) + self.latest[0] * 100


def test_a_stage_that_makes_new_lists_in_each_step_runs_in_threads() -> None:
    rows = torch.arange(6.0).view(6, 1)
    with ReplicaGroup(MakesNewLists(), ["cpu", "cpu"], execution="threads") as group:
        in_turns: list[bool] = []
        for _ in range(3):
            group.forward(rows)
            merged: Any = group.outputs_merged()
            in_turns.append(bool((merged > 50).all()))
        assert in_turns == [True, True, False]


class KeepsTensors(nn.Module):
    """Rows (B, 1); from its second forward on it keeps them, in containers that had no tensor yet."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.calls: list[int] = []
        self.recent: deque[Any] = deque(maxlen=4)
        self.seen: set[Any] = set()
        self.items: list[Any] = []
        self.table: dict[str, Any] = {}
        self.pairs: list[Any] = []
        self.holder = Meter()
        self.box = SimpleNamespace()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.keeps:
            kept = rows.detach().clone()
            self.recent.append(kept)
            self.seen.add(kept)
            self.items.append(kept)
            self.table[f"{int(rows[0])}"] = kept
            self.pairs.append((int(rows[0]), {"rows": [kept]}))
        return self.linear(rows)


@NEEDS_SIMULATION
@pytest.mark.parametrize("execution", ["inline", "threads"])
def test_first_tensors_of_shared_containers_come_home(execution: Any) -> None:
    module = KeepsTensors()
    rows = torch.arange(6.0).view(6, 1)
    with ReplicaGroup(module, ["sim:0", "sim:1"], execution=execution) as group:
        module.keeps = False
        for _ in range(2):
            group.forward(rows)
        module.keeps = True
        in_any_order = pytest.warns(UserWarning, match="forward writes Python state that its replicas share")
        with in_any_order if execution == "threads" else nullcontext():
            group.forward(rows)
        home = module.linear.weight.device
        kept = [*module.recent, *module.seen, *module.items, *module.table.values()]
        kept += [pair[1]["rows"][0] for pair in module.pairs]
        assert len(kept) == 10
        assert {tensor.device for tensor in kept} == {home}
        assert module.recent.maxlen == 4
        group.forward(rows)
        assert {tensor.device for tensor in (*module.recent, *module.seen)} == {home}
