"""Collectives within calls that are made again: what they gave in the forward is kept, and given once more.

    forward    all_reduce(x) --> the other processes --> result, which is kept
    replay     all_reduce(x) --> the kept result, and no process is asked

So a replay meets no other process. Each may replay a call, keep it, or try it as often as it likes, whatever the others
do, and the order of collectives is that of a step without a plan. The price is the memory of the results up to the last
tensor that the call saves; what the layers between make of them is not kept.

Only collectives that make a new tensor are known here, as DTensor has them. Those of ``torch.distributed`` itself write
to tensors that they are given: a call with one of them is not replayed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_dpx.python_objects.leave_no_trace import written_tensors
from lightning_dpx.torch_compat import (
    COLLECTIVES,
    TorchDispatchMode,
    disable_current_modes,
    key_of,
    on_tensors_of_tensors,
    shares_memory,
    with_memory_in,
)

_WAIT = "_c10d_functional::wait_tensor"  # asks nobody: only waits until what was asked for is there
# Likewise: a tensor that waits when it is used, and the group of a mesh.
_ALONE = frozenset({"_c10d_functional::_wrap_tensor_autograd", "_dtensor::mesh_get_process_group"})
# Their results are there only after a wait.
_LATER = frozenset(
    f"_c10d_functional::{name}"
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")
)
_AT_ONCE = frozenset({"_dtensor::shard_dim_alltoall"})


@dataclass(slots=True, eq=False)
class Collective:
    """One that a forward has run.

    Attributes:
        operator: Its name; also of one that cannot be given again.
        given: Its arguments: of tensors the shape and the dtype.
        number: So many tensors had autograd saved before.
        result: What it gave, once it is there.
        storage: The key of the memory of what it gave.
        obstacle: Why that cannot be given again; empty if it can.
    """

    operator: str
    given: tuple[Any, ...]
    number: int
    result: torch.Tensor | None = None
    storage: int = -1
    obstacle: str = ""


class _MeetsCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells collectives, the waits for them, and all other operators apart."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap every call, for a tenth of its time

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled functions, such as flex_attention, would run eagerly in here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # These do the operator on their parts; that comes here again, with its collectives.
        if on_tensors_of_tensors(types):
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace not in COLLECTIVES:
            self._other(func, args, kwargs)
            return func(*args, **kwargs)
        name = name_of(func)
        if name == _WAIT:
            return self._wait(func, args, kwargs)
        if name in _ALONE:
            return func(*args, **kwargs)
        return self._collective(name, func, args, kwargs)

    def _other(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operator of this process alone is about to run."""
        raise NotImplementedError

    def _wait(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a wait for a collective gives."""
        raise NotImplementedError

    def _collective(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """What a collective gives."""
        raise NotImplementedError


class RecordsCollectives(_MeetsCollectives):
    """Keeps what collectives give.

    Args:
        number_saved: Tells how many tensors autograd has saved so far.

    Attributes:
        found: The collectives so far, in order.
    """

    def __init__(self, number_saved: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._number_saved = number_saved
        self.found: list[Collective] = []

    def _other(self, func: Any, args: Any, kwargs: Any) -> None:
        # Before the first collective there is nothing that a write could spoil.
        if self.found:
            self._look_for_writes(func, args, kwargs)

    def _wait(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self._is_there(args[0])
        return out

    def _collective(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        # Noted before it runs: what it waits for may run other operators.
        collective = Collective(name, described(args, kwargs), self._number_saved())
        out = func(*args, **kwargs)
        self.found.append(collective)
        if name in _LATER or name in _AT_ONCE:
            collective.storage = key_of(out.untyped_storage())
            # Until a wait says otherwise.
            collective.obstacle = f"what its {name} gives does not arrive in it"
            self._hold(collective, out)
            if name in _AT_ONCE:
                self._is_there(out)
        else:
            collective.obstacle = f"it talks to other processes by {name}"
        self._begun(collective)
        return out

    def _hold(self, collective: Collective, out: torch.Tensor) -> None:
        """Holds the memory of the result, which is still being filled; a tensor of its own, without what becomes of
        the other one in the graph."""
        with disable_current_modes():
            collective.result = out.detach()

    def _begun(self, collective: Collective) -> None:
        """Notes that one more collective has begun."""

    def _arrived(self, collective: Collective, tensor: torch.Tensor) -> None:
        """What it gave is there."""

    def _is_held(self, collective: Collective) -> bool:
        """Whether the memory of what it gave is still that."""
        return True

    def _is_there(self, tensor: torch.Tensor) -> None:
        storage = key_of(tensor.untyped_storage())
        for collective in reversed(self.found):
            # Memory of a result that has gone may be that of a later one.
            if collective.storage == storage:
                if collective.obstacle:
                    collective.obstacle = ""
                    self._arrived(collective, tensor)
                return

    def _look_for_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        """What is written to after it came is no longer what the collective gave."""
        for tensor in written_tensors(func, args, kwargs):
            if tensor.layout is not torch.strided:
                continue
            storage = key_of(tensor.untyped_storage())
            for collective in self.found:
                if collective.storage == storage and self._is_held(collective):
                    collective.obstacle = f"it writes to what its {collective.operator} has given"


class AnswersCollectives(_MeetsCollectives):
    """Gives what collectives gave before, in the same order, and asks no other process.

    Args:
        call: The name of what is made again.
        collectives: Those of its first time, as far as it is made again.

    Raises:
        RuntimeError: in a block: another collective than that of the first time is about to run.
    """

    def __init__(self, call: str, collectives: Iterable[Collective] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call
        self._left = list(reversed(list(collectives)))
        self._given = dict[int, str]()

    def _other(self, func: Any, args: Any, kwargs: Any) -> None:
        # As in the forward: nothing was given yet, so nothing can be spoilt.
        if self._given:
            self._refuse_writes(func, args, kwargs)

    def _wait(self, func: Any, args: Any, kwargs: Any) -> Any:
        # It was waited for in the forward, and the work that belongs to it is over.
        if key_of(args[0].untyped_storage()) in self._given:
            return args[0]
        return func(*args, **kwargs)

    def _collective(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        collective = self._left.pop() if self._left else None
        # Raised before the operator runs: no process is asked by mistake.
        if collective is None or collective.result is None:
            raise RuntimeError(
                f"{self._call!r} runs {name} when it is called again, which it did not before: other processes would "
                "not answer."
            )
        if (name, described(args, kwargs)) != (collective.operator, collective.given):
            raise RuntimeError(
                f"{self._call!r} runs {name} when it is called again, on other tensors or with other options than "
                f"its {collective.operator} before: it does not do the same when it is called twice."
            )
        self._given[key_of(collective.result.untyped_storage())] = name
        # A tensor of its own: autograd would write on the kept one which graph it belongs to.
        return collective.result.detach()

    def _refuse_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        """What is kept may be given once more, so nothing may write to it."""
        for tensor in written_tensors(func, args, kwargs):
            if tensor.layout is torch.strided and (name := self._given.get(key_of(tensor.untyped_storage()))):
                raise RuntimeError(
                    f"{self._call!r} writes to what its {name} gives when it is called again, which it did not before."
                )


def needed(collectives: Sequence[Collective], saved: int) -> list[Collective]:
    """Those that a call has run before it saved its last tensor: when it is made again it ends there.

    Args:
        collectives: All of the call.
        saved: How many tensors autograd had saved when it was over.
    """
    return [collective for collective in collectives if collective.number < saved]


def results_apart(collectives: Sequence[Collective]) -> list[Collective]:
    """The same, with memory of their own for results that others hold as well, who may write to them.

    Whoever it is: what the call returns, in whatever it is packed, or a container that it was given. So the call has to
    be over, and what it has saved has to be let go of.
    """
    found = list(collectives)
    for at, collective in enumerate(found):
        if collective.result is not None and shares_memory(collective.result):
            with disable_current_modes(), torch.no_grad():
                found[at] = replace(collective, result=collective.result.clone())
    return found


def sharing_memory(leaves: Iterable[Any], saved: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those tensors of ``leaves`` that have memory with one of ``saved`` in common."""
    kept = {key_of(part.untyped_storage()) for part in _with_memory(saved)}
    found = []
    for leaf in leaves:
        if any(key_of(part.untyped_storage()) in kept for part in _with_memory([leaf])):
            found.append(leaf)
    return found


def _with_memory(leaves: Iterable[Any]) -> list[torch.Tensor]:
    """What the tensors among ``leaves`` are made of, as far as it has one block of memory."""
    found = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found += [part for part in with_memory_in(leaf) if part.layout is torch.strided]
    return found


def name_of(func: Any) -> str:
    """The name of an operator, with its namespace."""
    # An operator is called by its packet as a rule, so overloads are not told apart.
    name: str = func.name().partition(".")[0]
    return name


def described(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The arguments of an operator, by which its second call is known again: of tensors the shape and the dtype."""
    return tuple(_described(value) for value in (*args, *sorted(kwargs.items())))


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_described(each) for each in value)
    return value
