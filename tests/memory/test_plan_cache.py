"""Profiles and plans come back from their files as they were, or not at all."""

import os
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.memory import plan_cache, plan_profile, profile_module, search_plan
from lightning_dpx.memory.execute.recipes import registry
from lightning_dpx.memory.plan_cache import PlanCache, default_folder, key_of_plans, key_of_step
from tests.conftest import SIMULATED, sim_device

CPU = torch.device("cpu")


def chain() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(128, 64)


def test_profiles_and_plans_come_back_as_they_were(tmp_path: Path) -> None:
    module, x = chain()
    profile = profile_module(module, x)
    plan = plan_profile(module, profile, int(0.6 * profile.peak))
    cache = PlanCache(tmp_path)
    cache.keep_profiles("steps", [profile, profile])
    cache.keep_plans("plans", [plan], [7])
    assert cache.profiles("steps") == [profile, profile]
    assert cache.plans("plans", module) == ([plan], [7])
    assert key_of_plans(cache.profiles("steps") or (), "auto", 5) == key_of_plans([profile, profile], "auto", 5)
    assert key_of_plans([profile], "auto", 5) != key_of_plans([profile], "auto", 6)


def test_a_plan_for_another_module_is_not_taken(tmp_path: Path) -> None:
    module, x = chain()
    said: list[str] = []
    cache = PlanCache(tmp_path, said.append)
    cache.keep_plans("key", [search_plan(module, x)])
    assert cache.plans("key", nn.Linear(2, 2)) is None
    assert "is not for this module" in said[0]
    assert cache.plans("other", module) is None


@pytest.mark.parametrize("damage", ["", "{}", "null\n", "\0" * 50, "[" * 10_000])
def test_a_file_of_something_else_is_not_read(tmp_path: Path, damage: str) -> None:
    cache = PlanCache(tmp_path)
    cache.save("key", {"profiles": []})
    assert cache.load("key") == {"profiles": []}
    cache.path_of("key").write_text(damage)
    assert cache.load("key") is None
    assert cache.profiles("key") is None


def test_what_is_whole_and_no_profile_is_not_taken(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    module, _ = chain()
    wrong = [[], {"profiles": 3}, {"profiles": [["one", "Popen", []]]}, {"profiles": [["tuple", []]]}, {"plans": [{}]}]
    for content in wrong:
        cache.save("key", content)
        assert cache.profiles("key") is None
        assert cache.plans("key", module) is None


def test_the_oldest_entries_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "_MOST_ENTRIES", 3)
    cache = PlanCache(tmp_path)
    for number in range(3):
        cache.save(f"key{number}", number)
        os.utime(cache.path_of(f"key{number}"), (number, number))
    assert cache.load("key0") == 0  # used just now
    cache.save("key3", 3)
    assert [cache.load(f"key{number}") for number in range(4)] == [0, None, 2, 3]
    monkeypatch.setattr(plan_cache, "_MOST_TOTAL", 1)
    cache.save("key4", 4)
    assert not list(tmp_path.iterdir())  # not even that one is small enough


def test_search_plan_finds_a_plan_where_that_is_asked_for(tmp_path: Path) -> None:
    module, x = chain()
    search_plan(module, x, budget=0.7)
    assert not default_folder().exists()
    first = search_plan(module, x, budget=0.7, plan_cache=tmp_path)
    entries = sorted(tmp_path.iterdir())
    assert len(entries) == 2
    assert search_plan(module, x, budget=0.7, plan_cache=tmp_path) == first  # times and all
    assert search_plan(module, x[:64], budget=0.7, plan_cache=tmp_path) != first
    assert len(list(tmp_path.iterdir())) == 4


class Branches(nn.Module):
    """Keeps more where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, rows: torch.Tensor, kind: str = "short") -> torch.Tensor:
        rows = self.layer(rows).tanh()
        if kind == "long":
            rows = rows.repeat(1, 8).tanh().sin()
        return rows.sum()


@pytest.mark.parametrize("by_name", [False, True])
def test_what_a_forward_is_told_beside_its_tensors_is_another_step(tmp_path: Path, by_name: bool) -> None:
    module, rows = Branches(), torch.ones(32, 64)
    peaks = []
    for kind in ("short", "long", "short"):
        inputs, kwargs = ((rows,), {"kind": kind}) if by_name else ((rows, kind), None)
        peaks.append(search_plan(module, *inputs, kwargs=kwargs, plan_cache=tmp_path).peak)
    assert peaks[0] == peaks[2] < peaks[1]


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_a_simulated_device_with_another_link_is_another_device() -> None:
    module, x = chain()
    device = sim_device(0)
    keys = {key_of_step(module, (x,), device)}
    try:
        for link in ("5GB/s", "50GB/s"):
            dpx.simulate(8, link=link)
            keys.add(key_of_step(module, (x,), device))
    finally:
        dpx.simulate(8)
    assert len(keys) == 3
    assert key_of_step(module, (x,), device) in keys


def test_keys_tell_steps_apart() -> None:
    module, x = chain()
    key = key_of_step(module, (x,), CPU)
    assert key == key_of_step(module, (x + 1,), CPU)
    assert key != key_of_step(module, (x,), CPU, "rank 1")
    assert key != key_of_step(module, (x.double(),), CPU)
    with torch.autocast("cpu", torch.bfloat16):
        assert key != key_of_step(module, (x,), CPU)
    assert not key_of_step(nn.LazyLinear(3), (x,), CPU)


@pytest.mark.parametrize(
    ("backend", "precision"), [("cuda.matmul", "tf32"), ("cudnn.conv", "ieee"), ("mkldnn.matmul", "bf16")]
)
def test_backends_may_compute_float32_each_in_its_way(backend: str, precision: str) -> None:
    """Torch's one name for all of them raises then, and so did every run with a budget."""
    module, x = chain()
    key = key_of_step(module, (x,), CPU)
    operators = attrgetter(backend)(torch.backends)
    before = operators.fp32_precision
    operators.fp32_precision = precision
    try:
        assert key_of_step(module, (x,), CPU) != key
    finally:
        operators.fp32_precision = before


@pytest.mark.usefixtures("own_registries")
def test_a_recipe_of_ones_own_makes_another_key() -> None:
    """What it gives was compared when the step was profiled, and by no run that finds the profile."""
    module, x = chain()
    keys = {key_of_step(module, x, CPU)}
    for power in (2, 3):
        registry.RECIPES.pop("CubeBackward", None)
        dpx.register_recipe("CubeBackward")(lambda node, power=power: (lambda x: x**power, [node.edge(0)]))
        keys.add(key_of_step(module, x, CPU))
    assert len(keys) == 3
    assert key_of_step(module, x, CPU) in keys
