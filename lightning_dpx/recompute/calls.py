"""Calls of modules that are made again, for values that no recipe makes: what a recurrent layer or a function of the
user's own saves, and the random numbers of a dropout.

A call is noted when it begins: its arguments by weak references, the state of the random generators and of autocast. If
a value is to be dropped that autograd saves within the call and that nothing in the graph can make, the call becomes a
value itself, an :class:`Outcome`, from which those that it saves or returns are picked. To have it the module is called
once more, as ``torch.utils.checkpoint`` calls it, with hooks that catch what autograd saves, number by number.

    forward    enter -> Call      notes its arguments, weakly        leave -> marks what it returns
    backward   Again(arguments) -> Outcome -> pick(outcome, key)     nothing else of the second call remains

[Note: what cannot be made again] A call that anybody could tell from the first one is refused: it changes attributes of
its modules or its arguments, has hooks of others, takes objects that may have changed, runs under a function mode, or
talks to other processes. Buffers may change, as those of a batch norm; the second call gets copies. The profile makes
every call once more before a plan relies on it, and compares all numbers.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode_stack as _function_modes
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import TensorWeakRef

from lightning_dpx.devices import RandomStates, random_states_kept
from lightning_dpx.recompute.operands import Operands
from lightning_dpx.recompute.recipes import NotRecomputable

_TAG = "lightning_dpx.calls"
_TENSORS = (torch.Tensor, nn.Parameter, FakeTensor)
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_PLAIN = (*_NUMBERS, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOST = torch.device("cpu")
_REPEATING = threading.local()
_GENERATORS = threading.Lock()  # the host's belongs to all threads: nobody else repeats random numbers at that time


class Key(NamedTuple):
    """Which tensor of a call: the one of this number among those it saves, or returns."""

    kind: str
    number: int


class Outcome:
    """What a call gave when it was made again, as far as anybody wants it.

    Attributes:
        given: The tensors.
    """

    __slots__ = ("given",)

    def __init__(self) -> None:
        self.given: dict[Key, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Of the storages of all of them."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self.given.values()}
        return sum(storage.nbytes() for storage in storages.values())

    @property
    def device(self) -> torch.device | None:
        """Where the first one is."""
        return next((tensor.device for tensor in self.given.values()), None)


def pick(outcome: Outcome, key: Key) -> torch.Tensor:
    """One of its tensors."""
    return outcome.given[key]


class Passive:
    """Hooks that do nothing while a call is made again."""


def repeating() -> bool:
    """Whether this thread is making a call again."""
    return getattr(_REPEATING, "on", False)


class Argument:
    """A tensor that a call takes, weakly, and where it comes from in the graph.

    Attributes:
        requires_grad: Whether it does.
        source: Its node and the number of the output, if it has one.
    """

    __slots__ = ("_reference", "_version", "requires_grad", "source")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference, self._version = TensorWeakRef(tensor), tensor._version
        self.requires_grad = tensor.requires_grad
        self.source = None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)

    def tensor(self) -> torch.Tensor | None:
        """The tensor as it was, if it is still there.

        Raises:
            NotRecomputable: somebody has written to it.
        """
        found: torch.Tensor | None = self._reference()
        if found is not None and found._version != self._version:
            raise NotRecomputable("an argument of the call was changed in place")
        return found

    def is_in(self, storage: int) -> bool:
        """Whether that is its memory."""
        found: torch.Tensor | None = self._reference()
        return found is not None and found.untyped_storage()._cdata == storage


class Call:
    """A call of a module, from its beginning on.

    Args:
        module: What is called.
        name: Of the call.
        args: What it is given.
        kwargs: Likewise, by name.
        saved: How many tensors autograd had saved before.

    Attributes:
        arguments: The tensors that it is given.
        num_bytes: Of these.
        outcome: The value that the call has become, weakly, once something is to be picked from it.
    """

    def __init__(self, module: nn.Module, name: str, args: Any, kwargs: Any, saved: int) -> None:
        self.module, self.name, self.saved = module, name, saved
        self.outcome: Callable[[], Any] | None = None
        leaves, self._spec = tree_flatten((args, kwargs))
        parts = list(module.modules())
        self._obstacle = _obstacle(parts, leaves)
        if self._obstacle:
            leaves = []
        given = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}  # one may be given several times
        own = {key: Argument(tensor) for key, tensor in given.items()}
        self._given = [own.get(id(leaf), leaf) for leaf in leaves]
        self.arguments = list(own.values())
        self.num_bytes = sum(tensor.nbytes for tensor in given.values())
        self._home = next((tensor.device for tensor in (*module.parameters(), *given.values())), _HOST)
        self._autocast = _autocast_state(self._home)
        with _disable_current_modes():  # which would count it as a part of the step
            self._before = RandomStates([self._home])
        self._after: RandomStates | None = None
        self._training = [part.training for part in parts]
        self._parameters = [parameter._version for parameter in module.parameters()]
        self._attributes = [(part, _attributes_of(part)) for part in parts]

    def settle(self) -> None:
        """Forward is over: nothing more will be picked, and a call must not hold the graph that leads to it."""
        for argument in self.arguments:
            argument.source = None

    def left(self, output: Any) -> None:
        """It is over, with this result."""
        with _disable_current_modes():
            after = RandomStates([self._home])
            self._after = None if after == self._before else after
        changed = (f"it changes {what}" for part, old in self._attributes if (what := _difference(part, old)))
        self._obstacle = self._obstacle or next(changed, "")
        self._attributes = []
        for number, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and not self._was_given(leaf):
                marks: dict[Any, Any] = leaf.grad_fn.metadata  # type: ignore[assignment]
                marks.setdefault((_TAG, leaf.output_nr), (self, Key("returned", number)))

    def _was_given(self, tensor: torch.Tensor) -> bool:
        return any(argument.source == (tensor.grad_fn, tensor.output_nr) for argument in self.arguments)

    @property
    def obstacle(self) -> str:
        """Why it cannot be made again, as far as is known; empty if it can."""
        return self._obstacle or ("" if self.arguments else "it takes no tensor")

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """As it was when the call began; what the call changes is put back afterwards."""
        parts = list(self.module.modules())
        if [part.training for part in parts] != self._training:
            raise RuntimeError(f"train() or eval() was called on {self.name!r} between forward and backward.")
        if [parameter._version for parameter in self.module.parameters()] != self._parameters:
            raise RuntimeError(f"A parameter of {self.name!r} was changed in place between forward and backward.")
        was = repeating()
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, enabled, dtype in self._autocast:
                if torch.is_autocast_enabled(kind) != enabled or torch.get_autocast_dtype(kind) != dtype:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            stack.enter_context(_buffers_copied(parts))
            if self._after is not None:
                stack.enter_context(_GENERATORS)
                stack.enter_context(random_states_kept([self._home]))
                self._before.restore()
            _REPEATING.on = True
            try:
                yield
            finally:
                _REPEATING.on = was
            with _disable_current_modes():
                same = self._after is None or RandomStates([self._home]) == self._after
            if not same:
                raise RuntimeError(
                    f"{self.name!r} drew other random numbers when it was called again: another thread draws from the "
                    "same generator. Use execution='inline'."
                )

    def given_again(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """Its arguments, by position and by name, with these tensors."""
        anew = {
            argument: tensor.detach().requires_grad_(argument.requires_grad)
            for argument, tensor in zip(self.arguments, tensors, strict=True)
        }
        given = [anew[leaf] if isinstance(leaf, Argument) else leaf for leaf in self._given]
        args, kwargs = tree_unflatten(given, self._spec)
        return args, kwargs

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return self._after is not None


class Again:
    """Makes a call again, for what is wanted of it.

    Attributes:
        call: Which.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self._wanted: dict[Key, tuple[torch.Size, torch.dtype]] = {}

    def want(self, key: Key, size: torch.Size, dtype: torch.dtype) -> None:
        """Somebody will pick this tensor."""
        self._wanted[key] = size, dtype

    def forgo(self, key: Key) -> None:
        """Nobody will."""
        del self._wanted[key]

    def __call__(self, *tensors: torch.Tensor) -> Outcome:
        """The outcome, for these arguments.

        Raises:
            RuntimeError: the call does something else this time, or nobody could make it again from the start.
        """
        call, outcome, number = self.call, Outcome(), 0
        if call.obstacle:
            raise RuntimeError(f"{call.name!r} cannot be called again: {call.obstacle}.")

        def catch(tensor: torch.Tensor) -> None:
            nonlocal number
            self._take(outcome, Key("saved", number), base_of(tensor))
            number += 1
            if len(outcome.given) == len(self._wanted) and not call.draws:
                raise _EnoughError  # whether it draws the same numbers shows at its end only

        try:
            with call.surroundings(), torch.autograd.graph.saved_tensors_hooks(catch, _unasked):
                args, kwargs = call.given_again(tensors)
                for number_returned, leaf in enumerate(tree_leaves(call.module(*args, **kwargs))):
                    if isinstance(leaf, torch.Tensor):
                        self._take(outcome, Key("returned", number_returned), leaf)
        except _EnoughError:
            pass
        if missing := self._wanted.keys() - outcome.given.keys():
            raise RuntimeError(f"{call.name!r} did not give {_described(min(missing))} when it was called again.")
        return outcome

    def _take(self, outcome: Outcome, key: Key, tensor: torch.Tensor) -> None:
        expected = self._wanted.get(key)
        if expected is None:
            return
        if expected != (tensor.size(), tensor.dtype):
            raise RuntimeError(
                f"{self.call.name!r} gave {_described(key)} of {list(tensor.size())} in {tensor.dtype} when it was "
                f"called again, instead of {list(expected[0])} in {expected[1]}."
            )
        outcome.given[key] = tensor.detach()


class _EnoughError(BaseException):
    """All that is wanted has been caught; passes through whatever the module catches itself."""


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that has the memory of ``tensor``, and its numbers."""
    base = tensor._base
    return tensor if base is None or base.dtype != tensor.dtype else base  # a complex number is no view of its parts


def returned_by(node: Any, output: int) -> tuple[Call, Key] | None:
    """The call that has returned what flows from there, if one was noted."""
    found: tuple[Call, Key] | None = node.metadata.get((_TAG, output))
    return found


def _unasked(_packed: Any) -> NoReturn:
    raise RuntimeError("no backward runs through a call that was made again")


def _described(key: Key) -> str:
    return f"its {key.kind} tensor {key.number}"


def _obstacle(parts: Collection[nn.Module], leaves: Collection[Any]) -> str:
    """Why nobody can make such a call again; empty if somebody can."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in _TENSORS or leaf.layout is not torch.strided or leaf.is_inference():
                return f"it takes a {type(leaf).__name__} with layout {leaf.layout}, of inference mode or a subclass"
        elif not isinstance(leaf, (*_PLAIN, Enum)):
            return f"it takes a {type(leaf).__name__}, which may change"
    for part in parts:
        if isinstance(part, nn.SyncBatchNorm):
            return "a SyncBatchNorm in it meets the other replicas"
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            if not isinstance(getattr(hook, "__self__", hook), Passive):
                return f"a {type(part).__name__} in it has forward hooks"
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return "there are hooks on all modules"
    modes = [mode for mode in _function_modes() if not isinstance(mode, Operands)]  # type: ignore[no-untyped-call]
    return f"it runs under a {type(modes[-1]).__name__}" if modes else ""


def _autocast_state(device: torch.device) -> list[tuple[str, bool, torch.dtype]]:
    kinds = dict.fromkeys(["cpu", device.type])
    kinds.pop("meta", None)
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


@contextmanager
def _buffers_copied(parts: Collection[nn.Module]) -> Iterator[None]:
    """Other tensors with the same numbers stand in for the buffers, which backward may need as they are.

    For all of them: a batch norm writes into its statistics without counting up their version.
    """
    own = [(part, dict(part._buffers)) for part in parts if part._buffers]
    try:
        for part, buffers in own:
            part._buffers.update({key: None if b is None else b.detach().clone() for key, b in buffers.items()})
        yield
    finally:
        for part, buffers in own:
            part._buffers.clear()
            part._buffers.update(buffers)


def _attributes_of(part: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Those that are its own, with what is in plain containers."""
    return {key: (value, _content(value)) for key, value in vars(part).items() if key not in _OF_EVERY_MODULE}


def _content(value: Any) -> list[Any]:
    if type(value) in (dict, OrderedDict):
        return [*value.keys(), *value.values()]
    return list(value) if type(value) in (list, set, deque) else []


def _difference(part: nn.Module, before: dict[str, tuple[Any, Any]]) -> str:
    """An attribute that is not as before; empty if all are."""
    after = _attributes_of(part)
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if old is None or new is None or not _alike([old[0], *old[1]], [new[0], *new[1]]):
            return f"{type(part).__name__}.{key}"
    return ""


def _alike(old: list[Any], new: list[Any]) -> bool:
    return len(old) == len(new) and all(
        a is b or (type(a) is type(b) and isinstance(a, _NUMBERS) and a == b) for a, b in zip(old, new, strict=True)
    )
