"""Copies of submodules that are there before their state is."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.replicas.replicate import make_shadow_module, replicate

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
def test_replicas_share_what_was_compiled_and_have_its_hooks() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.compile(Layer(), backend=backend)
            self.second = Layer()
            self.second.compile(backend=backend)
            self.double = torch.compile(self.doubled, backend=backend)

        def doubled(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.second.linear(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.double(self.second(self.first(x)))

    torch.compiler.reset()
    model, x = Model(), torch.ones(2, 4)
    called: list[int] = []
    model.first.register_forward_hook(lambda module, args, output: called.append(id(module)))
    expected = model(x)
    assert len(graphs) == 3
    replicas = replicate(model, [CPU, CPU, CPU])
    assert list(replicas[1].module.state_dict()) == list(model.state_dict())
    for replica in replicas[1:]:
        output = replica.module(x)
        assert torch.equal(output, expected)
        output.sum().backward()
        assert replica.module.second.linear.weight.grad is not None
        assert called[-1] == id(replica.module.first)
    assert model.second.linear.weight.grad is None
    make_shadow_module(replicas[0])(x)
    assert len(graphs) == 3, "replicas and shadows run the code of the first"
    torch.compiler.reset()


class OfAnother(nn.Module):
    """Follows another module, without which there is none of it: ``copy.deepcopy`` fails on it."""

    def __new__(cls, of: nn.Module) -> "OfAnother":
        assert isinstance(of, nn.Module)
        return super().__new__(cls)

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = [of]
        self.average = nn.Linear(2, 2)


def test_a_module_whose_class_wants_arguments_for_an_empty_one_is_copied_by_its_state() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.append(OfAnother(module[0]))
    _, twin = replicate(module, [CPU, CPU])
    assert type(twin.module[1]) is OfAnother
    assert twin.module[1].of[0] is twin.module[0]
    assert twin.module[1].average.weight.data_ptr() == module[1].average.weight.data_ptr()


class GoesThroughItsParts(nn.Module):
    """Its own way of taking a state looks at the modules that it is made of, as guides of probabilistic models do."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(2, 2)
        self.parts = nn.Sequential(nn.Sequential(self.shared), nn.ReLU())

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.names = [name for name, _ in self.named_modules()]


def test_a_module_takes_its_state_after_its_parts() -> None:
    module = nn.Sequential(GoesThroughItsParts(), nn.Linear(2, 2))
    module.append(module[0].shared)
    _, twin = replicate(module, [CPU, CPU])
    assert twin.module[0].names == ["", "shared", "parts", "parts.0", "parts.1"]
    assert twin.module[2] is twin.module[0].parts[0][0]


class ForgetsWhenCopied(nn.Module):
    """What cannot be pickled is dropped by ``__getstate__``: from the module itself, as guides of models have it."""

    def __init__(self, *, from_a_copy: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.known = ("what it was made of",)
        self.from_a_copy = from_a_copy

    def __getstate__(self) -> dict[str, Any]:
        self.known = None
        return dict(vars(self)) if self.from_a_copy else vars(self)


@pytest.mark.parametrize("from_a_copy", [True, False])
def test_a_module_that_forgets_something_as_it_is_copied_has_it_afterwards(from_a_copy: bool) -> None:
    module = ForgetsWhenCopied(from_a_copy=from_a_copy)
    known = module.known
    _, twin = replicate(module, [CPU, CPU])
    make_shadow_module(twin)
    assert module.known is known
    assert twin.module.known is None, "a copy is what the class makes of it"
