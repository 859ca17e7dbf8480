"""Calls of modules that are made again, for values that no recipe makes: what a recurrent layer or a function of the
user's own saves, and the random numbers of a dropout.

A call is noted when it begins: its arguments by weak references (``call_arguments.py``), what it finds around itself
(``call_surroundings.py``) and the state of the random generators (``call_draws.py``). If a value is to be dropped that
autograd saves within the call and that nothing in the graph can make, the call becomes a value itself, an
:class:`ReplayOutputs`, from which those that it saves or returns are picked. To have it the module is called once more,
as ``torch.utils.checkpoint`` calls it, with hooks that catch what autograd saves, number by number.

    forward    enter -> Call      notes its arguments, weakly        leave -> marks what it returns
    backward   SelectiveReplay(arguments) -> ReplayOutputs -> select_output(outcome, key)   nothing else remains

[Note: what cannot be made again] A call that could be told from the first one is refused: it changes parameters,
buffers (but for the statistics of norms, of which the second call gets copies) or its arguments, or anything that its
attributes, classes and globals lead to (see :mod:`lightning_dpx.python_objects.object_state`); they lead to something
whose state cannot be seen, such as an iterator; it has hooks of others, takes objects that may have changed, runs under
a function mode, or talks to other processes (but see ``recorded_collectives.py``). Random numbers, wherever they are
drawn, and what the attributes lead to are as they were when the call began, and are put back. The profile makes every
call once more before a plan relies on it, and compares all numbers.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from lightning_dpx.memory.execute.call_arguments import CallArguments
from lightning_dpx.memory.execute.call_draws import CallDraws
from lightning_dpx.memory.execute.call_surroundings import CallSurroundings
from lightning_dpx.memory.execute.compiled_calls import code_of, uncompiled_of
from lightning_dpx.memory.execute.module_anatomy import Anatomies, Anatomy
from lightning_dpx.memory.execute.untracked_inputs import UntrackedInputs
from lightning_dpx.torch_compat import function_modes, has_any_global_hook, key_of, tree_leaves, view_base

_TAG = "lightning_dpx.calls"
_HOST = torch.device("cpu")
# Backward has a thread per device: what one of them makes again concerns no other.
_REPEATING = threading.local()


class OutputKey(NamedTuple):
    """Which tensor of a call: the one of this number among those it saves, or returns."""

    kind: str
    number: int


class ReplayOutputs:
    """The tensors that a replayed call gave, as far as they are selected from it.

    Attributes:
        given: The tensors.
    """

    __slots__ = ("given",)

    def __init__(self) -> None:
        self.given: dict[OutputKey, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of all its tensors."""
        # Several of the tensors may be views of one memory.
        storages = {key_of(tensor.untyped_storage()): tensor.untyped_storage() for tensor in self.given.values()}
        return sum(storage.nbytes() for storage in storages.values())

    @property
    def device(self) -> torch.device | None:
        """The device of the first tensor."""
        return next((tensor.device for tensor in self.given.values()), None)


def select_output(outcome: ReplayOutputs, key: OutputKey) -> torch.Tensor:
    """The tensor of a replayed call that ``key`` tells."""
    return outcome.given[key]


def repeating() -> bool:
    """Whether this thread is making a call again."""
    return getattr(_REPEATING, "on", False)


class Call:
    """A call of a module, from its beginning on.

    Args:
        module: What is called.
        name: Of the call.
        args: What it is given.
        kwargs: What it is given by name.
        saved: How many tensors autograd had saved before.
        anatomies: What was found of modules in earlier calls.

    Attributes:
        arguments: What it is given.
        outcome: The value that the call has become, weakly, once something is to be picked from it.
        is_counted: Whether all that autograd has saved since it began was counted.
        draws: The random numbers that it draws.
        is_distributed: Whether processes have parts of the module's parameters, and so meet in it as a rule.
    """

    def __init__(
        self, module: nn.Module, name: str, args: Any, kwargs: Any, saved: int, anatomies: Anatomies | None = None
    ) -> None:
        self.module = module
        self.name = name
        self.saved = saved
        self.is_counted = True
        self.outcome: Callable[[], Any] | None = None
        self.arguments: CallArguments = CallArguments(args, kwargs)
        self._anatomies = Anatomies() if anatomies is None else anatomies
        self._is_over = False
        self._obstacle = self.arguments.obstacle or _obstacle_around()
        self.is_distributed: bool = False
        held = list[Any]()
        if self._obstacle:  # what attributes hold would be held for nothing, and walked
            anatomy = Anatomy(uncompiled_of(module), looks=False)
        else:
            anatomy, held = self._anatomies.of(uncompiled_of(module))
            self._obstacle = anatomy.obstacle
            self.is_distributed = anatomy.is_distributed
        if self._obstacle:
            self.arguments.forget()
            held = []
        # Autocast and random numbers are those of the device that the call runs on.
        home = anatomy.device or self.arguments.device or _HOST
        self._surroundings = CallSurroundings(anatomy, held, home)
        self.draws: CallDraws = CallDraws(home, self._anatomies.generators)

    def settle(self) -> None:
        """Forward is over: nothing more will be picked, and a call must not hold the graph that leads to it."""
        self.arguments.settle()

    def apart(self) -> "Call":
        """A copy of this call without its graph, to be kept for longer than that."""
        duplicate = copy.copy(self)
        duplicate.draws = copy.copy(self.draws)
        duplicate.arguments = self.arguments.apart()
        return duplicate

    def left(self, output: Any) -> None:
        """Ends the call, with this result; what it returned is marked in the graph."""
        self.draws.end()
        self._is_over = True
        if not self._obstacle and (changed := self._surroundings.difference(self.module)):
            self._obstacle = f"it changes {changed}"
        # A call that is never made again holds nothing of its module either.
        if self._obstacle:
            self._anatomies.forget(uncompiled_of(self.module))
            self._surroundings = CallSurroundings(Anatomy(uncompiled_of(self.module), looks=False), [], _HOST)
        for number, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and leaf not in self.arguments:
                # An inner call that returned the tensor has left its mark first, and keeps it: to
                # make that one again runs less than to make this one.
                marks: dict[Any, Any] = leaf.grad_fn.metadata  # type: ignore[assignment]
                marks.setdefault((_TAG, leaf.output_nr), (self, OutputKey("returned", number)))

    @property
    def obstacle(self) -> str:
        """Why it cannot be made again, as far as is known; empty if it can."""
        if self._obstacle or self.arguments.tensors:
            return self._obstacle
        return "it takes no tensor"

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """As it was when the call began; what the call changes is put back afterwards."""
        self._surroundings.check_parameters(self.name)
        if not self._is_over:
            raise RuntimeError(
                f"{self.name!r} runs a backward of its own, and cannot be called again before it is over."
            )
        was = repeating()
        with self.draws.repeated():
            with self._surroundings.restored(self.name):
                _REPEATING.on = True
                try:
                    yield
                finally:
                    _REPEATING.on = was
            self.draws.check_end(self.name)


class SelectiveReplay:
    """Makes a call again, for what is wanted of it.

    Attributes:
        call: Which.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self._wanted: dict[OutputKey, tuple[torch.Size, torch.dtype]] = {}
        self._tell: Callable[[OutputKey, torch.Tensor], None] | None = None

    def request(self, key: OutputKey, size: torch.Size, dtype: torch.dtype) -> None:
        """This tensor will be selected from the call's outputs."""
        self._wanted[key] = size, dtype

    def forgo(self, key: OutputKey) -> None:
        """This tensor will not be selected after all."""
        del self._wanted[key]

    @contextmanager
    def outputs_reported(self, tell: Callable[[OutputKey, torch.Tensor], None]) -> Iterator[None]:
        """Calls in here keep nothing: ``tell`` gets what is wanted, when it is made."""
        self._tell = tell
        try:
            yield
        finally:
            self._tell = None

    def __call__(self, *tensors: torch.Tensor) -> ReplayOutputs:
        """The outcome, for these arguments.

        Raises:
            RuntimeError: the call does something else this time, or it could never be made again.
        """
        call = self.call
        outcome = ReplayOutputs()
        number = 0
        if call.obstacle:
            raise RuntimeError(f"{call.name!r} cannot be called again: {call.obstacle}.")

        # The same code saves the same tensors in the same order: that tells which is which.
        def catch(tensor: torch.Tensor) -> None:
            nonlocal number
            self._take(outcome, OutputKey("saved", number), base_of(tensor))
            number += 1

        with call.surroundings(), torch.autograd.graph.saved_tensors_hooks(catch, never_unpacked):
            args, kwargs = call.arguments.with_tensors(tensors)
            for number_returned, leaf in enumerate(tree_leaves(code_of(call.module)(*args, **kwargs))):
                if isinstance(leaf, torch.Tensor):
                    self._take(outcome, OutputKey("returned", number_returned), leaf)
        if self._tell is None and (missing := self._wanted.keys() - outcome.given.keys()):
            raise RuntimeError(f"{call.name!r} did not give {_described(min(missing))} when it was called again.")
        return outcome

    def _take(self, outcome: ReplayOutputs, key: OutputKey, tensor: torch.Tensor) -> None:
        expected = self._wanted.get(key)
        if expected is None:
            return
        if expected != (tensor.size(), tensor.dtype):
            raise RuntimeError(
                f"{self.call.name!r} gave {_described(key)} of {list(tensor.size())} in {tensor.dtype} when it was "
                f"called again, instead of {list(expected[0])} in {expected[1]}."
            )
        if self._tell is None:
            outcome.given[key] = tensor.detach()
        else:
            self._tell(key, tensor)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that has the memory of ``tensor``, and its numbers."""
    base: torch.Tensor | None = view_base(tensor)
    # A complex number is no view of its parts.
    if base is None or base.dtype != tensor.dtype:
        return tensor
    return base


def returned_by(node: Any, output: int) -> tuple[Call, OutputKey] | None:
    """The call that has returned what flows from there, if one was noted."""
    found: tuple[Call, OutputKey] | None = node.metadata.get((_TAG, output))
    return found


def never_unpacked(_packed: Any) -> NoReturn:
    """What unpacks saved tensors of a call that is made again: it only shows them, and nothing asks for them."""
    raise RuntimeError("no backward runs through a call that was made again")


def _described(key: OutputKey) -> str:
    return f"its {key.kind} tensor {key.number}"


def _obstacle_around() -> str:
    """Why no call can be made again that begins now; empty if one can."""
    # Hooks on all modules would be told of the second call as of one more.
    if has_any_global_hook():  # type: ignore[no-untyped-call]
        return "there are hooks on all modules"
    # In backward the step's modes are off. Ours, which only notes operands, may be missing then.
    for mode in reversed(function_modes()):
        if not isinstance(mode, UntrackedInputs):
            return f"it runs under a {type(mode).__name__}"
    return ""
