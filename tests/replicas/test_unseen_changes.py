"""Changes of a step that nobody has seen before are told when the next one begins."""

import torch
from torch import nn

from lightning_dpx.replicas.unseen_changes import UnseenChanges


def changes() -> tuple[UnseenChanges, list[nn.Module], list[set[str]]]:
    module = nn.Sequential(nn.Linear(1, 1))
    return UnseenChanges(module), list(module.modules()), []


def test_numbers_and_containers_are_told_by_path_and_once() -> None:
    unseen, modules, told = changes()
    unseen.begin(told.append, known={"steps", "0.steps"})
    expected = {"count": 1, "same": torch.ones(2), "steps": 1, "name": "a"}
    state = {"count": 2, "same": torch.ones(2), "steps": 2, "name": "b"}
    unseen.note_numbers(1, expected, state, modules)
    unseen.note_numbers(0, expected, {"steps": 3}, modules)
    unseen.note_container(0, "losses")
    unseen.end(modules)
    unseen.end(modules)
    assert told == [{"0.count", "losses"}]


def test_where_nobody_asks_nothing_is_looked_at() -> None:
    unseen, modules, told = changes()
    unseen.note_numbers(0, {"count": 1}, {"count": 2}, modules)
    unseen.end(modules)
    unseen.begin(told.append, known=())
    unseen.end(modules)
    assert told == []
