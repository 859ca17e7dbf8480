"""Hooks of one owner come off, and nobody else's do."""

import copy
from typing import Any

import torch
from torch import nn

from lightning_dpx.shifting.hooks import copied_part, remove_hooks_of


class Owner:
    """Notes the calls that it hears of."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def before(self, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        self.heard.append("before")

    def after(self, *_: Any) -> None:
        self.heard.append("after")


def test_only_the_hooks_of_the_owner_are_removed() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    mine, other = Owner(), Owner()
    for owner in (mine, other):
        module[0].register_forward_pre_hook(owner.before, with_kwargs=True)
        module[0].register_forward_hook(owner.after, always_call=True)
    remove_hooks_of(mine, module)
    module(torch.ones(1, 1))
    assert mine.heard == []
    assert other.heard == ["before", "after"]


class FindsItself:
    """Looks, while it is copied, which part of ``root`` is being copied around it."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.found: tuple[str, nn.Module | None] = ("", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FindsItself":
        made = FindsItself(self.root)
        made.found = copied_part(self.root, memo)
        return made


def test_a_copy_that_goes_on_knows_the_outermost_part_that_is_copied() -> None:
    root = nn.Sequential(nn.Sequential(nn.Tanh()))
    root[0][0].helper = FindsItself(root)
    whole = copy.deepcopy(root)
    assert whole[0][0].helper.found == ("", whole)
    part = copy.deepcopy(root[0])
    assert part[0].helper.found == ("0", part)
    assert copied_part(None, {}) == ("", None)
