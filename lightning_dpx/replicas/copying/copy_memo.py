"""What ``copy.deepcopy`` is told before it copies: what stays the same object, and what stands for the rest.

values of a module --walk--> what leads to tensors or modules --> a counterpart, filled here or by deepcopy
                             everything else -----------------> the same object
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_dpx.python_objects.object_graph import CopiedEmpty, ObjectGraph, is_tensor_or_module
from lightning_dpx.replicas.copying.function_copies import functions_that_keep, make_functions
from lightning_dpx.replicas.copying.module_shells import make_shells
from lightning_dpx.replicas.copying.shared_objects import LOCKS, Memo
from lightning_dpx.replicas.copying.weak_references import copy_references, copy_weak_tables, held_strongly
from lightning_dpx.replicas.hidden_arrays import arrays_of


@dataclass(frozen=True)
class _Walks:
    """What a copy leads to, by how it is copied.

    Attributes:
        rest: Behind shared values: of these only what leads to tensors and modules is copied.
        hidden: What modules beside the structure hold (kept in a list, say): its tensors follow the first replica's.
        whole: What is copied whole, what is hidden included.
    """

    rest: ObjectGraph
    hidden: ObjectGraph
    whole: ObjectGraph

    @classmethod
    def of(
        cls,
        shared: Iterable[Any],
        private: Iterable[Any],
        has_own: Callable[[Any], bool],
        stops: Callable[[Any], bool],
    ) -> "_Walks":
        """The walks from both kinds of values.

        Args:
            shared: Values of which only what leads to tensors or modules is copied.
            private: Values that are copied whole.
            has_own: What every replica has its own of, so that what leads there is copied.
            stops: Where walks end.
        """
        rest = ObjectGraph(has_own, stops)
        rest.walk(shared)
        hidden = ObjectGraph(has_own, stops, descend=_is_module)
        hidden.walk(value for value in rest.objects.values() if isinstance(value, nn.Module) and not stops(value))
        whole = ObjectGraph(has_own, stops, descend=_is_module)
        whole.walk([*private, *hidden.objects.values()])
        return cls(rest, hidden, whole)

    @property
    def objects(self) -> dict[int, Any]:
        """All of them, by id."""
        return self.rest.objects | self.whole.objects

    @functools.cached_property
    def leading(self) -> set[int]:
        """The ids of what leads to tensors and modules."""
        return self.rest.leading() | self.whole.leading()


def prepare_memo(  # noqa: PLR0913  two callers, each of which has ways of its own to place what it copies
    memo: Memo,
    shared: Iterable[Any],
    private: Iterable[Any],
    *,
    place: Callable[[torch.Tensor], torch.Tensor],
    is_boundary: Callable[[Any], bool],
    module: nn.Module | None = None,
    place_buffer: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Registers in ``memo`` the counterparts that ``copy.deepcopy`` would get wrong, or must not make.

    Returns the tensors that it has placed, in containers, objects and modules behind ``shared`` values.

    That is: everything that may be shared, tensors (those with a history cannot be copied), functions and weak
    references (which it hands over as they are), and locks.

    Args:
        memo: By id, the counterparts that are known; gets those that are made.
        shared: Values of which only what leads to tensors or modules is copied.
        private: Values that are copied whole.
        place: Makes the counterpart of a tensor.
        is_boundary: What stays the same object in any case.
        module: The module whose structure is copied, too, before anything refers to its submodules.
        place_buffer: Makes the counterpart of a buffer of a module behind the values; as ``place`` unless given.
    """
    shared = list(shared)
    private = list(private)
    # Before the walks, which end at what the memo knows: at submodules, too, though their copies
    # are still empty.
    shells = [] if module is None else make_shells(module, memo)
    known = frozenset(memo)

    def stops(value: Any) -> bool:
        return id(value) in known or is_boundary(value)

    def has_own(value: Any) -> bool:
        # Hooks of a plan on a module that replicas share lead to the modules of another replica.
        if is_tensor_or_module(value) or isinstance(value, CopiedEmpty):
            return True
        # A container that a replica got when tensors came into it: a function that captures it must lead there.
        return memo.get(id(value), value) is not value

    walks = _Walks.of(shared, private, has_own, stops)
    # Ids are good as long as their objects live: the memo holds the walks, which hold the objects.
    memo[id(walks)] = walks
    placed = _enter_tensors(memo, walks, _Placing(walks, place, place_buffer or place), is_boundary, known)
    # Functions are made empty, then the modules get their states, then the functions what they
    # capture: either may lead to the other, and deepcopy finds what the memo has.
    unknown = {key: value for key, value in walks.objects.items() if key not in memo}
    functions = make_functions(memo, unknown, walks.leading | functions_that_keep(walks.whole.objects))
    references = [value for value in unknown.values() if isinstance(value, weakref.ref)]
    if references:
        copy_references(memo, references, held_strongly([*shared, *private], stops))
        copy_weak_tables(memo, unknown.values())
    for shell in shells:
        shell.fill(memo)
    functions.fill()
    for shell in shells:
        # Last: what compiles a module looks at it, which has its state by now.
        shell.compile(memo)
    return placed


def _enter_tensors(
    memo: Memo,
    walks: _Walks,
    placing: "_Placing",
    is_boundary: Callable[[Any], bool],
    known: frozenset[int],
) -> list[torch.Tensor]:
    """Gives ``memo`` the counterparts of tensors, and what is the same for all; returns tensors behind shared values.

    Args:
        memo: Gets both.
        walks: What the copy leads to.
        placing: Makes the counterpart of a tensor.
        is_boundary: What stays the same object in any case.
        known: Ids that the memo had before.
    """
    placed: list[torch.Tensor] = []
    arrays = _arrays_of_hidden(walks)
    for key, value in walks.objects.items():
        if key in known:
            continue
        if isinstance(value, torch.Tensor):
            memo[key] = placing(value)
            if key in walks.rest.objects or key in walks.hidden.objects:
                placed.append(value)
            continue
        # An array is on the host for all devices. A copy would not see what hooks write into it, which nothing counts.
        is_copied = key in walks.leading or (key in walks.whole.objects and key not in arrays)
        if is_boundary(value) or isinstance(value, LOCKS) or not is_copied:
            memo[key] = value
    return placed


class _Placing:
    """Makes the counterparts of tensors.

    Args:
        walks: What leads to them.
        place: Makes that of a tensor.
        place_buffer: Makes that of a buffer.
    """

    def __init__(
        self,
        walks: _Walks,
        place: Callable[[torch.Tensor], torch.Tensor],
        place_buffer: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._place = place
        self._place_buffer = place_buffer
        self._buffers: set[int] = set()
        if place_buffer is place:
            return
        for value in walks.rest.objects.values():
            if isinstance(value, nn.Module):
                self._buffers.update(map(id, value.buffers()))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The counterpart of ``tensor``."""
        if id(tensor) in self._buffers:
            return self._place_buffer(tensor)
        return self._place(tensor)


def _arrays_of_hidden(walks: _Walks) -> set[int]:
    """The ids of arrays of modules that are kept in a list, say, as those of submodules are shared."""
    found: set[int] = set()
    for value in walks.rest.objects.values():
        if isinstance(value, nn.Module):
            found.update(map(id, arrays_of(value)))
    return found


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)
