"""Registries by ``id()`` and by the very object are found, where code may use them."""

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lightning_dpx.python_objects.identity_registries import identity_registries


class Layer(nn.Linear):
    scales: ClassVar[weakref.WeakKeyDictionary[nn.Module, float]] = weakref.WeakKeyDictionary()


class Net(nn.Module):
    """Looks up in its forward what ``held`` says, by id."""

    held: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows) * (id(self.layer) in self.held)


class NamesNoIds(nn.Module):
    """Has made a registry by id, and looks nothing up there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(2, 2)
        self.held = {id(self.layer): 1.0}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


class Decays:
    def __init__(self, ids: Any) -> None:
        self.by_id = ids


def registries(module: Net | NamesNoIds) -> list[str]:
    return identity_registries(module, [("held", module.held)])


HELD: list[tuple[Callable[[Net], Any], list[str]]] = [
    (lambda net: {id(net.layer): 1.0}, ["self.held"]),
    (lambda net: {id(net.layer.weight)}, ["self.held"]),
    (lambda net: [0, id(net.layer.bias)], ["self.held"]),
    (lambda net: {net.layer.weight.data_ptr(): 1.0}, ["self.held"]),
    (lambda net: {(id(net.layer), "rate"): 1.0}, ["self.held"]),
    (lambda net: {str(id(net.layer)): 1.0}, ["self.held"]),
    (lambda net: {f"layer{id(net.layer)}_rate": 1.0}, ["self.held"]),
    (lambda net: {hex(id(net.layer)): 1.0}, ["self.held"]),
    (lambda net: {f"{id(nn.Linear(1, 1))}_rate": 1.0}, []),
    (lambda net: Decays({id(net): 1.0}), ["self.held.by_id"]),
    (lambda net: {"all": [{id(net.layer): 1.0}]}, ["self.held"]),
    (lambda net: {id(nn.Linear(1, 1)): 1.0, 3: 2.0}, []),
    (lambda net: {net.layer: 1.0}, []),  # each copy has its own
]


@pytest.mark.parametrize(("hold", "paths"), HELD)
def test_ids_of_parts_are_found(hold: Callable[[Net], Any], paths: list[str]) -> None:
    net = Net()
    net.held = hold(net)
    assert registries(net) == paths


def test_ids_that_no_code_looks_up_do_not_count() -> None:
    assert registries(NamesNoIds()) == []


class DecaysSome(NamesNoIds):
    """Groups its parameters by id, for its optimizer alone."""

    def configure_optimizers(self) -> list[Any]:
        return self.groups()

    def groups(self) -> list[Any]:
        return [one for one in self.parameters() if id(one) in self.held]


class DecaysInSteps(DecaysSome):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * len(self.groups())


def test_what_only_configures_optimizers_is_no_code_of_steps() -> None:
    assert registries(DecaysSome()) == []
    assert registries(DecaysInSteps()) == ["self.held"]


def test_a_hook_may_look_up() -> None:
    net = NamesNoIds()
    net.held.clear()
    names = {id(child): name for name, child in net.named_modules()}
    net.layer.register_forward_hook(lambda layer, _, output: output * len(names[id(layer)]))
    assert registries(net) == ["a hook of layer.names"]


class AnswersByItsItems:
    """A configuration that looks every name up, and fails with what a dict says."""

    def __init__(self) -> None:
        vars(self)["items"] = {"rate": 0.1}

    def __getattr__(self, name: str) -> Any:
        return vars(self)["items"][name]


def test_no_object_is_asked_for_a_name_that_it_may_not_have() -> None:
    net = Net()
    net.held = [AnswersByItsItems(), {id(net.layer): 1.0}]
    assert registries(net) == ["self.held"]


def test_keys_of_what_all_copies_share_are_found() -> None:
    net = NamesNoIds()
    assert registries(net) == []
    Layer.scales[net.layer] = 2.0
    assert registries(net) == ["Layer.scales"]
    assert registries(NamesNoIds()) == [], "those of another one"


PAIRS: dict[tuple[nn.Module, str], float] = {}


class NamesPairs(NamesNoIds):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows) * PAIRS.get((self.layer, "rate"), 1.0)


def test_keys_may_be_pairs_of_a_part_and_a_name() -> None:
    net = NamesPairs()
    PAIRS.clear()
    assert registries(net) == []
    PAIRS[net.layer, "rate"] = 2.0
    assert registries(net) == ["PAIRS"]
    PAIRS.clear()


class Registry:
    """Of the user's, in a global; the module does not hold it."""

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}

    def rate(self, part: nn.Module) -> float:
        return self.rates.get(f"{id(part)}_rate", 1.0)


REGISTRY = Registry()


class AsksTheRegistry(NamesNoIds):
    held = None  # type: ignore[assignment]

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layer = Layer(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows) * REGISTRY.rate(self.layer)


def test_objects_in_globals_may_look_up() -> None:
    module = AsksTheRegistry()
    assert registries(module) == []
    REGISTRY.rates[f"{id(module.layer)}_rate"] = 2.0
    assert registries(module) == ["REGISTRY.rates"]
    REGISTRY.rates.clear()


class OfBits(nn.Module):
    """Kept by texts of very many digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.known = {"1" * 5000: 1.0}

    def training_step(self, batch: Any) -> Any:
        return self.layer(batch) * self.known.get(str(id(batch)), 1.0)


def test_a_text_of_thousands_of_digits_is_no_id() -> None:
    module = OfBits()
    assert identity_registries(module, vars(module).items()) == []
