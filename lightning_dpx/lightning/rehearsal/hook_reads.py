"""Which attributes of a module its hooks read: what a step keeps for them is to be of the whole batch.

A later step may use what a step has kept, and a rehearsal runs a second step to see that. Hooks it does not call, so
their code is asked for the names that it loads: that of the module's hooks and of the user's callbacks', and of the
methods that they name. What is read by ``getattr`` with a name, or in functions that are no methods, is not seen.
"""

import dis
import inspect
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from lightning_dpx.lightning.gradient_hooks import BEFORE_BACKWARD
from lightning_dpx.lightning.lightning_api import Callback, LightningModule, is_overridden
from lightning_dpx.lightning.transfers import TRANSFER_HOOKS
from lightning_dpx.python_objects.origin import is_library, runs_steps

# Those of Lightning's hooks that say nothing of when they are called.
_OTHERS = frozenset(
    {"backward", "configure_gradient_clipping", "lr_scheduler_step", "optimizer_step", "optimizer_zero_grad"}
)
# They run on slices, within the step.
_WITHIN_STEPS = frozenset({*TRANSFER_HOOKS, "on_before_batch_transfer"})
_OF_BATCHES = {
    "training_step": "on_train_batch",
    "validation_step": "on_validation_batch",
    "test_step": "on_test_batch",
    "predict_step": "on_predict_batch",
}
# What the module computes with: it writes what it keeps before it reads it.
_COMPUTE = frozenset({*_OF_BATCHES, "forward"})
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
# By which code goes from a trainer, or a callback's argument, to the module.
_TO_THE_MODULE = ("trainer", "lightning_module", "model")
_Chain = tuple[str, ...]  # names that are loaded one from the other: net and weight in self.net.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class HookReads:
    """Paths of attributes that hooks read after a step and before the next one.

    Attributes:
        paths: All of them.
        before_backward: Those that are read where a tensor's graph may still be used.
    """

    paths: frozenset[str] = frozenset()
    before_backward: frozenset[str] = frozenset()

    @property
    def joined(self) -> frozenset[str]:
        """Those that may be put together from slices: what is put together has no graph."""
        return self.paths - self.before_backward


class HookNames:
    """The names that hooks after a step load, of whatever object; found once for all runs of a rehearsal.

    Args:
        module: With its trainer.
        step: Such as "training_step".
    """

    def __init__(self, module: LightningModule, step: str) -> None:
        hooks = frozenset(_hooks_after(step))
        self._names = _by_name(_chains_read(module, hooks))
        self._before_backward = _by_name(_chains_read(module, hooks & BEFORE_BACKWARD))

    def among(self, attributes: Iterable[tuple[str, Any]]) -> HookReads:
        """Which of the ``attributes``, by path, have one of these names."""
        paths: set[str] = set()
        before_backward: set[str] = set()
        for path, _ in attributes:
            if _is_loaded(path, self._names):
                paths.add(path)
            if _is_loaded(path, self._before_backward):
                before_backward.add(path)
        return HookReads(paths=frozenset(paths), before_backward=frozenset(before_backward))


def _hooks_after(step: str) -> Iterator[str]:
    others = tuple(prefix for of_step, prefix in _OF_BATCHES.items() if of_step != step)
    for name in {*dir(LightningModule), *dir(Callback)} - _WITHIN_STEPS:
        # Hooks round the batches of another stage see what the steps of that one keep.
        if (name.startswith("on_") or name in _OTHERS) and not name.startswith(others):
            yield name


def _by_name(chains: Iterable[_Chain]) -> dict[str, list[_Chain]]:
    """The names that are loaded, each with those before it in a chain."""
    found: dict[str, list[_Chain]] = {}
    for chain in chains:
        found.setdefault(chain[-1], []).append(chain[:-1])
    return found


def _is_loaded(path: str, by_name: Mapping[str, Sequence[_Chain]]) -> bool:
    """Whether what was loaded may be the attribute at ``path``: ``self.net.weight`` is not ``self.weight``."""
    *owners, name = path.split(".")
    for before in by_name.get(name, ()):
        known = list(itertools.dropwhile(_TO_THE_MODULE.__contains__, before))
        # Of a variable that holds a part of the module nothing is known, so any part may be meant.
        if owners[len(owners) - len(known) :] == known and len(known) <= len(owners):
            return True
    return False


def _chains_read(module: LightningModule, hooks: frozenset[str]) -> frozenset[_Chain]:
    callbacks: Sequence[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
    waiting = list(_functions_of(module, LightningModule, hooks))
    for callback in callbacks:
        # Lightning's own know nothing of attributes of the user's.
        if not runs_steps(type(callback)):
            waiting += _functions_of(callback, Callback, hooks)
    owners = [type(module), *map(type, callbacks)]
    found: set[_Chain] = set()
    followed: set[str] = set()
    while waiting:
        new = _chains_loaded(waiting.pop().__code__)
        found |= new
        names = {chain[-1] for chain in new} - _COMPUTE - followed
        followed |= names
        # A hook may leave the work to methods, of the module or of the callback.
        for name in names:
            for owner in owners:
                waiting += _definitions(owner, name)
    return frozenset(found)


def _functions_of(owner: Any, parent: type, hooks: frozenset[str]) -> Iterator[types.FunctionType]:
    """The functions of those hooks that ``owner`` has of its own."""
    for name in hooks:
        # Properties have such names as well (on_gpu).
        if not isinstance(getattr(parent, name, None), types.FunctionType):
            continue
        if is_overridden(name, owner, parent=parent):
            # Its like in a base is called where this one names it, and followed then.
            yield from itertools.islice(_definitions(type(owner), name), 1)
            # A hook may be set on the object itself.
            own = vars(owner).get(name)
            function = getattr(own, "__func__", own)
            if isinstance(function, types.FunctionType):
                yield function


def _definitions(kind: type, name: str) -> Iterator[types.FunctionType]:
    """What a class and those that it is derived from have of a method, as one may call the other."""
    for base in kind.__mro__:
        if is_library(base) or runs_steps(base):
            continue
        value = vars(base).get(name)
        if isinstance(value, property):
            value = value.fget
        function = inspect.unwrap(getattr(value, "__func__", value))  # type: ignore[arg-type]
        if isinstance(function, types.FunctionType):
            yield function


@cache
def _chains_loaded(code: types.CodeType) -> frozenset[_Chain]:
    """The names of attributes that code loads, and not only sets, with those of functions that it defines.

    Each with the names that led to it from a variable, or from the result of a call: ("net",) and ("net", "weight").
    """
    found: set[_Chain] = set()
    chain: _Chain = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _LOADS:
            chain = (*chain, str(instruction.argval))
            found.add(chain)
        # Part of the instruction after it, whose argument is large.
        elif instruction.opname != "EXTENDED_ARG":
            chain = ()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _chains_loaded(constant)
    return frozenset(found)
