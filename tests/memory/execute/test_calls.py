"""Modules that are called again for what no operator in the graph can make, and those that cannot be."""

import gc
import io
import itertools
import random
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import lightning_dpx as dpx
from lightning_dpx.activations import Inputs
from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.memory import profile_module
from lightning_dpx.memory.execute.calls import Call, repeating
from lightning_dpx.memory.module_step import run_to_loss
from lightning_dpx.memory.plan.forecast_of_plan import forecast_plan
from tests import helpers
from tests.conftest import SIMULATED, simulated_bytes
from tests.memory.models import AWKWARD, CustomFunction, Swing, Swinging
from tests.memory.plan.test_planning import make, measured_peak
from tests.memory.steps import train

ROWS = 64


class Around(nn.Module):
    """A module between two layers."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(64, 64), middle, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x))
        out: Tensor = self.last(x["out"] if isinstance(x, dict) else x)
        return out


class Body(nn.Module):
    """Calls a function; by default one whose results nothing else can make."""

    def __init__(self, body: Callable[["Body", Tensor], Any] = lambda _, x: Swing.apply(x, 2.0)) -> None:
        super().__init__()
        self.body, self.count, self.seen = body, 0, list[int]()
        self.log, self.average, self.condition = {"rows": list[int]()}, torch.zeros(1), 1.0
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor, *_others: Any) -> Any:
        return self.body(self, x)


def around(body: Callable[[Body, Tensor], Any]) -> tuple[nn.Module, nn.Module, Tensor]:
    return make(lambda: (Around(Body(body)), torch.randn(ROWS, 64)))


def smallest(module: nn.Module, x: Tensor) -> dpx.MemoryPlan:
    """Everything goes that can."""
    plan = dpx.search_plan(module, x)
    can = [value.name for value in profile_module(module, x).values if value.name and not value.refused]
    return plan.with_actions({name: "recompute" for name in can if name in {d.name for d in plan.decisions}})


def reasons(module: nn.Module, x: Tensor) -> set[str]:
    """Why the values are kept that the module in the middle saves or returns."""
    values = profile_module(module, x).values
    return {value.refused for value in values if value.name.partition(":")[0] in ("middle", "last")} - {""}


def allocated_peak(module: nn.Module, x: Tensor) -> int:
    """By the allocator's account, which knows of the generators' states that calls keep."""
    run = run_to_loss(module, Inputs((x,), {}))
    module.zero_grad(set_to_none=True)
    return peak_of_passing(lambda: run().backward())


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_give_their_memory_back(layer: type[nn.RNNBase]) -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layer(32, 32, 2, dropout=0.3, batch_first=True) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for each in self.layers:
                x = each(x.relu())[0]
            return x

    module, plain, x = make(lambda: (Sequence(), torch.randn(64, 16, 32)))
    plan = dpx.search_plan(module, x, budget=0.75)
    if layer is nn.LSTM:  # the others are made of operators that the graph can repeat
        made_again = plan.calls | plan.replayed
        assert made_again
        assert made_again <= {f"layers.{number}" for number in range(4)}
        costs = {d.name: d.seconds for d in plan.decisions if made_again & {d.name, *d.calls} and d.action != "keep"}
        assert costs
        assert all(seconds > 0 for seconds in costs.values()), f"the table tells what it costs: {costs}"
    dpx.apply_plan(module, plan)
    assert measured_peak(module, x) <= plan.budget + 64  # single numbers
    assert all(map(torch.equal, train(module, x), train(plain, x)))


def test_the_prediction_holds_for_every_choice_of_calls() -> None:
    module, _, x = make(AWKWARD["calls in calls"])
    profile, plan = profile_module(module, x), dpx.search_plan(module, x)
    names = [decision.name for decision in plan.decisions if decision.calls]
    calls = {call for decision in plan.decisions for call in decision.calls}
    assert calls >= {"inner.swinging", "inner.swinging#2", "inner.other"}
    keep_all = plan.with_actions(dict.fromkeys(plan.dropped, "keep"))
    generator = random.Random(0)
    for _ in range(40):
        drawn = keep_all.with_actions({name: generator.choice(("keep", "recompute")) for name in names})
        dpx.apply_plan(module, drawn)
        measured, predicted = allocated_peak(module, x), forecast_plan(profile, drawn).peak
        dpx.remove_plan(module)
        assert 0.999 * predicted <= measured <= predicted + 64, sorted(drawn.dropped)


def test_a_mask_that_calls_read_takes_no_memory_beside_itself() -> None:
    """Transformers keep a mask of 32 to 64 KiB in each layer."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Body(lambda self, x: Swing.apply(x + self.mask.mean(), 2.0)) for _ in range(8))
            for layer in self.layers:
                layer.register_buffer("mask", torch.ones(128, 128))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    module, _, x = make(lambda: (Around(Masked()), torch.randn(ROWS, 64)))
    profile, plan = profile_module(module, x), smallest(module, x)
    assert len(plan.calls) == 8
    dpx.apply_plan(module, plan)
    small = sum(layer.mean.nbytes for layer in module.middle.layers)  # those are copied
    assert allocated_peak(module, x) <= forecast_plan(profile, plan).peak + small + 64


def test_every_value_that_a_profile_makes_again_can_be_made_again_alone() -> None:
    """What one call was given is kept for that call only: others cannot count on it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drop, self.last = nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.drop(Swing.apply(self.first(x), 2.0)))
            return out

    module, _, x = make(lambda: (Net(), torch.randn(ROWS, 64)))
    plan = smallest(module, x)
    assert plan.dropped
    nothing = dict.fromkeys(plan.dropped, "keep")
    for name in plan.dropped:
        applied = dpx.apply_plan(module, plan.with_actions(nothing | {name: "recompute"}))
        module(x).sum().backward()
        assert not applied.not_found
        dpx.remove_plan(module)


def test_random_numbers_and_statistics_go_on_as_without_a_plan() -> None:
    module, plain, x = make(lambda: (Around(Swinging()), torch.randn(ROWS, 64)))
    module.middle.forward = lambda given, call=module.middle.forward: call([given])  # type: ignore[method-assign]
    plain.middle.forward = lambda given, call=plain.middle.forward: call([given])  # type: ignore[method-assign]
    plan = smallest(module, x)
    assert "middle" in plan.calls
    dpx.apply_plan(module, plan)
    after = []
    for each in (module, plain):
        torch.manual_seed(1)
        each(x).sum().backward()
        after.append([torch.rand(3), *each.buffers(), *(p.grad for p in each.parameters())])
    assert all(map(torch.equal, *after))


def test_what_is_called_again_is_called_in_its_own_precision() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Around(Body(lambda _, x: Swing.apply(F.linear(x, torch.eye(64)), 2.0)))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out: Tensor = self.inner(x)
            return out.float()

    module, plain, x = make(lambda: (Casts(), torch.randn(ROWS, 128)[:, :64].contiguous()))
    dpx.apply_plan(module, plan := smallest(module, x))
    assert "inner.middle" in plan.calls
    assert all(map(torch.equal, train(module, x), train(plain, x)))


def test_a_call_holds_nothing_beyond_its_graph(no_collection: None) -> None:
    module, _, x = make(AWKWARD["calls in calls"])
    dpx.apply_plan(module, smallest(module, x))
    before = {id(each) for each in gc.get_objects() if type(each) is Tensor}
    out = module(x)  # a graph that never runs backward
    del out
    module(x).sum().backward()
    module.zero_grad()
    left = [each for each in gc.get_objects() if type(each) is Tensor and id(each) not in before]
    assert not left


def test_a_second_backward_through_the_same_calls() -> None:
    module, plain, x = make(AWKWARD["calls in calls"])
    dpx.apply_plan(module, smallest(module, x))
    for each in (module, plain):
        torch.manual_seed(1)
        loss = each(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


def _counts(self: Body, x: Tensor) -> Tensor:
    self.count += 1
    return Swing.apply(x, 2.0)


def _appends(self: Body, x: Tensor) -> Tensor:
    self.seen.append(len(x))
    return Swing.apply(x, 2.0)


_ENTROPY = random.SystemRandom()


def _draws_elsewhere(_: Body, x: Tensor) -> Tensor:
    return Swing.apply(x * _ENTROPY.random(), 2.0)


def _counts_in_a_dict(self: Body, x: Tensor) -> Tensor:
    self.log["rows"].append(len(x))
    return Swing.apply(x, 2.0)


def _averages(self: Body, x: Tensor) -> Tensor:
    self.average.mul_(0.9).add_(x.detach().mean())
    return Swing.apply(x, 2.0)


def _is_given_by_attribute(self: Body, x: Tensor) -> Tensor:
    return Swing.apply(x * self.condition, 2.0)


def _depends_on_what_it_changes(self: Body, x: Tensor) -> Tensor:
    self.mean += x.detach().mean(0)
    return Swing.apply(x + self.mean, 2.0)


def _writes_into_its_argument(_: Body, x: Tensor) -> Tensor:
    return Swing.apply(x.mul_(2), 2.0)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (_counts, "it changes Body.count"),
        (_appends, "it changes Body.seen"),
        (_draws_elsewhere, "global _ENTROPY draws random numbers that cannot be drawn again"),
        (_depends_on_what_it_changes, "it changes Body.mean"),
        (_counts_in_a_dict, "it changes Body.log"),
        (_averages, "it changes Body.average"),
        (_writes_into_its_argument, "in place|in-place"),
    ],
)
def test_what_could_be_told_from_the_first_call_is_kept(body: Callable[..., Any], why: str) -> None:
    module, plain, x = around(body)
    found = reasons(module, x)
    assert any(re.search(why, reason) for reason in found), found
    plan = dpx.search_plan(module, x)
    assert not plan.calls
    dpx.apply_plan(module, plan)
    if body is not _draws_elsewhere:
        assert all(map(torch.equal, train(module, x), train(plain, x)))


class Slotted:
    """Keeps a count where no ``__dict__`` is."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return 1.0 + self.count / 8


class Called:
    """A callable object with a count; one of its class, too."""

    calls = 0

    def __init__(self) -> None:
        self.rows = list[int]()

    def __call__(self) -> float:
        self.rows.append(1)
        type(self).calls += 1
        return 1.0 + len(self.rows) / 8 + self.calls


def _closure() -> Callable[[], float]:
    count = 0

    def call() -> float:
        nonlocal count
        count += 1
        return 1.0 + count / 8

    return call


def _adds_to_array(self: Body) -> float:
    self.state += 1
    return float(self.state.sum())


_SEEN = list[int]()


def _adds_to_a_global(_: Body) -> float:
    _SEEN.append(1)
    return float(len(_SEEN))


_counter = _closure()


def _count_anew() -> None:
    global _counter
    _counter = _closure()


def _appends_to_its_default(_: Body, seen: list[int] = []) -> float:  # noqa: B006  as users have them
    seen.append(1)
    return float(len(seen))


def _empty_default() -> None:
    for seen in _appends_to_its_default.__defaults__ or ():
        seen.clear()


def _draws_from(self: Body) -> float:
    own = self.state
    return float(torch.rand((), generator=own) if isinstance(own, torch.Generator) else own.random())


_CALLS: Callable[[Body], float] = lambda self: self.state()  # noqa: E731
STATES: dict[str, tuple[Callable[[], Any], Callable[[Body], float], str]] = {
    "slots": (Slotted, _CALLS, "it changes Body.state"),
    "callable object": (Called, _CALLS, r"it changes (Body.state|Called)"),
    "partial": (lambda: partial(Called()), _CALLS, r"it changes (Body.state|Called)"),
    "method": (lambda: Called().__call__, _CALLS, r"it changes (Body.state|Called)"),
    "closure": (_closure, _CALLS, "it changes Body.state"),
    "array": (lambda: np.zeros(3), _adds_to_array, "it changes Body.state"),
    "array that is read": (lambda: np.arange(6.0).reshape(2, 3), lambda m: float(m.state.sum()), ""),
    "objects that are read": (lambda: {"a": [Slotted(), {1, 2}], "b": len}, lambda m: 2.0 + len(m.state["a"][1]), ""),
    "array of objects": (
        lambda: [np.array([1, None, 2.0])],
        lambda m: _write_first(m.state[0]),
        "it changes Body.state",
    ),
    "deque": (lambda: deque([1.0, 2.0, 3.0]), lambda m: m.state.rotate() or m.state[0], "it changes Body.state"),
    "method of a list": (lambda: [1.0, 2.0, 3.0, 4.0, 5.0] * 9, lambda m: m.state.pop(), "it changes Body.state"),
    "bytes": (lambda: bytearray(8), lambda m: _write_first(m.state), "it changes Body.state"),
    "iterator": (lambda: iter(range(1, 99)), lambda m: float(next(m.state)), "state is a range_iterator, whose state"),
    "counter": (lambda: itertools.count(1), lambda m: float(next(m.state)), "state is a count, whose state cannot"),
    "generator": (lambda: (float(i) for i in range(1, 99)), lambda m: next(m.state), "state is a generator, whose"),
    "iterator in a list": (lambda: [zip(range(99))], lambda m: next(m.state[0])[0] + 1.0, "state is a zip, whose"),
    "file": (lambda: io.StringIO("123456789" * 9), lambda m: float(m.state.read(1)), "state is a StringIO, whose"),
    "global": (lambda: None, _adds_to_a_global, r"it changes the global _SEEN"),
    "closure of a global": (_count_anew, lambda m: _counter(), r"it changes the global _counter"),
    "default": (_empty_default, lambda m: _appends_to_its_default(m), "it changes the global _appends_to_its_default"),
    "file that is imported": (helpers.forget, lambda m: helpers.note(), r"it changes the global SEEN"),
    "module outside": (lambda: [Body()], lambda m: 2.0, "state is a module outside of it"),
    "torch.Generator": (lambda: torch.Generator().manual_seed(1), _draws_from, ""),
    "NumPy's": (lambda: np.random.default_rng(1), _draws_from, ""),
    "NumPy's old one, in a list": (lambda: np.random.RandomState(1), _draws_from, ""),
    "Python's": (lambda: random.Random(1), _draws_from, ""),
}


def _write_first(into: Any) -> float:
    into[0] = into[0] + 1
    return 1.0 + into[0] / 8


@pytest.mark.parametrize("name", STATES)
def test_state_of_its_own_is_written_once_and_drawn_as_in_the_first_call(name: str) -> None:
    make_state, use, why = STATES[name]
    torch.manual_seed(3)
    x, results = torch.randn(ROWS, 64), []
    for planned in (False, True):
        _SEEN.clear()
        Called.calls = 0
        torch.manual_seed(4)
        module = Around(Body(lambda self, x: Swing.apply(x, use(self))))
        module.middle.state = make_state()
        if planned:
            found = reasons(module, x)
            again = [reason for reason in found if "called again" in reason]
            assert any(re.search(why, reason) for reason in again) if why else not again
            plan = smallest(module, x)
            assert bool(plan.calls) is not bool(why)
            module.middle.state = make_state()
            _SEEN.clear()
            Called.calls = 0
            dpx.apply_plan(module, plan)
        results.append([*train(module, x), torch.tensor(use(module.middle))])
    assert all(map(torch.equal, *results))


def test_what_others_write_to_what_a_call_reads_is_put_back_for_the_second_call() -> None:
    """A list, a small buffer, and the statistics of a norm, which have no version that tells."""

    def body(self: Body, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.mean, self.variance, training=False)
        return Swing.apply(x, sum(self.seen))

    module, plain, x = make(lambda: (Around(Body(body)), torch.randn(ROWS, 64)))
    results = []
    for each in (module, plain):
        each.middle.register_buffer("variance", torch.ones(64))
        each.middle.seen[:] = [1, 2]
        if each is module:
            dpx.apply_plan(module, plan := smallest(module, x))
            assert plan.calls
        loss = each(x).sum()
        each.middle.seen.append(3)
        F.batch_norm(x, each.middle.mean, each.middle.variance, training=True, momentum=0.9)
        loss.backward()
        results.append([p.grad for p in each.parameters()])
        assert each.middle.seen == [1, 2, 3]
    assert all(map(torch.equal, *results))


def test_a_call_that_writes_to_a_parameter_is_not_made_again() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(32, 64, max_norm=0.5)

        def forward(self, x: Tensor) -> Tensor:
            return Swing.apply(x + self.table(torch.arange(len(x)) % 32), 2.0)

    module, plain, x = make(lambda: (Around(Words()), torch.randn(ROWS, 64)))
    assert any("it changes a parameter of Words" in reason for reason in reasons(module, x))
    module.load_state_dict(plain.state_dict())
    dpx.apply_plan(module, plan := dpx.search_plan(module, x))
    assert not plan.calls
    module.load_state_dict(plain.state_dict())
    assert all(map(torch.equal, train(module, x), train(plain, x)))


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_who_else_takes_part_is_not_disturbed() -> None:
    def hooked() -> nn.Module:
        module = Around(Body())
        module.middle.register_forward_hook(lambda _module, _inputs, output: output * 2)
        return module

    def synchronized() -> nn.Module:
        module = Around(Body())
        module.middle.norm = nn.SyncBatchNorm(64)
        return module

    class Passing(Around):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.middle(self.first(x), object())
            return out

    x = torch.randn(ROWS, 64)
    assert reasons(hooked(), x) == {"'middle' cannot be called again: a Body in it has forward hooks"}
    assert reasons(synchronized(), x) == {
        "'middle' cannot be called again: a SyncBatchNorm in it meets the other replicas"
    }
    assert reasons(Passing(Body()), x) == {"'middle' cannot be called again: it takes a object, which may change"}
    handle = nn.modules.module.register_module_forward_hook(lambda _module, _inputs, _output: None)
    assert "'middle' cannot be called again: there are hooks on all modules" in reasons(Around(Body()), x)
    handle.remove()
    with _Mode():
        assert "'middle' cannot be called again: it runs under a _Mode" in reasons(Around(Body()), x)


_HIDDEN: Any = ModuleType("torch.hidden")  # what installed files keep is not watched


@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        (lambda module: nn.init.zeros_(module.middle.scale), "A parameter of 'middle' was changed in place"),
        (lambda module: module.middle.average.add_(1), "Body.average of 'middle' was changed between forward and"),
        (lambda module: module.middle.table.__setitem__(0, 1), "Body.table of 'middle' was changed between forward"),
        (lambda module: module.middle.large.add_(1), "Buffer 'large' of a Body in 'middle' was changed between"),
        (lambda _: setattr(_HIDDEN, "skip", True), "'middle' did not give its saved tensor"),
        (
            lambda _: setattr(_HIDDEN, "first", 1),
            r"'middle' gave its saved tensor 1 of \[63, 64\] in torch.float32 when it was called again, instead of",
        ),
    ],
)
def test_a_module_that_was_meddled_with_is_noticed(meddle: Callable[[Any], Any], message: str) -> None:
    _HIDDEN.skip, _HIDDEN.first = False, 0
    module, _, x = around(lambda _, x: x if _HIDDEN.skip else Swing.apply(x[_HIDDEN.first :], 2.0))
    module.middle.scale, module.middle.table = nn.Parameter(torch.ones(1)), np.zeros(4)
    module.middle.register_buffer("large", torch.zeros(128, 256))
    dpx.apply_plan(module, smallest(module, x))
    loss = module(x).sum()
    meddle(module)
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


class _Scaling(nn.Module):
    """Scales by a parameter, and in training by a half."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((64,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = Swing.apply(x * self.scale, 0.5 if self.training else 2.0)
        return scaled


@pytest.mark.parametrize(
    "meddle",
    [
        lambda module: module.middle.eval(),
        lambda module: setattr(module.middle, "scale", nn.Parameter(torch.zeros(64))),
        lambda module: setattr(module.middle, "0", nn.Identity()),
    ],
)
def test_parts_that_were_exchanged_or_switched_since_are_back_for_the_second_call(meddle: Callable[[Any], Any]) -> None:
    module, plain, x = make(lambda: (Around(nn.Sequential(_Scaling(), CustomFunction())), torch.randn(ROWS, 64)))
    module.middle.scale = plain.middle.scale = nn.Parameter(torch.ones(64))
    plan = smallest(module, x)
    assert plan.calls
    dpx.apply_plan(module, plan)
    gradients = []
    for subject in (module, plain):
        loss = subject(x).sum()
        weights = list(subject.parameters())
        meddle(subject)
        after = dict(subject.named_modules()), dict(subject.named_parameters()), subject.middle.training
        gradients.append(torch.autograd.grad(loss, weights, allow_unused=True))
        assert after == (dict(subject.named_modules()), dict(subject.named_parameters()), subject.middle.training)
    assert all(one is other or torch.equal(one, other) for one, other in zip(*gradients, strict=True))


class _Adapting(nn.Module):
    """Runs its layers with other parameters than their own, as meta-learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        adapted = {name: weight * 1.1 for name, weight in self.layers.named_parameters()}
        return functional_call(self.layers, adapted, (x,)).square().mean()


def test_parameters_that_a_step_computes_and_puts_in_a_module_count_as_long_as_they_are_there() -> None:
    module, _, x = make(lambda: (_Adapting(), torch.randn(ROWS, 64)))
    assert profile_module(module, x).peak == pytest.approx(allocated_peak(module, x), abs=64)  # single numbers


def test_calls_with_other_parameters_than_those_of_the_plan_have_their_gradients() -> None:
    module, plain, x = make(lambda: (Around(CustomFunction()), torch.randn(ROWS, 64)))
    dpx.apply_plan(module, smallest(module, x))
    gradients = []
    for subject in (module, plain):
        weights = {name: (weight.detach() * 1.1).requires_grad_() for name, weight in subject.named_parameters()}
        loss = functional_call(subject, weights, (x,)).sum()
        gradients.append(torch.autograd.grad(loss, list(weights.values())))
    assert all(map(torch.equal, *gradients))


def test_a_plan_with_calls_can_be_saved_and_edited(tmp_path: Any) -> None:
    module, _, x = make(AWKWARD["calls in calls"])
    plan = smallest(module, x)
    plan.save(path := tmp_path / "plan.yaml")
    assert dpx.MemoryPlan.load(path).decisions == plan.decisions
    text = path.read_text()
    path.write_text(text.replace("calls: [inner.other]", "calls: [inner.nobody]", 1))
    with pytest.raises(dpx.PlanError, match=r"no module 'inner\.nobody'"):
        dpx.apply_plan(module, dpx.MemoryPlan.load(path))
    path.write_text(text.replace("calls: [inner.other]", "calls: inner.other", 1))
    with pytest.raises(dpx.PlanError, match=r"calls='inner\.other' is not allowed; give a list"):
        dpx.MemoryPlan.load(path)


class HeardCalls:
    """The calls that are noted, so that they can be made again."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def begins(self, call: Call) -> None:
        self.calls.append(call)

    def ends(self, call: Call) -> None:
        """Of no interest."""


def test_nobody_pays_for_calls_that_are_not_made_again() -> None:
    module, _, x = make(lambda: (CustomFunction(), torch.randn(ROWS, 64)))
    plan = dpx.search_plan(module, x, budget=0.9)
    applied = dpx.apply_plan(module, plan.with_actions({d.name: "keep" for d in plan.decisions if d.calls}))
    assert not applied.plan.calls
    names = applied.values.names
    names.listener = heard = HeardCalls()
    with applied.active():
        module(x)
        assert names.saved == 0
    assert heard.calls == []


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_masks_of_a_device_come_from_its_own_random_numbers() -> None:
    """A device keeps no trace of a mask but the state of its generator."""
    module, plain, x = make(lambda: (Around(nn.Dropout(0.3)), torch.randn(ROWS, 64)))
    module, plain, x = module.to("sim:1"), plain.to("sim:1"), x.to("sim:1")
    plan = smallest(module, x)
    assert plan.calls == {"middle"}
    dpx.apply_plan(module, plan)
    results = []
    for each in (module, plain):
        torch.get_device_module("sim").manual_seed_all(1)
        loss = each(x).sum()
        if each is module:
            torch.rand(7, device="sim:1")  # others draw in between
        loss.backward()
        results.append([p.grad.cpu() for p in each.parameters()])
    assert all(map(torch.equal, *results))
    assert simulated_bytes() > 0


def test_what_was_drawn_or_set_when_the_call_began_is_there_again() -> None:
    """Also for Python's own random numbers, for what the caller sets, and with two graphs at once."""

    def body(self: Body, x: Tensor) -> Tensor:
        x = F.dropout(x * self.condition, 0.1)
        return Swing.apply(x.flip(1) if random.random() < 0.5 else x + np.random.rand(), 2.0)

    module, plain, x = around(body)
    dpx.apply_plan(module, plan := smallest(module, x))
    assert plan.calls
    results = []
    for each in (module, plain):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        for _ in range(4):
            each.middle.condition = 2.0
            first = each(x).sum()
            each.middle.condition = -1.0
            (first + each(x * 2).sum()).backward()
        results.append(
            [*(p.grad for p in each.parameters()), torch.rand(2), Tensor([random.random(), np.random.rand()])]
        )
    assert all(map(torch.equal, *results))


def test_an_argument_that_is_written_to_later_is_not_taken_again() -> None:
    class Later(Around):
        def forward(self, x: Tensor) -> Tensor:
            h = Cosine.apply(self.first(x))
            y = self.middle(h)
            h.add_(1)
            out: Tensor = self.last(y) + h
            return out

    module, plain, x = make(lambda: (Later(Body(lambda _, x: Cosine.apply(x * 1 + 0))), torch.randn(ROWS, 64)))
    dpx.apply_plan(module, plan := smallest(module, x))
    assert not plan.calls
    assert all(map(torch.equal, train(module, x), train(plain, x)))


class Cosine(torch.autograd.Function):
    """Saves its cosine, and not its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.cos(x))
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


def test_a_call_that_fails_the_second_time_is_not_made_again() -> None:
    class Resets(Around):
        def forward(self, x: Tensor) -> Tensor:
            self.middle.condition = 2.0
            out: Tensor = super().forward(x)
            self.middle.condition = None
            return out

    def raises(_: Body, x: Tensor) -> Tensor:
        if repeating():
            raise KeyError("not a second time")
        return Swing.apply(x, 2.0)

    module, plain, x = make(lambda: (Resets(Body(_is_given_by_attribute)), torch.randn(ROWS, 64)))
    dpx.apply_plan(module, plan := smallest(module, x))
    assert plan.calls == {"middle"}
    assert all(map(torch.equal, train(module, x), train(plain, x)))
    assert any("not a second time" in reason for reason in reasons(Around(Body(raises)), x))
