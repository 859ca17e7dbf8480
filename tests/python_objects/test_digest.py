"""A digest changes with all that a step depends on, and with nothing else."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_dpx.memory.plan_cache import key_of_step
from lightning_dpx.python_objects.digest import Digest
from tests import programs

FACTOR = 2.0


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


class Net(nn.Module):
    """With what a module may hold: numbers, helpers, tensors that are no parameters, and what nobody can see into."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.turns, self.table, self.helper = 2, {"a": [1, 2]}, Helper()
        self.register_buffer("mask", torch.ones(4))
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.turns):
            x = self.helper.apply(self.second(self.first(x))) * self.mask
        return scaled(x)


class Helper:
    power = 2

    def apply(self, x: Tensor) -> Tensor:
        return x**self.power


class Cubed(Helper):
    power = 3


def digest_of(module: nn.Module, batch: Any = None) -> str:
    digest = Digest()
    digest.add(module)
    digest.add_batch(batch)
    assert digest.is_whole
    return digest.text()


def _tie(net: Net) -> None:
    net.second.weight = net.first.weight


CHANGES: dict[str, Callable[[Net], Any]] = {
    "eval": lambda net: net.second.eval(),
    "frozen": lambda net: net.first.weight.requires_grad_(False),
    "gradients": lambda net: net(torch.ones(1, 4)).sum().backward(),
    "tied": _tie,
    "dtype": lambda net: net.second.double(),
    "buffer": lambda net: net.register_buffer("mask", torch.ones(1, 4)),
    "number": lambda net: setattr(net, "turns", 3),
    "nested": lambda net: net.table["a"].append(3),
    "helper": lambda net: setattr(net, "helper", Cubed()),
    "attribute of a helper": lambda net: setattr(net.helper, "power", 4),
    "hook": lambda net: net.first.register_forward_hook(lambda *_: None),
    "own forward": lambda net: setattr(net.first, "forward", lambda x: x + 1),
    "parametrized": lambda net: parametrizations.weight_norm(net.first),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_what_a_step_depends_on_changes_the_digest(change: str) -> None:
    net = Net()
    before = digest_of(net)
    assert before == digest_of(net) == digest_of(Net())
    CHANGES[change](net)
    assert digest_of(net) != before


def test_globals_and_classes_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    before = digest_of(net)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "FACTOR", 3.0)
        assert digest_of(net) != before
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "scaled", lambda x: x)
        assert digest_of(net) != before
    with monkeypatch.context() as patch:
        patch.setattr(Net, "forward", lambda self, x: x)
        assert digest_of(net) != before
    assert digest_of(net) == before


def test_numbers_in_tensors_and_batches_do_not() -> None:
    net = Net()
    batch = {"x": torch.zeros(2, 4), "names": ["a", "b"], "count": 3}
    before = digest_of(net, batch)
    nn.init.ones_(net.first.weight)
    other = {"x": torch.ones(2, 4), "names": ["c", "d"], "count": 5}
    assert digest_of(net, other) == before
    for shaped in ({**other, "x": torch.ones(3, 4)}, {**other, "x": torch.ones(4, 2).T}, {**other, "names": ["c"]}):
        assert digest_of(net, shaped) != before


def test_it_is_the_same_in_another_process() -> None:
    code = f"from {__name__} import Net, digest_of; print(digest_of(Net()))"
    told = programs.run("-c", code)  # by the server, whose strings have other hashes than ours
    assert told.stdout.strip() == digest_of(Net()), told.stderr


def test_what_cannot_be_told_is_said() -> None:
    digest = Digest()
    digest.add(nn.LazyLinear(3))
    assert not digest.is_whole


def test_what_dicts_redefine_is_not_called() -> None:
    class Library(dict[str, Any]):
        def items(self) -> Any:
            raise AssertionError("this would import every model")

        __len__ = __iter__ = items  # type: ignore[assignment]

    net = Net()
    net.table = Library(a=1)  # type: ignore[assignment]
    before = digest_of(net)
    net.table["a"] = 2  # type: ignore[assignment]
    assert digest_of(net) != before


def test_a_look_that_fails_costs_the_cache_and_no_more() -> None:
    class Sly:
        __slots__ = ("hits",)

        def __getattribute__(self, name: str) -> Any:
            if name == "hits":
                raise RuntimeError("nobody counts them")
            return super().__getattribute__(name)

    net = Net()
    net.table = Sly()  # type: ignore[assignment]
    assert key_of_step(net, torch.ones(1, 4), torch.device("cpu")) == ""
