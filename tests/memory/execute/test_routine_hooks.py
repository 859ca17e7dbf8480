"""Hooks are on where a plan drops something, and nowhere else; steps that differ are followed call by call again."""

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import lightning_dpx as dpx
from lightning_dpx.memory import AppliedPlan, MemoryTrace
from lightning_dpx.memory.execute.routine_hooks import RoutineHooks
from tests.memory.models import ORDINARY
from tests.memory.steps import DropsEverything

ROWS = 64


class Skipping(nn.Module):
    """Blocks, some of which are left out when asked for; what is between them is of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
        self.left_out: set[int] = set()
        self.first: Callable[[Tensor], Tensor] = torch.tanh
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x * 2.0)
        for number, block in enumerate(self.blocks):
            if number not in self.left_out:
                x = x + block(x)
        if self.again:
            x = self.blocks[0](x)
        return torch.sigmoid(x) * x


def make(share: float = 0.5) -> tuple[nn.Module, nn.Module, Tensor, dpx.MemoryPlan]:
    torch.manual_seed(3)
    module, x = Skipping(), torch.randn(ROWS, 64)
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, x, budget=share)
    return module, plain, x, plan


def peak_of(module: nn.Module, x: Tensor) -> int:
    module.zero_grad(set_to_none=True)
    trace = MemoryTrace(torch.device("cpu"))
    with trace:
        loss = module(x).pow(2).mean()
        loss.backward()
    del loss
    return trace.peak_of_passing()


def gradients_of(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    module(x).pow(2).mean().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def hooks_of(module: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in module.modules())


def values_of(applied: AppliedPlan) -> RoutineHooks:
    assert isinstance(applied.values, RoutineHooks)
    return applied.values


def test_a_plan_that_drops_nothing_has_no_hooks_after_its_first_step() -> None:
    module, plain, x, _ = make()
    # As much as a step takes that finds gradients: with less, hooks of the root look for these.
    most = dpx.search_plan(module, x, budget=1.0).adding_peak
    applied = dpx.apply_plan(module, dpx.search_plan(module, x, budget=most))
    assert not applied.plan.dropped
    # Those of the root, which look for larger steps.
    assert hooks_of(module) - hooks_of(plain) == 2
    counts: list[int] = []
    handle = list(module.modules())[-1].register_forward_hook(lambda *_: counts.append(hooks_of(module)))
    for _ in range(40):
        assert all(map(torch.equal, gradients_of(module, x), gradients_of(plain, x)))
        assert hooks_of(module) - hooks_of(plain) == 3
    # Of all modules while the first one runs, and where larger ones are looked for.
    assert [number for number, count in enumerate(counts, 1) if count != min(counts)] == [1, 16, 32]
    handle.remove()
    assert module(x).grad_fn._raw_saved_self.unpack_hook is None


def test_a_plan_that_drops_nothing_follows_no_step_for_a_module_that_none_has_called() -> None:
    """Such as the last layer of ``nn.MultiheadAttention``, whose parameters are used without it."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
            self.follows: list[bool] = []
            self.goes_on = False

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x)[0]
            if self.goes_on:
                for _ in range(8):
                    out = self.attention.out_proj(out.tanh())
            self.follows.append(not gc.isenabled())  # the collector rests in forwards that are followed
            return out

    module, x = Attending(), torch.randn(8, 32, 64)
    most = dpx.search_plan(module, x, budget=1.0).adding_peak
    applied = dpx.apply_plan(module, dpx.search_plan(module, x, budget=most))
    assert applied.plan.keeps_all
    module.follows.clear()
    for _ in range(6):
        gradients_of(module, x)
    assert module.follows[2:] == [False] * 4
    # Where one is called after all, the step after that is looked at.
    module.goes_on = True
    gradients_of(module, x)
    with pytest.warns(UserWarning, match="it is another step than the planned one"):
        gradients_of(module, x)


@pytest.mark.parametrize(("name", "share"), [("gpt", 0.3), ("gpt", 0.6), ("unrolled lstm", 0.6), ("lora", 0.4)])
def test_later_steps_give_the_same_bits_in_the_same_memory(name: str, share: float) -> None:
    torch.manual_seed(3)
    module, x = ORDINARY[name]()
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, x, budget=share, planner="optimal")  # others may replay whole calls
    applied = dpx.apply_plan(module, plan)
    peaks = [peak_of(module, x) for _ in range(3)]
    assert peaks[0] == peaks[1] == peaks[2]
    assert values_of(applied).num_deviations == 0
    for _ in range(2):
        results = []
        for each in (module, plain):
            torch.manual_seed(1)
            results.append(gradients_of(each, x))
        assert all(map(torch.equal, *results))
    if share > 0.5 and name != "unrolled lstm":  # one cell is called all the time
        assert hooks_of(module) < 2 * len(list(module.modules())) / 2


@pytest.mark.parametrize("name", sorted(ORDINARY))
def test_what_recipes_look_at_is_no_backward_of_the_steps_own(name: str) -> None:
    torch.manual_seed(3)
    module, x = ORDINARY[name]()
    applied = dpx.apply_plan(module, dpx.search_plan(module, x, budget=0.6, planner="optimal"))
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        module(x).pow(2).mean().backward()
    assert values_of(applied).is_routine


def test_looking_at_a_node_in_the_forward_is_no_backward() -> None:
    module, _, x, plan = make()
    looked: list[Tensor] = []
    module.blocks[3][1].register_forward_hook(lambda _m, _i, out: looked.append(out.grad_fn._saved_self))
    applied = dpx.apply_plan(module, plan)
    for _ in range(2):
        gradients_of(module, x)
    assert looked
    assert values_of(applied).is_routine


def test_hooks_are_off_where_everything_is_kept() -> None:
    module, _, x, plan = make(0.8)
    only = {decision.name: "keep" for decision in plan.decisions} | {"blocks.2.2:1": "recompute"}
    dpx.apply_plan(module, plan.with_actions(only))  # type: ignore[arg-type]
    asked: list[bool] = []
    for _ in range(2):
        module(x)
    for block in module.blocks:
        block[2].register_forward_pre_hook(lambda _m, _i: asked.append(are_hooks_on()))
    module(x)
    assert asked == [False, False, True, False, False, False]


def are_hooks_on() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@pytest.mark.parametrize("left_out", [{1}, {0, 5}, {2, 3, 4}])
def test_layers_that_are_left_out_now_and_then_change_nothing_for_the_others(left_out: set[int]) -> None:
    module, plain, x, plan = make(0.4)
    applied = dpx.apply_plan(module, plan)
    whole = [peak_of(module, x) for _ in range(3)][-1]
    for each in (module, plain):
        each.left_out = left_out
    assert peak_of(module, x) <= whole
    assert all(map(torch.equal, gradients_of(module, x), gradients_of(plain, x)))
    assert values_of(applied).num_deviations == 0
    module.left_out = set()
    assert peak_of(module, x) == whole


class DroppingOut(Skipping):
    """As layers with dropout, whose masks nothing can make again."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.append(nn.Dropout(0.5))


def test_a_layer_that_was_left_out_while_profiled_is_planned_for_as_its_neighbors() -> None:
    """It was kept whole, with its masks, and with it all that came after it in the first step that called it."""
    torch.manual_seed(3)
    module, x = DroppingOut(), torch.randn(ROWS, 64)
    plain = copy.deepcopy(module)
    module.left_out = {1}
    plan = dpx.search_plan(module, x, budget=0.35)
    assert plan.names("compress")
    assert plan.budget is not None
    applied = dpx.apply_plan(module, plan)
    for left_out in ({1}, {1, 3}, {1}, {3}, {0}, {1}, {4, 5}, {2}):
        for each in (module, plain):
            each.left_out = left_out
        assert peak_of(module, x) <= plan.budget
        ours, theirs = [], []
        for each, gradients in ((module, ours), (plain, theirs)):
            torch.manual_seed(1)
            gradients += gradients_of(each, x)
        assert all(map(torch.equal, ours, theirs))
    assert values_of(applied).num_deviations == 0
    peak_of(module, x)  # the 16th was looked at
    assert values_of(applied).is_routine


@pytest.mark.parametrize(("before", "losses"), [(3, 0), (20, 1)], ids=["soon", "late"])
def test_layers_that_come_later_are_planned_for(before: int, losses: int) -> None:
    module, plain, x, plan = make(0.4)
    dpx.apply_plan(module, plan)
    whole = peak_of(module, x)
    dpx.remove_plan(module)
    applied = dpx.apply_plan(module, plan)
    for each in (module, plain):
        each.left_out = {2, 3}
    for _ in range(before):
        peak_of(module, x)
    for each in (module, plain):
        each.left_out = set()
    assert peak_of(module, x) <= whole
    # For a while it waits for all that the plan is about; then these are calls that it has not seen.
    assert values_of(applied).num_deviations == losses
    for _ in range(4):
        assert peak_of(module, x) == whole
        assert all(map(torch.equal, gradients_of(module, x), gradients_of(plain, x)))
    assert values_of(applied).num_deviations == losses


def test_other_operators_in_a_known_place_end_the_routine_and_not_the_savings() -> None:
    module, plain, x, plan = make(0.4)
    applied = dpx.apply_plan(module, plan)
    for _ in range(3):
        peak_of(module, x)
    for each in (module, plain):
        for block in each.blocks:
            block[1].forward = torch.relu
    with pytest.warns(UserWarning, match="it is another step than the planned one"):
        ours = gradients_of(module, x)
    assert all(map(torch.equal, ours, gradients_of(plain, x)))
    assert values_of(applied).num_deviations == 1
    for _ in range(5):
        assert all(map(torch.equal, gradients_of(module, x), gradients_of(plain, x)))
    assert values_of(applied).num_deviations == 1
    assert values_of(applied).is_routine


def test_masks_are_compressed_in_a_forward_that_has_lost_its_routine() -> None:
    torch.manual_seed(3)
    module, x = DroppingOut(), torch.randn(ROWS, 64)
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, x, budget=0.35)
    assert plan.names("compress")
    applied = dpx.apply_plan(module, plan)
    whole = peak_of(module, x)
    peak_of(module, x)
    for each in (module, plain):
        each.blocks[0][1].forward = torch.relu
    torch.manual_seed(1)
    ours = gradients_of(module, x)
    assert values_of(applied).num_deviations == 1
    torch.manual_seed(1)
    assert all(map(torch.equal, ours, gradients_of(plain, x)))
    dpx.remove_plan(module)
    del module.blocks[0][1].forward
    dpx.apply_plan(module, plan)
    for _ in range(2):
        peak_of(module, x)
    module.blocks[0][1].forward = torch.relu
    assert peak_of(module, x) <= 1.2 * whole < 0.5 * peak_of(plain, x)


def test_one_call_more_than_ever_is_dropped_as_well() -> None:
    module, plain, x, plan = make(0.4)
    applied = dpx.apply_plan(module, plan)
    for _ in range(3):
        peak_of(module, x)
    for each in (module, plain):
        each.again = True
    assert all(map(torch.equal, gradients_of(module, x), gradients_of(plain, x)))
    assert values_of(applied).num_deviations == 1


def test_regions_with_hooks_of_others_keep_theirs() -> None:
    module, plain, x, plan = make(0.4)
    dpx.apply_plan(module, plan)
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor.detach()

    def within(block: nn.Module) -> None:
        forward = block.forward

        def hooked(x: Tensor) -> Tensor:
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                out: Tensor = forward(x)
                return out

        block.forward = hooked  # type: ignore[method-assign]

    for each in (module, plain):
        within(each.blocks[2])
        within(each.blocks[5])
    counts = []
    for _ in range(3):
        packed.clear()
        assert all(map(torch.equal, gradients_of(module, x), gradients_of(plain, x)))
        counts.append(len(packed))
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert counts[0] == counts[1] == counts[2]


def test_an_error_in_a_call_leaves_no_hooks_behind() -> None:
    module, plain, x, plan = make(0.4)
    dpx.apply_plan(module, plan)
    for _ in range(2):
        gradients_of(module, x)

    def fail(_module: nn.Module, _given: object) -> None:
        raise ValueError("of the model")

    handle = module.blocks[3][1].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="of the model"):
        module(x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    handle.remove()
    assert all(map(torch.equal, gradients_of(module, x), gradients_of(plain, x)))


class Recurrent(nn.Module):
    """What an LSTM saves only a call makes again; it is one of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (
            nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.Tanh()))) for _ in range(2)
        )
        self.cell = Cell()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for _ in range(4):
            x = self.cell(x)
        return self.after(x)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 64, batch_first=True)
        self.more: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        if "before" in self.more:
            x = torch.sin(x)
        x = self.lstm(x.unflatten(0, (8, 8)))[0].flatten(0, 1)
        return torch.cos(x) if "after" in self.more else x


def test_only_the_calls_that_are_made_again_have_hooks_for_it() -> None:
    torch.manual_seed(0)
    module, x = Recurrent(), torch.randn(ROWS, 64)
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, x, budget=0.75, planner="optimal")
    plan = plan.with_actions({d.name: "keep" for d in plan.decisions if not d.calls})
    assert plan.calls
    applied = dpx.apply_plan(module, plan)
    peaks = [peak_of(module, x) for _ in range(3)]
    assert peaks[0] == peaks[1] == peaks[2] < 0.97 * peak_of(plain, x)
    for more in ([], ["before"], ["after"], ["before", "after"], [], []):
        module.cell.more = more
        plain.cell.more = more
        assert all(map(torch.equal, gradients_of(module, x), gradients_of(plain, x))), more
    for _ in range(8):  # until it is trusted again
        gradients_of(module, x)
    values = values_of(applied)
    assert values.is_routine
    hooked = [path for path, part in module.named_modules() if part._forward_pre_hooks]
    assert len(hooked) <= 5, "of 22; the root's own, the call's, and where what is given to it is saved"


class Shifted(nn.Module):
    """Norms whose eps, and operators with numbers, only the call itself knows; they change from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.quiet = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.number, self.modes = nn.LayerNorm(64), 1.0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(torch.tanh(self.number - self.one(x)))
        x = self.quiet(self.quiet(x))
        self.modes.append(torch._C._len_torch_function_stack())
        return torch.sigmoid(self.norm(x)) * x


def test_operands_are_noted_where_a_recipe_asks_for_them_and_nowhere_else() -> None:
    torch.manual_seed(0)
    module, x = Shifted(), torch.randn(ROWS, 64)
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, x, planner=DropsEverything())
    again = {decision.operator for decision in plan.decisions if decision.action == "recompute"}
    assert {"TanhBackward0", "SigmoidBackward0"} <= again
    applied = dpx.apply_plan(module, plan)
    for step in range(5):
        for each in (module, plain):
            each.number, each.norm.eps = 1.0 + step, 10.0**-step
            each.modes.clear()
        assert all(map(torch.equal, gradients_of(module, x), gradients_of(plain, x)))
        assert not applied.not_found
        assert module.modes == [1 if step == 0 else 0]
    assert values_of(applied).num_deviations == 0
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.filterwarnings("ignore:dpx. parameters have gradients")  # the second of two backwards finds some
def test_a_step_that_runs_a_backward_of_its_own_is_followed_for_good() -> None:
    module, plain, x, plan = make(0.4)
    applied = dpx.apply_plan(module, plan)
    for number in range(3):
        for each in (module, plain):
            each.zero_grad(set_to_none=True)
        # Of the second forward the plan knows nothing, and when the step is over nothing of that is left.
        told = nullcontext() if number else pytest.warns(UserWarning, match="it is another step than the planned one")
        with told, applied.active():
            module(x).sum().backward()
            module(x * 2.0).sum().backward()
        plain(x).sum().backward()
        plain(x * 2.0).sum().backward()
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        assert not values_of(applied).is_routine


def make_watched() -> tuple[nn.Module, Tensor, dpx.MemoryPlan]:
    """A plan that keeps what the first block saves inside; which blocks a search drops depends on measured times."""
    module, _, x, plan = make(0.4)
    dropped = {"blocks.0.2:1"}
    for block in range(1, 5):
        dropped |= {f"blocks.{block}.1:1", f"blocks.{block}.2:1"}
    decisions = []
    for decision in plan.decisions:
        decisions.append(replace(decision, action="recompute" if decision.name in dropped else "keep"))
    return module, x, replace(plan, decisions=tuple(decisions))


def unknown_of(applied: AppliedPlan, module: nn.Module, x: Tensor) -> set[str]:
    applied.unknown.clear()
    gradients_of(module, x)
    return set(applied.unknown)


def test_a_plan_that_watches_tells_of_what_it_does_not_know_in_its_first_steps() -> None:
    module, x, plan = make_watched()
    applied = dpx.apply_plan(module, plan, watches=True)
    for _ in range(7):
        assert not unknown_of(applied, module, x)
    module.again = True
    assert any(name.startswith("blocks.0.") for name in unknown_of(applied, module, x))
    module.again = False
    assert not unknown_of(applied, module, x)
    assert values_of(applied).is_routine


def test_a_plan_that_watches_does_so_again_after_a_step_of_another_structure() -> None:
    module, x, plan = make_watched()
    applied = dpx.apply_plan(module, plan, watches=True)
    for _ in range(9):
        unknown_of(applied, module, x)
    assert values_of(applied).is_routine
    module.again = True
    unknown_of(applied, module, x)
    assert values_of(applied).num_deviations == 1
    for _ in range(8):
        assert any(name.startswith("blocks.0.") for name in unknown_of(applied, module, x))
    assert not unknown_of(applied, module, x)
    assert values_of(applied).num_deviations == 1


def test_a_plan_that_drops_nothing_watches_as_well() -> None:
    module, plain, x, _ = make()
    plan = dpx.search_plan(module, x, budget=1.0)
    assert not plan.dropped
    applied = dpx.apply_plan(module, plan, watches=True)
    module.again = True
    assert any(name.startswith("blocks.0.") for name in unknown_of(applied, module, x))
    module.again = False
    for _ in range(8):
        unknown_of(applied, module, x)
    assert values_of(applied).is_routine
    assert hooks_of(module) == hooks_of(plain) + 2  # those of the root
    assert module(x).grad_fn._raw_saved_self.unpack_hook is None


class Quantised(nn.Module):
    """Takes the nearest code, and lets go of all distances before it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        self.register_buffer("codes", torch.randn(64, 512))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        squares = (self.codes * self.codes).sum(0, keepdim=True)
        distances = (x * x).sum(1, keepdim=True) - 2.0 * (x @ self.codes) + squares
        nearest = distances.clamp(min=0.0).sqrt().argmin(1)
        del distances
        codes = self.codes.t()[nearest]
        return torch.tanh(x + (codes - x).detach())


def test_what_is_gone_before_the_forward_ends_is_dropped_in_later_steps_too() -> None:
    torch.manual_seed(3)
    module, x = Quantised(), torch.randn(256, 64)
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, x, planner=DropsEverything())
    actions = {}
    for decision in plan.decisions:
        actions[decision.name] = "recompute" if decision.operator == "SqrtBackward0" else "keep"
    assert "recompute" in actions.values()
    applied = dpx.apply_plan(module, plan.with_actions(actions))  # type: ignore[arg-type]
    peaks = [peak_of(module, x) for _ in range(4)]
    assert len(set(peaks)) == 1
    assert not applied.not_found
    assert all(map(torch.equal, gradients_of(module, x), gradients_of(plain, x)))


def train_half(module: Skipping, number: int) -> None:
    """The first blocks learn in every second step, the others in between."""
    for at, block in enumerate(module.blocks):
        block.requires_grad_((at < 3) == (number % 2 == 0))


@pytest.mark.parametrize("watches", [True, False])
def test_steps_that_train_parts_in_turns_stay_within_the_budget_of_a_plan_for_both(watches: bool) -> None:
    """What a part saves depends on whether it learns, and not on what is called: no routine is one of both kinds."""
    module, plain, x, plan = make(0.4)
    most = 0
    for number in range(2):
        train_half(module, number)
        applied = dpx.apply_plan(module, plan)
        most = max(most, peak_of(module, x))
        dpx.remove_plan(module)
    applied = dpx.apply_plan(module, plan, watches=watches)
    for number in range(24):
        for each in (module, plain):
            train_half(each, number)
        # Without watching, the second one is the first that shows that there are two kinds.
        if watches or number > 1:
            assert peak_of(module, x) <= most, number
        assert all(map(torch.equal, gradients_of(module, x), gradients_of(plain, x)))
    assert not values_of(applied).is_routine
