import functools
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lightning_dpx as dpx
from lightning_dpx.replicas.parameter_hooks import is_ours
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.replicate import like_parameter, make_shadow_module, replicate

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.rnn = nn.LSTM(4, 4)
        self.register_buffer("steps", torch.zeros(1))
        self.data = TensorDataset(torch.ones(3))


def test_structure_is_kept_and_parameters_on_one_device_share_storage() -> None:
    module = Tied()
    _, twin = replicate(module, [CPU, CPU])
    assert twin.module.head.weight is twin.module.embed.weight
    assert twin.module.extra[0].data_ptr() == module.extra[0].data_ptr()
    assert twin.module.extra[0] is not module.extra[0]
    assert twin.module.rnn._flat_weights[0] is twin.module.rnn.weight_ih_l0
    assert twin.module.data is module.data
    twin.module.steps.add_(1)
    assert module.steps.item() == 0, "buffers are each replica's own"


def test_what_holds_no_tensor_is_the_same_object_on_every_replica() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    held = {
        "lock": threading.Lock(),
        "file": open(__file__),  # noqa: SIM115
        "words": {"a": 0},
        "iterator": iter(range(3)),
        "generator": torch.Generator(),
        "function": lambda: 0,
    }
    vars(module[0]).update(held)
    _, twin = replicate(module, [CPU, CPU])
    held["file"].close()
    for name, value in held.items():
        assert getattr(twin.module[0], name) is value, name


def test_what_leads_to_tensors_or_submodules_is_each_replicas_own() -> None:
    module = Tied()
    module.parts = [module.embed, {"head": module.head}]
    module.method = functools.partial(module.embed.forward)
    module.loss = module.head(torch.ones(1, 4)).sum()
    module.seen = [torch.ones(2)]
    _, twin = replicate(module, [CPU, CPU])
    assert twin.module.parts[0] is twin.module.embed
    assert twin.module.parts[1]["head"] is twin.module.head
    assert twin.module.method.func.__self__ is twin.module.embed
    assert twin.module.loss.grad_fn is None, "a history belongs to the one who computed it"
    assert twin.module.seen is not module.seen
    assert torch.stack(twin.module.seen).tolist() == [[1, 1]]


def test_functions_and_weak_references_lead_to_the_replicas_own_module() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    calls: list[nn.Module] = []

    def note(*_: object) -> None:
        calls.append(module)

    module[0].register_forward_hook(note)
    module[0].above = weakref.ref(module)
    module[0].cached = functools.lru_cache(lambda: module)
    _, twin = replicate(module, [CPU, CPU])
    twin.module(torch.ones(1, 1))
    assert twin.module[0].above() is twin.module
    assert twin.module[0].cached() is twin.module
    [hook] = twin.module[0]._forward_hooks.values()
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
    assert cells["module"].cell_contents is twin.module
    assert calls == [twin.module], "what the closure shares with others stays shared"


class Node:
    """Refers to its parent weakly, as trees do, so that no circle keeps both alive."""

    def __init__(self, parent: "Node | None" = None) -> None:
        self.parent = None if parent is None else weakref.ref(parent)
        self.children: list[Node] = []
        self.count = 0

    def add(self) -> None:
        self.count += 1


class Table(dict[str, int]):
    """A container that can be referred to weakly."""


OUTSIDE = Node()


def linked(tensor: torch.Tensor | None) -> Any:
    """A module with objects that are reached by weak references, too; one of them holds ``tensor``."""
    module: Any = nn.Linear(1, 1)
    module.node = Node()
    module.node.tensor = tensor
    module.node.children.append(Node(module.node))
    module.reference = weakref.ref(module.node)
    module.method = weakref.WeakMethod(module.node.add)
    module.by_name = weakref.WeakValueDictionary(node=module.node)
    module.by_node = weakref.WeakKeyDictionary({module.node: 1})
    module.nodes = weakref.WeakSet([module.node])
    module.proxy = weakref.proxy(module.node)
    module.table = Table()
    module.reference_of_table = weakref.ref(module.table)
    module.outside = weakref.ref(OUTSIDE)
    module.gone = weakref.ref(Node())
    return module


def check_links(module: Any) -> None:
    assert module.reference() is module.node
    assert module.method().__self__ is module.node
    assert module.by_name["node"] is module.node
    assert list(module.by_node.items()) == [(module.node, 1)]
    assert list(module.nodes) == [module.node]
    assert module.node.children[0].parent() is module.node
    assert module.reference_of_table() is module.table
    assert module.outside() is OUTSIDE, "a copy of it would be gone at once"
    assert module.gone() is None


def test_weak_references_in_a_shadow_lead_to_its_own_objects() -> None:
    module = linked(None)
    shadow: Any = make_shadow_module(Replica(0, CPU, module))
    gc.collect()
    for one in (module, shadow):
        check_links(one)
    assert shadow.node is not module.node
    shadow.reference().add()
    shadow.method()()
    shadow.node.children[0].parent().add()
    assert (module.node.count, shadow.node.count) == (0, 3), "it leaves no trace"


@pytest.mark.parametrize("tensor", [None, torch.ones(1)])
def test_weak_references_of_a_replica_lead_where_its_other_references_do(tensor: torch.Tensor | None) -> None:
    module = linked(tensor)
    _, twin = replicate(module, [CPU, CPU])
    gc.collect()
    copied: Any = twin.module
    check_links(copied)
    assert (copied.node is module.node) is (tensor is None)


class HoldsItself:
    """Refuses to be copied."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: object) -> "HoldsItself":
        raise TypeError("one of a kind")


def test_what_holds_the_module_and_cannot_be_copied_is_named() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].guard = HoldsItself(module)
    with pytest.raises(dpx.ReplicationError, match=r"'0\.guard' fails with TypeError: one of a kind"):
        replicate(module, [CPU, CPU])


def test_lazy_modules_are_refused_by_name() -> None:
    with pytest.raises(dpx.ReplicationError, match=r"Parameter 0\.weight is lazy"):
        replicate(nn.Sequential(nn.LazyLinear(3)), [CPU, CPU])


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


def test_copies_have_the_hooks_of_the_user_and_not_those_of_this_package() -> None:
    parameter = nn.Parameter(torch.ones(2))
    seen: list[torch.Tensor] = []
    parameter.register_post_accumulate_grad_hook(seen.append)
    parameter.register_post_accumulate_grad_hook(functools.partial(is_ours))
    copied = like_parameter(parameter, torch.zeros(2))
    copied.sum().backward()
    assert seen[0] is copied
    assert len(copied._post_accumulate_grad_hooks) == 1


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


class KeepsItsState(nn.Module):
    def __getstate__(self) -> Any:
        raise TypeError("no state")


def test_where_no_attribute_fails_the_error_blames_none() -> None:
    message = r"copied to cpu: Sequential fails with TypeError: no state.*copy\.deepcopy has to work"
    with pytest.raises(dpx.ReplicationError, match=message):
        replicate(nn.Sequential(KeepsItsState()), [CPU, CPU])


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


class ListsItsParametersItself(nn.Module):
    """A copy forgets under which names its parts share a parameter, and finds them under others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.known = {id(self.linear.weight)}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name if id(parameter) in self.known else f"other.{name}", parameter


def test_a_copy_with_other_parameters_is_refused() -> None:
    with pytest.raises(dpx.ReplicationError, match="its copy has other parameters"):
        replicate(ListsItsParametersItself(), [CPU, CPU])
