"""Offloaded values travel beside the computation, change no bit, take what was predicted, and leave nothing behind."""

import copy
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_dpx as dpx
from lightning_dpx.memory import profile_module
from lightning_dpx.memory.plan.forecast_of_plan import forecast_plan
from lightning_dpx.simulate import clear_traffic, traffic
from tests.conftest import SIMULATED, sim_device
from tests.memory.execute.test_routine_hooks import Skipping
from tests.memory.models import AWKWARD, ORDINARY, CustomFunction
from tests.memory.plan.test_planning import SavedLate, measured_peak
from tests.shifting.test_offload import LAYERS, ROWS, WIDTH, Tower, allocated, comes_to, fail_in_backward, fetches

HOST, KEPT = torch.device("cpu"), ROWS * WIDTH * 4
on_sim = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
pytestmark = pytest.mark.usefixtures("no_collection")  # what is given back is given back at once
MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(params=[pytest.param("cuda:0", marks=MARKS), pytest.param("sim:0", marks=on_sim)])
def home(request: pytest.FixtureRequest) -> torch.device:
    """Where the model lives."""
    return torch.device(request.param)


def all_offloaded(module: nn.Module, x: Tensor, prefetch_depth: int) -> dpx.MemoryPlan:
    plan = dpx.search_plan(module, x, budget=1.0)
    assert not plan.dropped
    names = [decision.name for decision in plan.decisions]
    return replace(plan.with_actions(dict.fromkeys(names, "offload")), prefetch_depth=prefetch_depth)


def gradients(module: nn.Module, x: Tensor, backwards: int = 1) -> list[Tensor]:
    module.zero_grad()
    torch.manual_seed(7)
    if x.device.type != "cpu":
        torch.get_device_module(x.device).manual_seed(7)
    loss = module(x).float().pow(2).mean()
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    return [p.grad.cpu() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("prefetch_depth", [0, 2])
@pytest.mark.parametrize("name", [*ORDINARY, *AWKWARD])
def test_offloaded_values_give_the_same_gradients(name: str, prefetch_depth: int, home: torch.device) -> None:
    torch.manual_seed(0)
    module, x = (ORDINARY | AWKWARD)[name]()
    module, x = module.to(home), x.to(home)
    plan = all_offloaded(module, x, prefetch_depth)
    plain = copy.deepcopy(module)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        for backwards in (1, 2):  # the second through the same graph
            twin = copy.deepcopy(plain)
            expected = gradients(plain, x, backwards)
            # Some backwards of CUDA add up in any order.
            repeats = home.type != "cuda" or all(map(torch.equal, gradients(twin, x, backwards), expected))
            applied = dpx.apply_plan(module, plan)
            clear = home.type == "sim"
            if clear:
                clear_traffic()
            ours = gradients(module, x, backwards)
            dpx.remove_plan(module)
            if clear:
                back = sum(t.num_copies for t in traffic() if t.source == HOST and t.maker.startswith("devices."))
                once = backwards * len(applied.plan.names("offload"))  # some again, where backward takes another way
                assert once <= back <= 1.02 * once, "each was fetched once"
            # A bias in front of a norm has no gradient but what rounding leaves, so all have one scale.
            tolerance = 0.0 if repeats else 1e-4 * max(float(other.abs().max()) for other in expected)
            for one, other in zip(ours, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=tolerance, equal_nan=True)


def tower(home: torch.device, prefetch_depth: int) -> tuple[Tower, Tensor]:
    """Every part offloads the output of its tanh; gradients exist."""
    model, rows = Tower().to(home), torch.randn(ROWS, WIDTH).to(home)
    dpx.apply_plan(model, all_offloaded(model, rows, prefetch_depth))
    model(rows).sum().backward()
    model.notes.clear()
    if home.type == "sim":
        clear_traffic()
    return model, rows


SIM = sim_device(0)


@on_sim
@pytest.mark.parametrize("prefetch_depth", [0, 1, 2, 3])
def test_fetches_come_ahead_of_use(prefetch_depth: int) -> None:
    model, rows = tower(SIM, prefetch_depth)
    model(rows).sum().backward()
    # the mark of part i comes just before its tanh asks: what part i + 1 asked for, and what was started for others
    used = [(index, LAYERS - 1 - index) for index in reversed(range(LAYERS))]
    assert model.notes == [(index, min(LAYERS, count + prefetch_depth) if count else 0) for index, count in used]
    assert fetches() == LAYERS, "nothing was fetched twice"


@on_sim
@pytest.mark.parametrize("prefetch_depth", [0, 2, 3, 5])
def test_the_last_ones_keep_their_memory_until_others_leave(prefetch_depth: int) -> None:
    model, rows = tower(SIM, prefetch_depth)
    before, held = allocated(SIM)[0], []
    for part in model.parts:
        part.register_forward_hook(lambda *_: held.append(allocated(SIM)[0] - before))
    loss = model(rows).sum()
    # the input and the output of a part are there anyway, and are the last two that were offloaded
    assert [size // KEPT for size in held] == [max(2, min(index + 1, prefetch_depth)) for index in range(LAYERS)]
    assert allocated(SIM)[0] - before < KEPT, "forward is over"
    loss.backward()


@pytest.mark.parametrize("prefetch_depth", [0, 1, 2])
def test_the_peak_is_the_predicted_one(prefetch_depth: int, home: torch.device) -> None:
    torch.manual_seed(0)
    rows = 512 if home.type == "sim" else 8192  # on CUDA, so that a tensor fills the blocks of its allocator
    module = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Tanh()) for _ in range(12))).to(home)
    x, device = torch.randn(rows, 64).to(home), torch.get_device_module(home)
    plan = all_offloaded(module, x, prefetch_depth)
    predicted = forecast_plan(profile_module(module, x), plan)
    gradients(module, x)
    dpx.apply_plan(module, plan)
    gradients(module, x)
    device.synchronize()
    before = device.memory_allocated(home)
    device.reset_peak_memory_stats(home)
    module(x).sum().backward()
    device.synchronize()
    taken = device.max_memory_allocated(home) - before
    largest = (64 + 1) * 64 * 4  # a gradient, until it is added to that of before
    assert taken <= predicted.peak * 1.02 + largest
    assert taken == pytest.approx(predicted.peak, rel=0.02 if home.type == "sim" else 0.05, abs=largest)
    assert predicted.peak <= (4 + 2 * prefetch_depth) * x.nbytes, "without a plan it is 25 times that"


class Bulky(Tower):
    """In the middle of forward it needs as much as twenty outputs for a moment."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale
        for index, part in enumerate(self.parts):
            x = part(x)
            if index == LAYERS // 2:
                torch.empty(20, *x.shape, device=x.device).fill_(0.0)
        return x


@on_sim
@pytest.mark.parametrize("prefetch_depth", [0, 3, 5])
def test_a_peak_in_forward_includes_what_has_not_left_yet(prefetch_depth: int) -> None:
    model, rows = Bulky().to(SIM), torch.randn(ROWS, WIDTH).to(SIM)
    plan = all_offloaded(model, rows, prefetch_depth)
    peak = forecast_plan(profile_module(model, rows), plan).peak
    dpx.apply_plan(model, plan)
    assert measured_peak(model, rows, SIM) == peak == (20 + max(1, prefetch_depth)) * KEPT


ACTIONS = ("keep", "recompute", "recompute each time", "offload")


@on_sim
@pytest.mark.parametrize("name", ["saved late", "unrolled lstm", "gpt", "unet"])
def test_random_plans_take_what_was_predicted_and_change_no_bit(name: str) -> None:
    torch.manual_seed(3)
    module, x = (ORDINARY | {"saved late": lambda: (SavedLate(), torch.randn(64, 32))})[name]()
    module, x = module.eval().to(SIM), x.to(SIM)  # no dropout: each forward of two would draw another mask
    profile, plan = profile_module(module, x), dpx.search_plan(module, x, budget=1.0)
    storages = {value.name: value.storage for value in profile.values if value.name}
    forced = {value.name for value in profile.values if value.offloaded}
    expected = gradients(module, x)
    for seed in range(12):
        generator = random.Random(seed)
        action = {storage: generator.choice(ACTIONS) for storage in sorted(set(storages.values()))}
        decisions = [replace(d, action=action[storages[d.name]]) for d in plan.decisions]
        decisions = [replace(d, action="offload") if d.name in forced and d.action != "keep" else d for d in decisions]
        drawn = replace(plan, decisions=tuple(decisions), prefetch_depth=generator.randrange(4))
        applied = dpx.apply_plan(module, drawn)
        assert all(map(torch.equal, gradients(module, x), expected)), f"seed {seed}"
        assert not applied.not_found
        assert measured_peak(module, x, SIM) == pytest.approx(forecast_plan(profile, drawn).peak, rel=0.003), (
            f"seed {seed}"
        )
        dpx.remove_plan(module)


@on_sim
def test_nothing_stays_when_backward_never_runs() -> None:
    model, rows = tower(SIM, 2)
    before = allocated(SIM)
    loss = model(rows).sum()
    del loss
    assert allocated(SIM) == before


@on_sim
def test_a_backward_of_a_part_leaves_nothing_on_the_device() -> None:
    model, rows = tower(SIM, 2)
    inner: list[Tensor] = []
    hook = model.parts[4].register_forward_hook(lambda _module, _inputs, output: inner.append(output))
    loss = model(rows).sum()
    during = allocated()
    clear_traffic()
    (gradient,) = torch.autograd.grad(loss, inner[0], retain_graph=True)
    assert fetches() == 3 + 2, "parts 7 to 5, and the two before them that were not needed"
    del gradient
    assert comes_to(during)
    hook.remove()  # it holds a tensor whose graph holds the model


def test_a_backward_that_fails_leaves_nothing_and_the_next_one_works(home: torch.device) -> None:
    model, rows = tower(home, 2)
    plain, device = copy.deepcopy(model), torch.get_device_module(home)
    device.synchronize()
    before = device.memory_allocated(home)
    fail_in_backward(model, rows)
    if home.type == "sim":
        assert comes_to([before, allocated()[1]])
    else:
        assert device.memory_allocated(home) == before
    assert all(map(torch.equal, gradients(model, rows), gradients(plain, rows)))


def test_what_is_written_into_is_noticed_as_without_a_plan(home: torch.device) -> None:
    """Before it has left for the host, and after."""
    model, rows = tower(home, 2)
    outputs: list[Tensor] = []

    def overwrite(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        outputs.append(output)
        if at_once:
            with torch.no_grad():
                output.zero_()

    handle = model.parts[3].register_forward_hook(overwrite)
    for at_once in (True, False):
        loss = model(rows).sum()
        if not at_once:
            with torch.no_grad():
                outputs[-1].zero_()
        error = ""
        try:
            loss.backward()
        except RuntimeError as found:
            error = str(found)
        assert re.search(r"changed in place: parts\.3:1 of shape .* has version 1 instead", error)
        outputs.clear()
        model.zero_grad()
    handle.remove()


def test_offloaded_values_hold_while_the_device_lags_far_behind_the_host(home: torch.device) -> None:
    """Whatever is read before it has arrived, or overwritten before it was read, shows here."""
    model, rows = tower(home, 2)
    dpx.remove_plan(model)
    expected = gradients(model, rows)

    def lag(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if home.type == "cuda":
            torch.cuda._sleep(2_000_000)
        torch.full_like(output, float("nan"))  # takes any memory that was given back too early

        def delay(gradient: Tensor) -> None:
            if home.type == "cuda":
                torch.cuda._sleep(2_000_000)
            torch.full_like(gradient, float("nan"))

        output.register_hook(delay)

    for prefetch_depth in (0, 1, 2):
        plan = all_offloaded(model, rows, prefetch_depth)
        dpx.apply_plan(model, plan)
        handles = [part.register_forward_hook(lag) for part in model.parts]
        assert all(map(torch.equal, gradients(model, rows), expected))
        for handle in handles:
            handle.remove()
        dpx.remove_plan(model)


@on_sim
def test_a_backward_inside_of_the_forward_s_context() -> None:
    model, rows = Tower().to(SIM), torch.randn(ROWS, WIDTH).to(SIM)
    plan, expected = all_offloaded(model, rows, 3), gradients(model, rows)
    applied, before = dpx.apply_plan(model, plan), allocated()
    model.zero_grad(set_to_none=False)
    with applied.active():
        loss = model(rows).pow(2).mean()
        loss.backward()
        del loss
        assert comes_to(before)
    assert torch.equal(model.scale.grad.cpu(), expected[0])


@on_sim
def test_graphs_may_go_backward_in_any_order() -> None:
    model, rows = tower(SIM, 2)
    plain = Tower().to(SIM)
    for order in ([0, 1, 2], [2, 0, 1]):
        for each in (plain, model):
            each.zero_grad()
            losses = [each(rows * (index + 1)).sum() for index in range(3)]
            for index in order:
                losses[index].backward()
            del losses
        assert torch.equal(model.scale.grad, plain.scale.grad)


@on_sim
def test_a_plan_of_a_device_is_followed_on_the_host_but_for_what_it_offloads() -> None:
    torch.manual_seed(0)
    module, x = CustomFunction(), torch.randn(64, 64)
    plan = all_offloaded(copy.deepcopy(module).to(SIM), x.to(SIM), 2)
    expected = gradients(module, x)
    assert dpx.estimate_cost(module, plan, x)["peak"] == dpx.search_plan(module, x, budget=1.0).peak
    dpx.apply_plan(module, plan)
    assert all(map(torch.equal, gradients(module, x), expected))


def held_by_forward(module: nn.Module, x: Tensor) -> int:
    """Bytes that a forward leaves for its backward."""
    (before,) = allocated(x.device)
    loss = module(x).square().mean()
    (after,) = allocated(x.device)
    loss.backward()
    return after - before


@on_sim
@pytest.mark.parametrize("steps_before", [0, 20], ids=["soon", "late"])
def test_layers_that_the_planned_step_skipped_are_offloaded_like_those_that_it_had(steps_before: int) -> None:
    torch.manual_seed(0)
    module, x = Skipping().to(SIM), torch.randn(ROWS, 64).to(SIM)
    plain = copy.deepcopy(module)
    module.left_out = {1, 2}
    plan = all_offloaded(module, x, 0)
    expected = held_by_forward(plain, x)
    applied = dpx.apply_plan(module, plan, watches=True)
    # After so many the hooks follow a routine, which the layers are not in.
    for _ in range(steps_before):
        gradients(module, x)
    assert applied.values is not None
    module.left_out = set()
    assert held_by_forward(module, x) < 0.1 * expected
    assert all(map(torch.equal, gradients(module, x), gradients(plain, x)))
