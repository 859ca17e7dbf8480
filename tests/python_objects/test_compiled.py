"""What is compiled is found, runs uncompiled where it must, and has the names of other state dicts."""

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dpx.python_objects.compiled import (
    compiled_names,
    functions_compiled_in,
    is_compiled,
    state_named_as_in,
    uncompiled,
    untraced,
)
from tests.conftest import runs_eagerly

pytestmark = pytest.mark.usefixtures("compiled_anew")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Counting:
    """A backend that counts the graphs that it is given, and compiles nothing."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


def test_modules_methods_and_calls_that_are_compiled_have_names() -> None:
    backend = Counting()
    model = nn.Sequential(torch.compile(Layer(), backend=backend), Layer(), Layer(), Layer())
    model[1].compile(backend=backend)
    model[2].forward = torch.compile(model[2].forward, backend=backend)
    assert compiled_names(model) == ["0", "1", "2.forward"]
    assert compiled_names(Layer()) == []
    model.compile(backend=backend)
    assert compiled_names(model)[0] == "the module itself"


@torch.compile(backend="eager")
def activation(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * x


@torch.compiler.disable
def plain(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * x


class CallsWhatIsLeftAlone(Layer):
    shift = staticmethod(torch.compiler.disable(torch.neg))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift(plain(self.linear(x)))


def test_a_method_of_a_library_is_compiled_until_it_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(4, 4)
    assert compiled_names(module) == []
    with monkeypatch.context() as patched:
        patched.setattr(nn.Linear, "forward", torch.compile(nn.Linear.forward, backend="eager"))
        assert compiled_names(module) == ["forward"]
    assert compiled_names(module) == []


@pytest.mark.parametrize("stands_for_it", [None, object()])
def test_a_class_of_a_library_whose_file_is_kept_out_is_looked_through(
    stands_for_it: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.kept_out", stands_for_it)
    kind = type("Kept", (nn.Module,), {"__module__": "torchvision.kept_out", "call": activation})
    assert compiled_names(kind()) == ["call"]


def test_what_the_compiler_is_told_to_leave_alone_is_not_compiled() -> None:
    assert compiled_names(CallsWhatIsLeftAlone()) == []
    assert not is_compiled(CallsWhatIsLeftAlone())


class CallsByName(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return activation(self.linear(x))


class Decorated(Layer):
    @torch.compile(backend="eager")
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


def test_functions_that_are_compiled_where_they_are_defined_have_names() -> None:
    model = nn.Sequential(Layer(), CallsByName(), CallsByName(), Decorated())
    assert compiled_names(model) == ["activation", "compute"]
    assert [is_compiled(part) for part in model] == [False, True, True, True]


class Settings:
    """Raises another error than AttributeError for what it does not have, and has no dict."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"scale": 2.0}

    def __getattr__(self, name: str) -> Any:
        return self.values[name]


SETTINGS = Settings()


class NamesSettings(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * SETTINGS.scale


class HasSettings(Layer):
    settings = Settings()


def test_an_object_that_raises_whatever_it_is_asked_is_not_compiled() -> None:
    assert compiled_names(nn.Sequential(NamesSettings(), HasSettings())) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
def test_code_that_is_compiled_leaves_alone_what_is_not_to_be_traced() -> None:
    outer, inner = Counting(), Counting()
    layer = torch.compile(Layer(), backend=inner)
    x = torch.ones(2, 4)
    hidden = untraced(lambda: layer(x).sum() + 1)

    def step() -> torch.Tensor:
        before = x * 2  # a graph of its own, as what follows breaks it
        return before.sum() + hidden()

    found = torch.compile(step, backend=outer)()
    assert_close(found, step())
    assert outer.num_graphs == 2, "what comes before it, and what comes after it"
    assert inner.num_graphs == 1, "what is compiled within it stays so"


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_runs_that_overlap_leave_nothing_behind() -> None:
    first, second = uncompiled(), uncompiled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert runs_eagerly(), "the second one has not ended"
    second.__exit__(None, None, None)
    assert not runs_eagerly()


def test_code_that_met_a_dispatch_mode_uncompiled_is_compiled_later() -> None:
    backend = Counting()
    layer = torch.compile(Layer(), backend=backend)
    rows = torch.ones(2, 4)
    with uncompiled(), Watching():
        layer(rows)
    assert backend.num_graphs == 0
    layer(rows)
    assert (backend.num_graphs, backend.calls) == (1, 1)
    with uncompiled():
        layer(rows)
    assert backend.calls == 1


def test_a_state_dict_gets_the_names_of_the_module_that_loads_it() -> None:
    plain = nn.Sequential(Layer(), nn.BatchNorm1d(4))
    wrapped = nn.Sequential(torch.compile(Layer(), backend="eager"), torch.compile(nn.BatchNorm1d(4), backend="eager"))
    there = state_named_as_in(wrapped, plain.state_dict())
    assert list(there) == list(wrapped.state_dict())
    assert there._metadata["1._orig_mod"] == plain.state_dict()._metadata["1"] != {}
    assert str(wrapped.load_state_dict(there)) == "<All keys matched successfully>"
    back = state_named_as_in(plain, wrapped.state_dict())
    assert list(back) == list(plain.state_dict())
    assert torch.equal(back["0.linear.weight"], plain[0].linear.weight)


def test_a_state_dict_of_another_module_is_left_alone() -> None:
    state = Layer().state_dict()
    assert state_named_as_in(Layer(), state) is state
    assert state_named_as_in(nn.BatchNorm1d(4), state) is state


def test_classes_are_looked_at_once_for_all_of_their_modules() -> None:
    known: dict[type, list[Any]] = {}
    parts = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh()]
    for part in parts:
        assert functions_compiled_in(part, known) == []
    assert known == {nn.Linear: [], nn.Tanh: []}
    # What is known of a class is not looked for, and methods of each module are.
    known[nn.Tanh] = [torch.compile(torch.tanh, backend="eager")]
    assert functions_compiled_in(parts[2], known) == known[nn.Tanh]
    parts[1].forward = known[nn.Tanh][0]
    assert [is_compiled(part, known) for part in parts] == [False, True, True]
