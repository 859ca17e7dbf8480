"""Functions of a copy: their closures and defaults lead to the copy, where the originals lead to the module."""

import copy
import functools
import types
from collections.abc import Collection, Mapping
from typing import Any

from lightning_dpx.python_objects.object_graph import ATOMS, children_of_object
from lightning_dpx.replicas.copying.shared_objects import Memo


class FunctionCopies:
    """Counterparts of functions, which lead to what ``memo`` knows instead of the originals."""

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._cells: dict[int, tuple[types.CellType, types.CellType]] = {}
        self._made: list[tuple[types.FunctionType, types.FunctionType]] = []

    def add(self, value: Any) -> None:
        """Puts a counterpart of ``value`` into the memo, if it is one of those."""
        if isinstance(value, types.FunctionType):
            self._memo[id(value)] = self._function(value)
        # deepcopy hands it over as it is, with the original's module inside.
        elif isinstance(value, functools._lru_cache_wrapper):
            wrapped = value.__wrapped__
            if isinstance(wrapped, types.FunctionType):
                if id(wrapped) not in self._memo:
                    self._memo[id(wrapped)] = self._function(wrapped)
                options = value.cache_parameters()  # type: ignore[attr-defined]
                self._memo[id(value)] = functools.lru_cache(**options)(self._memo[id(wrapped)])

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = tuple(self._cell(cell) for cell in function.__closure__ or ())
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        self._made.append((function, made))
        return made

    def _cell(self, cell: types.CellType) -> types.CellType:
        if id(cell) not in self._cells:  # functions that share a variable go on sharing it
            self._cells[id(cell)] = (cell, types.CellType())
        return self._cells[id(cell)][1]

    def fill(self) -> None:
        """Gives the functions what they capture, once everything that they lead to has its counterpart."""
        for cell, made in self._cells.values():
            # A variable that is not assigned yet, or not any more, has an empty cell.
            if _is_filled(cell):
                made.cell_contents = copy.deepcopy(cell.cell_contents, self._memo)
        for function, duplicate in self._made:
            # A default may be the module, or hold it, as well.
            duplicate.__defaults__ = copy.deepcopy(function.__defaults__, self._memo)
            duplicate.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, self._memo)
            duplicate.__qualname__ = function.__qualname__
            duplicate.__doc__ = function.__doc__
            duplicate.__module__ = function.__module__
            duplicate.__dict__.update(copy.deepcopy(function.__dict__, self._memo))


def make_functions(memo: Memo, unknown: Mapping[int, Any], copied: Collection[int]) -> FunctionCopies:
    """Empty counterparts of those functions among ``unknown`` objects whose ids are in ``copied``."""
    functions = FunctionCopies(memo)
    for key, value in unknown.items():
        # Adding a function that keeps its results has added the one that it wraps.
        if key in copied and key not in memo:
            functions.add(value)
    return functions


def functions_that_keep(objects: Mapping[int, Any]) -> set[int]:
    """The ids of functions with variables of another one, or with defaults such as a list, which they may write."""
    found: set[int] = set()
    for key, value in objects.items():
        if not isinstance(value, types.FunctionType):
            continue
        if value.__closure__ or not ATOMS.issuperset(map(type, children_of_object(value))):
            found.add(key)
    return found


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
