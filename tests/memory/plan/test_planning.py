"""Every plan gives the gradients of the unplanned model, bit for bit, and the peak that was predicted."""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain, combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lightning_dpx as dpx
from lightning_dpx.activations import Inputs
from lightning_dpx.bench import STAGED_MODELS
from lightning_dpx.bench.staged import Chain
from lightning_dpx.memory import (
    PLANNERS,
    MemoryTrace,
    Profile,
    ThresholdPlanner,
    plan_profile,
    profile_module,
    summary,
)
from lightning_dpx.memory.apply import applied_plan
from lightning_dpx.memory.module_step import run_to_loss
from lightning_dpx.memory.plan.forecast_of_plan import forecast_plan
from lightning_dpx.memory.plan.problem import Problem
from lightning_dpx.memory.plan.solvers.repair import fill
from lightning_dpx.memory.plan_search import bytes_of_budget
from tests.conftest import SIMULATED
from tests.memory.models import AWKWARD, ORDINARY, Case, CustomFunction, Residual, UnrolledLSTM
from tests.memory.steps import DropsEverything, train

pytestmark = pytest.mark.xdist_group("profiles")  # which its tests share
CPU = torch.device("cpu")


def measured_peak(module: nn.Module, x: Tensor, device: torch.device = CPU) -> int:
    run = run_to_loss(module, Inputs((x,), {}))
    module.zero_grad(set_to_none=True)
    trace = MemoryTrace(device)
    with trace:
        loss = run()
        loss.backward()
    del loss
    peak = trace.peak_of_passing()
    module.zero_grad(set_to_none=True)  # as every step begins
    return peak


def powerset(names: list[str]) -> list[tuple[str, ...]]:
    return list(chain.from_iterable(combinations(names, size) for size in range(len(names) + 1)))


def make(builder: Callable[[], Case]) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(3)
    module, x = builder()
    return module, copy.deepcopy(module), x


@cache
def profiled(name: str) -> Profile:
    """Of a model that :func:`make` makes; tests only read it."""
    module, _, x = make((ORDINARY | AWKWARD)[name])
    return profile_module(module, x)


def _plan_or_smallest(module: nn.Module, profile: Profile, budget: float) -> dpx.MemoryPlan:
    """Where a budget is refused, the smallest that the message names must work."""
    smallest: int | None = None
    try:
        return plan_profile(module, profile, int(budget))
    except dpx.PlanError as error:
        smallest = error.smallest
    assert smallest is not None
    assert smallest > budget
    return plan_profile(module, profile, smallest)


def _budgets() -> Iterator[Any]:
    """Every model with two of four budgets, so that each budget is met by several models; the other pairs are slow."""
    for number, name in enumerate(ORDINARY):
        for position, share in enumerate((0.7, 0.5, 0.3, 0.2)):
            usual = position in (number % 2, 3 - number % 2)
            yield pytest.param(name, share, marks=[] if usual else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "share"), list(_budgets()))
def test_within_the_budget_and_bit_equal(name: str, share: float) -> None:
    module, plain, x = make(ORDINARY[name])
    without = measured_peak(module, x)
    plan = _plan_or_smallest(module, profiled(name), share * without)
    assert plan.unplanned_peak == without
    assert not plan.keeps_all
    dpx.apply_plan(module, plan)
    assert plan.peak is not None
    assert plan.budget is not None
    assert measured_peak(module, x) == pytest.approx(plan.peak, rel=0.02)
    assert plan.peak <= plan.budget
    dpx.remove_plan(module)
    torch.manual_seed(3)
    module.load_state_dict(plain.state_dict())
    dpx.apply_plan(module, plan)
    assert all(map(torch.equal, train(module, x), train(plain, x)))


@pytest.mark.parametrize("name", [*ORDINARY, *AWKWARD])
def test_every_planner_on_every_model_is_bit_equal(name: str) -> None:
    _, plain, x = make((ORDINARY | AWKWARD)[name])
    profile = profiled(name)
    expected = train(copy.deepcopy(plain), x)
    for planner in ("optimal", "search", "threshold"):
        planned = copy.deepcopy(plain)
        plan = plan_profile(planned, profile, None, planner)
        dpx.apply_plan(planned, plan)
        assert all(map(torch.equal, train(planned, x), expected)), planner
        assert plan.peak is not None
        assert plan.peak <= plan.unplanned_peak or planner == "threshold"


@pytest.mark.parametrize("name", [*ORDINARY, *AWKWARD])
def test_dropping_all_that_can_be_is_bit_equal_and_leaks_nothing(name: str) -> None:
    module, plain, x = make((ORDINARY | AWKWARD)[name])
    plan = plan_profile(module, profiled(name), None, DropsEverything())
    assert len(plan.dropped) > 1
    for action in ("recompute", "recompute each time"):
        fresh, expected = copy.deepcopy(plain), copy.deepcopy(plain)
        applied = dpx.apply_plan(fresh, plan.with_actions(dict.fromkeys(plan.dropped, action)))  # type: ignore[arg-type]
        assert all(map(torch.equal, train(fresh, x), train(expected, x)))
        fresh(x)  # a graph that never runs backward
        assert not applied.values.known.present()


def test_the_planners_are_all_in_the_registry() -> None:
    assert list(PLANNERS) == ["auto", "milp", "optimal", "search", "threshold"]
    with pytest.raises(dpx.ConfigurationError, match="Did you mean 'optimal'"):
        dpx.search_plan(nn.Linear(2, 2), torch.ones(1, 2), planner="optimum")


def test_masks_are_kept_in_a_byte_per_element() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.3), nn.Linear(256, 64), nn.Dropout(0.3))
    plan = dpx.search_plan(module, torch.randn(64, 64), planner=DropsEverything())
    masks = [decision for decision in plan.decisions if decision.action == "compress"]
    assert [mask.num_bytes for mask in masks] == [64 * 256 * 4, 64 * 64 * 4]
    plain, x = copy.deepcopy(module), torch.randn(64, 64)
    applied = dpx.apply_plan(module, plan)
    assert all(map(torch.equal, train(module, x), train(plain, x)))
    assert not applied.not_found
    module.eval()  # no mask under these names now: what is there instead is kept
    module[1].forward = lambda x: x * torch.linspace(0, 1, 256).expand_as(x).clone()
    module(x).sum().backward()
    assert "1:1" in applied.not_found


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_what_cannot_be_computed_again_is_offloaded_on_the_host() -> None:
    torch.manual_seed(0)
    module, x = CustomFunction().to("sim:0"), torch.randn(64, 64, device="sim:0")
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, x, planner=DropsEverything())
    assert plan.names("offload")
    dpx.apply_plan(module, plan)
    results = [[value.cpu() for value in train(each, x)] for each in (module, plain)]
    assert all(map(torch.equal, *results))


def test_no_plan_beats_the_bound() -> None:
    module, _, _ = make(ORDINARY["residual cnn"])
    profile = profiled("residual cnn")
    for share in (0.8, 0.5, 0.3):
        plan = plan_profile(module, profile, int(share * profile.peak))
        assert plan.least_share is not None
        assert plan.recompute_share is not None
        assert 0 < plan.least_share <= plan.recompute_share
        assert f"a gap of {plan.recompute_share / plan.least_share - 1:.1%}" in summary(plan)
    assert plan_profile(module, profile, profile.peak).least_share == 0


def test_planning_changes_nothing() -> None:
    torch.manual_seed(0)
    module, x = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Flatten()),
        torch.randn(4, 3, 9, 9),
    )
    module(x).sum().backward()
    before = copy.deepcopy(module.state_dict())
    gradients = [parameter.grad for parameter in module.parameters()]
    random = torch.get_rng_state()
    dpx.search_plan(module, x)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert [parameter.grad for parameter in module.parameters()] == gradients
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())


def test_the_optimal_plan_costs_no_more_than_any_other() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(Residual(8) for _ in range(20)), nn.Flatten(), nn.Linear(8 * 64, 2))
    x = torch.randn(4, 8, 8, 8)
    search = dpx.search_plan(module, x, planner="search")
    assert search.peak is not None
    assert search.recompute_share is not None
    profile = profile_module(module, x)
    problem = Problem(profile)
    costs = {}
    for name in ("search", "optimal"):
        choice = PLANNERS[name]().choose(problem, search.peak + 4096)
        costs[name] = problem.forecast(choice)
        assert costs[name].peak <= search.peak + 4096
    assert costs["optimal"].seconds <= costs["search"].seconds * 1.05


def test_what_still_fits_is_kept_the_dearest_first() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8))), torch.randn(64, 64)
    problem = Problem(profile_module(module, x))
    tight = PLANNERS["optimal"]().choose(problem, round(0.55 * problem.profile.peak))
    budget = round(0.9 * problem.profile.peak)
    filled = fill(problem, tight, budget)
    assert problem.forecast(filled).peak <= budget
    assert filled.dropped < tight.dropped
    assert problem.forecast(filled).seconds < problem.forecast(tight).seconds


def test_the_threshold_rule_of_the_memory_monger() -> None:
    """Keeps a stage as soon as more than the threshold has gathered, so its stretches are barely longer than that."""
    torch.manual_seed(0)
    module, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16))), torch.randn(64, 64)
    problem = Problem(profile_module(module, x))
    size = 64 * 64 * 4
    dropped = ThresholdPlanner(3 * size).choose(problem, None).dropped
    kept = [index for index in problem.droppable if index not in dropped]
    assert len(kept) >= 3
    assert {b - a for a, b in pairwise(kept)} == {4}


def test_a_plan_can_be_saved_read_edited_and_priced(tmp_path) -> None:  # type: ignore[no-untyped-def]
    module, _, x = make(ORDINARY["gpt"])
    plan = dpx.search_plan(module, x, budget=0.5, planner="optimal")  # another one may replay blocks instead
    plan.save(tmp_path / "plan.yaml")
    assert dpx.MemoryPlan.load(tmp_path / "plan.yaml") == plan
    cost = dpx.estimate_cost(module, plan, x)
    assert cost["peak"] == plan.peak
    assert cost["saved"] == plan.saved_bytes
    text = (tmp_path / "plan.yaml").read_text()
    (tmp_path / "plan.yaml").write_text(text.replace("action: recompute}", "action: keep}"))
    edited = dpx.MemoryPlan.load(tmp_path / "plan.yaml")
    assert not edited.names("recompute")
    assert edited.peak is None
    assert dpx.estimate_cost(module, replace(edited, decisions=()), x)["peak"] == plan.unplanned_peak


@cache
def _plan_of_gpt() -> dpx.MemoryPlan:
    module, _, _ = make(ORDINARY["gpt"])
    plan = plan_profile(module, profiled("gpt"), round(0.4 * profiled("gpt").peak))
    return plan.with_actions({plan.decisions[0].name: "recompute"})  # it may replay blocks instead


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version: 1", "version: 7", "not a plan of version 1"),
        ("action: recompute}", "action: forget}", r"action='forget' is not allowed; give one of keep, recompute"),
        ("num_bytes: ", "bytes: ", "must have exactly name, operator, num_bytes"),
        ("fingerprint: ", "fingerprint: x", "Make a new plan"),
        ("'blocks.1.norm1:1'", "'blocks.77.norm1:1'", "no module 'blocks.77.norm1'"),
        ("'blocks.1.norm1:1'", "'blocks.0.norm1:1'", "decides twice about 'blocks.0.norm1:1'"),
        ("budget: ", "budget: much ", "budget='much"),
        ("micro_batches: 1", "micro_batches: 0", "micro_batches=0 is not allowed"),
        ("decisions:", "- [", "cannot be read as a plan"),
    ],
)
def test_a_broken_plan_file_is_refused(tmp_path, old: str, new: str, message: str) -> None:  # type: ignore[no-untyped-def]
    module, _, _ = make(ORDINARY["gpt"])
    path = tmp_path / "plan.yaml"
    _plan_of_gpt().save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(dpx.PlanError, match=message):
        dpx.apply_plan(module, dpx.MemoryPlan.load(path))
    assert applied_plan(module) is None


@pytest.mark.parametrize("budget", [0, -1, float("nan"), float("inf"), True, "much", "0GiB"])
def test_a_bad_budget_is_refused(budget: object) -> None:
    with pytest.raises(dpx.ConfigurationError, match="is not allowed; give positive bytes"):
        dpx.search_plan(nn.Linear(64, 64), torch.ones(64, 64), budget=budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [1.5, 1.0001, 2**20 + 0.5, 2.0, 60.0])
def test_a_part_of_a_byte_is_no_budget(budget: float) -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"is not allowed; a fraction goes up to 1\.0"):
        dpx.search_plan(nn.Linear(64, 64), torch.ones(64, 64), budget=budget)


def test_a_whole_float_is_bytes_and_one_is_all_of_the_peak() -> None:
    assert bytes_of_budget(1.0, 4096) == 4096
    assert bytes_of_budget(1, 4096) == 1
    assert bytes_of_budget(2e9, 4096) == 2_000_000_000


def test_a_budget_may_be_a_text_as_everywhere_else() -> None:
    assert bytes_of_budget("2KiB", 4096) == 2048
    assert bytes_of_budget("8KiB", 10) == 8192
    assert bytes_of_budget("25%", 4096) == 1024
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
    assert dpx.search_plan(net, torch.ones(64, 32), budget="1 MiB", progress=False).budget == 2**20
    with pytest.raises(dpx.ConfigurationError, match="at most 100%"):
        bytes_of_budget("120%", 4096)


@pytest.mark.parametrize("num_trials", [0, -1, "many", 1.5, True])
def test_a_bad_number_of_trials_is_refused(num_trials: object) -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"num_trials=.* is not allowed; give a positive integer"):
        dpx.search_plan(
            nn.Linear(64, 64),
            torch.ones(64, 64),
            planner="search",
            num_trials=num_trials,  # type: ignore[arg-type]
        )


def test_an_unreachable_budget_names_the_smallest_and_the_layer() -> None:
    module, _, x = make(ORDINARY["residual cnn"])
    with pytest.raises(dpx.PlanError, match=r"smallest that can is [\d.]+ [KM]iB.*is saved by '") as error:
        dpx.search_plan(module, x, budget=1000)
    smallest = error.value.smallest
    assert smallest is not None
    within = dpx.search_plan(module, x, budget=smallest).peak
    assert within is not None
    assert within <= smallest


@pytest.mark.parametrize(
    ("name", "stages", "share"),
    [
        ("cnn", 24, 0.15),
        ("unet", None, 0.5),
        pytest.param("cnn", None, 0.08, marks=pytest.mark.slow),
        pytest.param("gpt", None, 0.175, marks=pytest.mark.slow),
        pytest.param("lstm", None, 0.8, marks=pytest.mark.slow),
        pytest.param("vit", None, 0.15, marks=pytest.mark.slow),
    ],
)
def test_the_smallest_that_is_named_can_be_met_and_so_can_all_above_it(
    name: str, stages: int | None, share: float
) -> None:
    torch.manual_seed(0)
    module, x = STAGED_MODELS[name].build(), STAGED_MODELS[name].make_input(2)
    if stages is not None:  # of a chain, with its last one
        assert isinstance(module, Chain)
        module.chain = nn.ModuleList([*module.chain[:stages], module.chain[-1]])
    profile = profile_module(module, x)
    with pytest.raises(dpx.BudgetError) as error:
        plan_profile(module, profile, 1)
    smallest = error.value.smallest
    assert smallest is not None
    assert smallest < share * profile.peak
    for budget in (smallest, round(1.1 * smallest)):
        plan = plan_profile(module, profile, budget)
        assert plan.peak is not None
        assert plan.peak <= budget
        assert plan.peak == forecast_plan(profile, plan).peak, "what was chosen is what the plan says"


@pytest.mark.parametrize("module", [nn.Identity(), nn.Linear(64, 64).requires_grad_(False)])
def test_a_step_without_gradients_is_refused(module: nn.Module) -> None:
    with pytest.raises(dpx.PlanError, match="nothing to plan"):
        dpx.search_plan(module, torch.ones(64, 64))


def test_writing_into_a_kept_value_is_noticed() -> None:
    """As without a plan: a wrong gradient would be worse than an error."""
    module, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(64, 64)
    applied = dpx.apply_plan(module, dpx.search_plan(module, x, budget=1.0))
    assert not applied.plan.dropped
    module(x)  # is followed tensor by tensor; from then on autograd looks at all by itself
    hidden: list[Tensor] = []
    module[1].register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
    loss = module(x).sum()
    with torch.no_grad():
        hidden[0].zero_()
    with pytest.raises(RuntimeError, match=r"by an inplace operation: .*\[64, 64\]\], which is output 0 of Tanh"):
        loss.backward()


def test_a_second_backward_through_the_same_graph() -> None:
    module, plain, x = make(ORDINARY["unrolled lstm"])
    dpx.apply_plan(module, dpx.search_plan(module, x, planner=DropsEverything()))
    gradients = []
    for each in (module, plain):
        loss = each(x).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    assert all(map(torch.equal, *gradients))


def test_one_graph_through_two_forwards() -> None:
    """What the first forward saved is saved again by the second, under the name that it has there."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid())
    plain, x = copy.deepcopy(module), torch.randn(32, 64)
    applied = dpx.apply_plan(module, dpx.search_plan(module, x, planner=DropsEverything()))
    for one in (plain, module):
        one(one(x) + one(x) * 2.0).sum().backward()
        one(one(x)).sum().backward()
    assert applied.not_found == {}
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    names = []
    result = x
    for _ in range(2):
        result = module(result)
        names.append([value.name for value in applied.values.known.present()])
    assert set(names[0]) == set(names[1]) == applied.plan.dropped


def test_gradients_of_gradients() -> None:
    module, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid()), torch.randn(64, 64)
    plain = copy.deepcopy(module)
    dpx.apply_plan(module, dpx.search_plan(module, x, planner=DropsEverything()))
    penalties = []
    for each in (module, plain):
        y = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(each(y).sum(), y, create_graph=True)
        gradient.pow(2).sum().backward()
        penalties.append([parameter.grad for parameter in each.parameters() if parameter.grad is not None])
    assert all(map(torch.equal, *penalties))


def test_the_headline_of_the_paper_in_bytes_and_flops() -> None:
    """A pre-activation ResNet: from 48 GB to 7 GB at 30% more time. Here 6.9 x for 27% of the FLOPs, 12 x for 33%.

    Planned as if time went with FLOPs: what this machine measures at this moment is not the business of the test.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(Residual(8) for _ in range(80)))
    x = torch.randn(2, 3, 16, 16)
    run = run_to_loss(module, Inputs((x,), {}))

    def flops() -> int:
        with FlopCounterMode(display=False) as counter:
            run().backward()
        return counter.get_total_flops()

    without, unplanned = measured_peak(module, x), flops()
    found = profile_module(module, x)
    values = [replace(v, seconds=1.0 if v.operator == "ConvolutionBackward0" else 0.02) for v in found.values]
    overhead = replace(found.overhead, per_place=0.0)
    profile = replace(found, values=tuple(values), calls=(), overhead=overhead, step_seconds=3.0 * 2 * 80)
    for factor, extra in ((6.9, 0.27), (12.0, 0.33)):
        dpx.apply_plan(module, plan_profile(module, profile, int(profile.peak / factor)))
        assert measured_peak(module, x) <= without / factor
        assert flops() <= unplanned * (1 + extra)
        dpx.remove_plan(module)


class SavedLate(nn.Module):
    """``c`` is read by ``tanh``, which saves its own result, before a product saves ``c`` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        c = h.sigmoid() * h.cos()
        out: Tensor = self.last(torch.tanh(c)) + self.last((c * h).relu())
        return out


ACTIONS = ("keep", "recompute", "recompute each time")


@pytest.mark.parametrize("late", ACTIONS)
@pytest.mark.parametrize("early", ACTIONS)
def test_what_is_saved_after_others_were_computed_from_it_is_one_value(early: str, late: str) -> None:
    module, plain, x = make(lambda: (SavedLate(), torch.randn(64, 32)))
    profile = profile_module(module, x)
    (tanh,) = [value for value in profile.values if value.operator == "TanhBackward0"]
    (c, _) = [index for index, value in enumerate(profile.values) if value.operator == "MulBackward0"]
    assert profile.values[c].name, "the product saves it"
    assert tanh.inputs == (c,)
    plan = dpx.search_plan(module, x)
    chosen = {"TanhBackward0": early, "MulBackward0": late}
    decisions = tuple(replace(d, action=chosen.get(d.operator, "recompute")) for d in plan.decisions)
    plan = replace(plan, decisions=decisions)
    dpx.apply_plan(module, plan)
    assert all(map(torch.equal, train(module, x), train(plain, x)))
    for each in (module, plain):  # a second backward through one graph
        each.zero_grad()
        loss = each(x).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), plain.parameters(), strict=True))
    if "recompute each time" not in (early, late):
        assert measured_peak(module, x) == pytest.approx(dpx.estimate_cost(module, plan, x)["peak"], rel=0.02)


class AsksForBoth(nn.Module):
    """Its product asks for h, and then for y, which is made from h."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).cos()
        out: Tensor = self.last(torch.relu(h) * h)
        return out


def test_what_autograd_still_uses_is_there_though_nobody_will_ask_for_it() -> None:
    module, x = AsksForBoth(), torch.randn(128, 128)
    profile, plan = profile_module(module, x), dpx.search_plan(module, x)
    for names in powerset([decision.name for decision in plan.decisions if decision.operator]):
        drawn = plan.with_actions(dict.fromkeys(plan.dropped, "keep") | dict.fromkeys(names, "recompute"))
        dpx.apply_plan(module, drawn)
        assert measured_peak(module, x) == forecast_plan(profile, drawn).peak, names
        dpx.remove_plan(module)


SUM_OF_GRADIENTS = 4 * 64 * 4  # bytes of a bias of the cell


@pytest.mark.parametrize(("length", "seeds"), [(4, range(60)), (7, range(55, 75))])
def test_random_plans_take_what_was_predicted(length: int, seeds: range) -> None:
    """Also where a value outlives its own use: something is yet to be computed from it, or a view shows it."""
    module, _, x = make(lambda: (UnrolledLSTM(), torch.randn(length, 32, 16)))
    profile, plan = profile_module(module, x), dpx.search_plan(module, x)
    storages = {value.name: value.storage for value in profile.values if value.name}
    for seed in seeds:
        generator = random.Random(seed)
        action = {storage: generator.choice(ACTIONS) for storage in sorted(set(storages.values()))}
        decisions = [replace(d, action=action[storages[d.name]] if d.operator else "keep") for d in plan.decisions]
        drawn = replace(plan, decisions=tuple(decisions))
        dpx.apply_plan(module, drawn)
        measured, predicted = measured_peak(module, x), forecast_plan(profile, drawn).peak
        # Whether a sum of gradients is made in place may depend on what else happens at that moment.
        assert measured <= predicted <= measured + SUM_OF_GRADIENTS, f"seed {seed}"
        dpx.remove_plan(module)
