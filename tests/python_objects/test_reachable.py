"""What the search for generators and metrics asks of the objects on its way, and what it says of where they are."""

import random
from typing import Any

import torch
from torch import nn

from lightning_dpx.python_objects.reachable import reachable

SHARED = random.Random(0)


class Answers(dict[str, Any]):
    """As the tables of transformers do, it imports what it holds when it is asked for all of it."""

    def items(self) -> Any:
        raise LookupError("asked")

    values = items  # type: ignore[assignment]


class Helper:
    def __init__(self) -> None:
        self.generators = [torch.Generator(), torch.Generator()]

    def draw(self) -> float:
        return SHARED.random()


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Identity())
        self.inner[1].noise = random.Random(1)
        self.table = Answers(found=random.Random(2))
        self.helper = Helper()


def test_each_is_found_once_with_its_path_and_no_container_is_asked_for_its_content() -> None:
    module = Module()
    module.again = module.helper.generators  # type: ignore[assignment]
    found = reachable(module, (random.Random, torch.Generator))
    expected = {
        "inner.1.noise": module.inner[1].noise,
        "table['found']": dict.__getitem__(module.table, "found"),
        "again[0]": module.helper.generators[0],
        "again[1]": module.helper.generators[1],
        "SHARED": SHARED,
    }
    assert {path: id(one) for path, one in found} == {path: id(one) for path, one in expected.items()}
    assert "SHARED" not in dict(reachable(module, (random.Random,), follow_code=False))


def test_a_proxy_is_what_it_stands_for() -> None:
    class Proxy:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            return random.Random

    module = nn.Module()
    module.proxy = Proxy()  # type: ignore[assignment]
    assert [path for path, _ in reachable(module, (random.Random,))] == ["proxy"]
