"""What planned steps spend beside their operators is measured in the step itself, which is left as it was."""

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dpx.memory import apply_plan, plan_profile, profile_step
from lightning_dpx.memory.module_step import profile_module
from lightning_dpx.memory.profile.bookkeeping import Bookkeeping
from lightning_dpx.memory.profile.bookkeeping_in_step import droppable_values, measured_in_step, with_bookkeeping
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.memory.profile.drop_sites import count_places, made_again, seconds_of_places
from lightning_dpx.python_objects.leave_no_trace import untouched
from tests.conftest import SIMULATED


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Scripted:
    """Runs the steps of a module, and says in turns that they take so long."""

    def __init__(self, module: nn.Module, *seconds: float) -> None:
        self.module = module
        self._seconds = cycle(seconds)
        self.watches = False
        self.hooks: list[int] = []

    def in_a_row(self, measure: Callable[[], Any]) -> Any:
        with untouched(self.module):
            return measure()

    def timed(self, forward: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> tuple[float, float]:
        self.hooks.append(num_hooks(self.module))
        with untouched(self.module):
            backward(forward())
        seconds = next(self._seconds)
        return seconds, seconds


def measured(timer: Scripted, profile: Profile, x: Tensor, known: Bookkeeping, **options: Any) -> Bookkeeping:
    """Of steps that take as long as ``timer`` says."""
    return measured_in_step(
        profile,
        timer.module,
        timer,  # type: ignore[arg-type]
        forward=lambda: timer.module(x).pow(2).sum(),
        backward=Tensor.backward,
        known=known,
        **options,
    )


def num_hooks(module: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in module.modules())


@pytest.fixture(scope="module")
def step() -> tuple[nn.Module, Tensor, Profile]:
    torch.manual_seed(0)
    module = nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(64, 32)
    return module, x, profile_module(module, x)


def test_profiling_leaves_the_module_as_it_was(step: tuple[nn.Module, Tensor, Profile]) -> None:
    module, x, _ = step
    before = copy.deepcopy(module.state_dict())
    states = torch.get_rng_state()
    profile_module(module, x)
    assert num_hooks(module) == 0
    assert all(torch.equal(before[name], now) for name, now in module.state_dict().items())
    assert torch.equal(states, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_all_that_is_made_again_takes_bookkeeping_too(step: tuple[nn.Module, Tensor, Profile]) -> None:
    _, _, profile = step
    more = with_bookkeeping(profile, Bookkeeping(value=1.0, call=10.0, tensor=100.0))
    droppable = droppable_values(profile)
    assert len(droppable) > 8
    assert len(profile.calls) == 4
    more_of = {call.name: 10.0 + 200.0 * call.tensors for call in profile.calls}
    for index, (value, dearer) in enumerate(zip(profile.values, more.values, strict=True)):
        assert dearer.seconds - value.seconds in (0.0, pytest.approx(more_of.get(value.call, 1.0)))
        assert index not in droppable or dearer.seconds > 1.0
    for call, dearer_call in zip(profile.calls, more.calls, strict=True):
        assert dearer_call.seconds - call.seconds == pytest.approx(10.0 + 200.0 * call.tensors)


@pytest.mark.parametrize("step_seconds", [0.002, 2.0])
def test_what_planned_steps_take_longer_is_bookkeeping(
    step: tuple[nn.Module, Tensor, Profile], step_seconds: float
) -> None:
    module, x, profile = step
    is_long = step_seconds > 1.0
    free = replace(
        profile,
        step_seconds=step_seconds,
        values=tuple(replace(value, seconds=0.0) for value in profile.values),
        calls=tuple(replace(call, seconds=0.0) for call in profile.calls),
    )

    # Those that warm up do not count. A long step does so once, and is not run with few values dropped.
    seconds = [*[5.0] * 2, *[1.0, 9.0, 17.0] * 3] if is_long else [*[0.05] * 6, *[1.0, 9.0, 5.0, 17.0] * 3]
    timer = Scripted(module, *seconds)
    known = measured(timer, free, x, Bookkeeping(0.1, 1.0, 0.5))
    sets = (droppable_values(profile)[::2], droppable_values(profile)[::8])[: 1 if is_long else 2]
    made = [len(made_again(profile, dropped)) for dropped in sets]
    places = [count_places(profile, dropped) for dropped in sets]
    value = known.value - known.place * known.usual_places
    assert value * sum(made) + known.place * sum(places) == pytest.approx(8.0 if is_long else 8.0 + 4.0)
    assert sum(known.of_call(call.tensors) for call in profile.calls) == pytest.approx(16.0)
    assert known.step_seconds == 1.0
    assert known.call == pytest.approx(2 * known.tensor)
    assert min(timer.hooks) > 0
    assert num_hooks(module) == 0


def test_the_first_value_of_a_place_takes_longer_than_the_next_ones(step: tuple[nn.Module, Tensor, Profile]) -> None:
    _, _, profile = step
    known = Bookkeeping(value=2.0, place=3.0, usual_places=0.5)
    dear = with_bookkeeping(replace(profile, overhead=replace(profile.overhead, per_place=0.0)), known)
    droppable = droppable_values(profile)
    near, far = droppable[:4], droppable[::4][:4]
    assert count_places(dear, near) < count_places(dear, far) <= len(far)
    for dropped in (near, far):
        made = made_again(dear, dropped)
        seconds = seconds_of_places(dear, dropped) + sum(2.0 for _ in made)
        assert seconds == pytest.approx(0.5 * len(made) + 3.0 * count_places(dear, dropped))
    assert seconds_of_places(dear, []) == 0.0


@pytest.mark.parametrize(("value", "place"), [(1.0, 1.0), (1.0, 2.5), (0.5, 1.0)])
def test_values_and_places_are_told_apart_by_two_sets(
    step: tuple[nn.Module, Tensor, Profile], value: float, place: float
) -> None:
    module, x, profile = step
    free = replace(
        profile, step_seconds=0.001, values=tuple(replace(value, seconds=0.0) for value in profile.values), calls=()
    )
    droppable = droppable_values(profile)
    spent = []
    for dropped in (droppable[::2], droppable[::8]):
        spent.append(value * len(made_again(free, dropped)) + place * count_places(free, dropped))
    timer = Scripted(module, *[0.05] * 4, *[1.0, 1.0 + spent[0], 1.0 + spent[1]] * 3)
    found = measured(timer, free, x, Bookkeeping(0.5, 1.0, 0.5))
    assert found.place == pytest.approx(place, abs=1e-9)
    assert found.value == pytest.approx(value + place * found.usual_places)


def test_where_a_step_runs_a_backward_of_its_own_all_that_it_saves_takes_time() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(64, 32, requires_grad=True)

    def forward() -> Tensor:
        (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return module(x).sum() + gradient.pow(2).sum()

    profile = profile_step(module, forward, torch.device("cpu"))
    assert profile.overhead.per_step > 0.0
    droppable = droppable_values(profile)
    made = [len(made_again(profile, dropped)) for dropped in (droppable[::2], droppable[::8])]
    free = replace(profile, step_seconds=0.001, values=tuple(replace(value, seconds=0.0) for value in profile.values))
    # A value takes 2.0, and the step 3.0.
    timer = Scripted(module, *[0.05] * 4, *[1.0, 1.0 + 3.0 + 2.0 * made[0], 1.0 + 3.0 + 2.0 * made[1]] * 3)
    known = Bookkeeping(value=0.5, again=0.125)
    found = measured_in_step(free, module, timer, forward=forward, backward=Tensor.backward, known=known)  # type: ignore[arg-type]
    assert (found.value, found.following, found.place) == (pytest.approx(2.0), pytest.approx(3.0), 0.0)
    dear = with_bookkeeping(free, found)
    assert (dear.overhead.per_value, dear.overhead.per_step) == (pytest.approx(1.875), pytest.approx(3.0))


def test_of_a_device_that_computes_beside_python_only_what_it_waits_for_counts(
    step: tuple[nn.Module, Tensor, Profile],
) -> None:
    module, x, profile = step
    free = replace(
        profile, step_seconds=2.0, values=tuple(replace(value, seconds=0.0) for value in profile.values), calls=()
    )
    known = Bookkeeping(0.1, 1.0, 0.5)
    found = {}
    for planned in (1.0, 9.0):
        timer = Scripted(module, 5.0, *[1.0, planned] * 3)
        found[planned] = measured(timer, free, x, known, hides=True)
    assert (found[1.0].value, found[1.0].place) == (0.0, 0.0), "all of it is hidden"
    assert found[9.0].value > 0.0


@pytest.mark.parametrize(
    ("seconds", "replayed", "call_share"),
    [(0.001, 2.0, 2 / 3), (0.05, 2.0, 2 / 3), (0.4, 2.0, 2 / 3), (0.4, 0.9, 0.5)],
)
def test_of_such_a_device_operators_may_take_less_within_a_step_than_alone(
    step: tuple[nn.Module, Tensor, Profile], seconds: float, replayed: float, call_share: float
) -> None:
    module, x, profile = step
    call = next(call for call in profile.calls if call.parent < 0)
    alone = replace(
        profile,
        step_seconds=seconds,
        values=tuple(replace(value, seconds=1.0) for value in profile.values),
        calls=(replace(call, seconds=3.0),),
    )
    droppable = droppable_values(alone)
    largest = sorted(droppable, key=lambda index: -alone.values[index].num_bytes)[: len(droppable[::2])]
    made = len(made_again(alone, largest))
    kinds = (0.5 * made, 0.1, replayed) if seconds < 0.01 else (0.5 * made, replayed)
    warm_up = 1 if seconds > 0.1 else 2
    timer = Scripted(module, *[5.0] * warm_up * len(kinds), *[seconds, *(seconds + longer for longer in kinds)] * 3)
    found = measured(timer, alone, x, Bookkeeping(0.1, 1.0, 0.5), hides=True)
    assert seconds <= 0.1 or len(timer.hooks) == 5, "few, as each is long"
    assert (found.operator_share, found.call_share) == (pytest.approx(0.5), pytest.approx(call_share))
    assert (found.value, found.place) == (0.0, 0.0)
    told = with_bookkeeping(alone, found)
    assert {value.seconds for value in told.values if not value.call} == {0.5}
    assert told.calls[0].seconds == pytest.approx(3.0 * call_share + found.of_call(call.tensors))


def test_one_slow_step_without_a_plan_does_not_make_what_comes_on_top_look_like_nothing(
    step: tuple[nn.Module, Tensor, Profile],
) -> None:
    module, x, profile = step
    alone = replace(
        profile, step_seconds=0.4, values=tuple(replace(value, seconds=0.01) for value in profile.values), calls=()
    )
    timer = Scripted(module, 5.0, 0.6, 0.7)
    found = measured(timer, alone, x, Bookkeeping(), hides=True)
    assert found.operator_share == 1.0
    assert found.step_seconds == 0.4


def test_where_nothing_can_be_dropped_no_step_is_run_for_it(step: tuple[nn.Module, Tensor, Profile]) -> None:
    module, x, profile = step
    refused = tuple(replace(value, refused="drawn") for value in profile.values)
    call = next(call for call in profile.calls if call.parent < 0)
    replayed = replace(profile, step_seconds=0.001, values=refused, calls=(replace(call, seconds=3.0),))
    known = Bookkeeping(0.1, 1.0, 0.5)
    # A step that others disturbed while nothing was planned: all that is planned seems to take less than nothing.
    timer = Scripted(module, *[5.0] * 2, *[1.0, 0.5] * 3)
    found = measured(timer, replayed, x, known, hides=True)
    assert len(timer.hooks) == 4, "two that replay to warm up, then one without a plan and one that replays"
    assert (found.operator_share, found.call_share, found.value) == (1.0, 0.25, 0.0)
    timer = Scripted(module, 1.0)
    assert measured(timer, replace(replayed, calls=()), x, known, hides=True) == known
    assert not timer.hooks


def test_calls_take_what_a_step_says_where_elsewhere_they_took_nothing(
    step: tuple[nn.Module, Tensor, Profile],
) -> None:
    module, x, profile = step
    free = replace(
        profile, step_seconds=0.05, values=(), calls=tuple(replace(call, seconds=0.0) for call in profile.calls)
    )
    timer = Scripted(module, *[5.0] * 2, *[0.05, 8.05] * 3)
    found = measured(timer, free, x, Bookkeeping(), hides=True)
    assert sum(found.of_call(call.tensors) for call in profile.calls) == pytest.approx(8.0)
    timer = Scripted(module, *[5.0] * 2, *[1.0, 0.5] * 3)
    assert measured(timer, free, x, Bookkeeping(), hides=True).call_share == 1.0


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_what_the_host_does_for_offloaded_values_counts_and_makes_others_cheaper() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(Block() for _ in range(4))).to("sim:0")
    x = torch.randn(64, 32).to("sim:0")
    profile = profile_module(module, x)
    free = replace(profile, step_seconds=2.0, calls=())
    timer = Scripted(module, *[5.0] * 2, *[1.0, 1.0, 9.0] * 3)
    known = Bookkeeping(0.1, 1.0, 0.5)
    found = measured(timer, free, x, known, hides=True)
    alone = Scripted(module, 5.0, *[1.0, 1.0] * 3)
    kept = measured(alone, replace(free, offloading_room=0), x, known, hides=True)
    assert kept.offload == 0.0, "none of the host's memory may be taken"
    assert 8.0 / found.offload in (5, 6, 7, 8), "so many were offloaded"
    assert num_hooks(module) == 0
    budget = int(0.7 * profile.peak)
    cheap, dear = (
        plan_profile(module, with_bookkeeping(free, replace(found, value=0.0, place=0.0, offload=offload)), budget)
        for offload in (0.0, found.offload)
    )
    assert cheap.names("offload")
    assert not dear.names("offload")


def test_steps_that_are_much_longer_than_bookkeeping_are_not_run_for_it(
    step: tuple[nn.Module, Tensor, Profile],
) -> None:
    module, _, profile = step
    known = Bookkeeping(1e-5, 1e-5, 1e-6)
    timer = Scripted(module, 1.0)
    long = replace(profile, step_seconds=100.0)
    found = measured_in_step(long, module, timer, forward=lambda: None, backward=Tensor.backward, known=known)  # type: ignore[arg-type]
    assert found == known
    assert not timer.hooks


def test_a_step_that_writes_to_what_it_holds_is_timed_as_it_was_watched() -> None:
    module = nn.Linear(4, 4)
    note = torch.zeros(4)
    module.note = [note]  # type: ignore[assignment]

    def forward() -> Tensor:
        note.add_(1.0)
        return module(torch.ones(2, 4)).sum()

    timer = CostModel(torch.device("cpu")).timer(module)
    timer.least(forward, Tensor.backward)
    assert timer.watches
    assert not note.any()


def test_the_plan_that_is_made_gives_the_same_bits(step: tuple[nn.Module, Tensor, Profile]) -> None:
    module, x, profile = step
    planned = copy.deepcopy(module)
    apply_plan(planned, plan_profile(planned, profile, int(0.6 * profile.peak)))
    for each in (module, planned):
        torch.manual_seed(1)
        each(x).pow(2).sum().backward()
    for one, other in zip(module.parameters(), planned.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
