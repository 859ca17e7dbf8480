"""Empty copies of submodules, which are there before anything that refers to them is copied."""

import copy
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_dpx.python_objects.own_attributes import is_made_from_state, reduced_unchanged
from lightning_dpx.replicas.copying.empty_copies import empty
from lightning_dpx.replicas.copying.shared_objects import Memo, modules_without
from lightning_dpx.torch_compat import OptimizedModule, compiled_call_of, submodules_of


@dataclass(frozen=True)
class Shell:
    """A submodule whose copy is there, but empty.

    Attributes:
        original: The submodule.
        copied: Its copy.
        state: What the copy of the original's state is made of.
    """

    original: nn.Module
    copied: nn.Module
    state: Any

    def fill(self, memo: Memo) -> None:
        """Gives the copy its state."""
        self.copied.__setstate__(_copied_state(self.state, memo))  # type: ignore[no-untyped-call]

    def compile(self, memo: Memo) -> None:
        """Leads what ``original.compile()`` has put on it, which no copy of a module has, to the copy."""
        compiled = compiled_call_of(self.original)
        if compiled is not None and not isinstance(self.copied, OptimizedModule):
            vars(self.copied)["_compiled_call_impl"] = copy.deepcopy(compiled, memo)


def make_shells(module: nn.Module, memo: Memo) -> list[Shell]:
    """Shells of the submodules, which ``memo`` gets as their counterparts.

    Weak references and closures can then lead to a copy that is not made yet. Modules that say themselves how they are
    copied (scripted, traced and parametrized ones) are left to ``copy.deepcopy``.
    """
    shells: list[Shell] = []
    children = list(modules_without(module, memo))
    places = set(map(id, children))
    themselves = [child for child in children if not can_be_a_shell(child)]
    # Such a module may be made by its constructor, from finished copies of what it holds.
    inside: set[int] = set()
    for child in themselves:
        inside.update(map(id, child.modules()))
    # Parts first: a module that takes its state by a method of its own may go through its parts, which need theirs.
    for child in _parts_first(module, set()):
        if id(child) in places and id(child) not in inside:
            copied = empty(type(child))
            memo[id(child)] = copied
            shells.append(Shell(child, copied, _state_of(child)))
    # A compiled module looks at the one that it compiles when it gets its state.
    shells.sort(key=lambda shell: isinstance(shell.copied, OptimizedModule))
    return shells


def _parts_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """``module`` and all submodules, each once and after all of its own; none whose id is in ``seen``."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for part in submodules_of(module).values():
        if part is not None:
            yield from _parts_first(part, seen)
    yield module


def _state_of(child: nn.Module) -> Any:
    """What a copy of ``child`` begins with."""
    # A compiled module would be copied by its constructor, which forgets its hooks.
    if isinstance(child, OptimizedModule):
        return child.__getstate__()  # type: ignore[no-untyped-call]
    return reduced_unchanged(child)[2]


def _copied_state(state: Any, memo: Memo) -> Any:
    """``copy.deepcopy``, which takes its time for each of the dicts of hooks that most modules leave empty."""
    if type(state) is not dict:
        return copy.deepcopy(state, memo)
    copied: dict[str, Any] = {}
    for key, value in state.items():
        # Most modules have some ten of them, all empty.
        if type(value) is OrderedDict and not value and id(value) not in memo:
            memo[id(value)] = OrderedDict()
        copied[key] = memo[id(value)] if id(value) in memo else copy.deepcopy(value, memo)
    return copied


def can_be_a_shell(child: nn.Module) -> bool:
    """Whether ``child`` is copied by an empty object and a state, as Python does unless told otherwise."""
    kind = type(child)
    if isinstance(child, OptimizedModule):
        return True
    if hasattr(kind, "__deepcopy__"):
        return False
    return is_made_from_state(kind, reduced_unchanged(child))
