"""Weak references, and tables of them, of a copy: they lead to the copy, where the originals lead to the module."""

import copy
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from lightning_dpx.python_objects.object_graph import ObjectGraph
from lightning_dpx.python_objects.own_attributes import reduced_unchanged
from lightning_dpx.replicas.copying.empty_copies import empty, is_copied_by_state, set_state
from lightning_dpx.replicas.copying.shared_objects import Memo


def held_strongly(values: Iterable[Any], stops: Callable[[Any], bool]) -> dict[int, Any]:
    """What ``values`` lead to by other ways than weak references, by id: a copy of it is held in its place."""
    graph = ObjectGraph(
        lambda value: isinstance(value, torch.Tensor),
        lambda value: isinstance(value, weakref.ref) or stops(value),
    )
    graph.walk(values)
    return graph.objects


def copy_references(memo: Memo, references: Sequence[Any], held: Mapping[int, Any]) -> None:
    """Counterparts of weak references, which lead to what ``memo`` knows, or gets, instead of the originals.

    Args:
        memo: As of :func:`prepare_memo`.
        references: Weak references.
        held: By id, the objects that something else holds as well; a copy of any other would be gone at once.
    """
    referents: list[Any] = []
    for reference in references:
        referent = _referent_of(reference)
        if id(referent) in held and id(referent) not in memo:
            referents.append(referent)
    # Empty at first: a child that refers weakly to its parent finds the parent's copy before that has its children.
    shells: list[tuple[Any, Any]] = []
    others: list[Any] = []
    for referent in referents:
        if id(referent) in memo:
            continue
        if is_copied_by_state(referent):
            kind: Any = type(referent)
            memo[id(referent)] = empty(kind)
            shells.append((memo[id(referent)], reduced_unchanged(referent)[2]))
        else:
            others.append(referent)
    _copy_known_references(memo, references)
    for referent in others:
        copy.deepcopy(referent, memo)
    _copy_known_references(memo, references)
    for shell, state in shells:
        set_state(shell, copy.deepcopy(state, memo))


def _copy_known_references(memo: Memo, references: Sequence[Any]) -> None:
    for reference in references:
        counterpart = memo.get(id(_referent_of(reference)))
        # What it refers to may be gone, or be no part of the module: then the reference stays as
        # it is.
        if counterpart is None:
            continue
        if isinstance(reference, weakref.WeakMethod):
            method: Any = reference()
            memo[id(reference)] = weakref.WeakMethod(types.MethodType(method.__func__, counterpart))
        elif type(reference) is weakref.ref:
            memo[id(reference)] = weakref.ref(counterpart)


def copy_weak_tables(memo: Memo, values: Iterable[Any]) -> None:
    """Counterparts of those among ``values``; their own copies would have the originals for what they hold weakly."""
    for table in values:
        if type(table) not in (weakref.WeakKeyDictionary, weakref.WeakValueDictionary):
            continue
        made = type(table)()
        memo[id(table)] = made
        for key, value in list(table.items()):
            if isinstance(table, weakref.WeakKeyDictionary):
                made[memo.get(id(key), key)] = copy.deepcopy(value, memo)
            else:
                made[copy.deepcopy(key, memo)] = memo.get(id(value), value)


def _referent_of(reference: Any) -> Any:
    """What a weak reference leads to; of a method, the object that it is bound to."""
    referent = reference()
    if isinstance(referent, types.MethodType):
        return referent.__self__
    return referent
