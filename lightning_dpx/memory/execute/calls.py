"""Calls of modules that are made again, for values that no recipe makes: what a recurrent layer or a function of the
user's own saves, and the random numbers of a dropout.

A call is noted when it begins: its arguments by weak references, the state of the random generators and of autocast. If
a value is to be dropped that autograd saves within the call and that nothing in the graph can make, the call becomes a
value itself, an :class:`ReplayOutputs`, from which those that it saves or returns are picked. To have it the module is
called once more, as ``torch.utils.checkpoint`` calls it, with hooks that catch what autograd saves, number by number.

    forward    enter -> Call      notes its arguments, weakly        leave -> marks what it returns
    backward   Replay(arguments) -> ReplayOutputs -> select_output(outcome, key)   nothing else remains

[Note: what cannot be made again] A call that anybody could tell from the first one is refused: it changes parameters,
buffers (but for the statistics of norms, of which the second call gets copies) or its arguments, or anything that its
attributes, classes and globals lead to (see :mod:`lightning_dpx.python_objects.object_state`); they lead to something
whose state cannot be seen, such as an iterator; it has hooks of others, takes objects that may have changed, runs under
a function mode, or talks to other processes. Random numbers, wherever they are drawn, and what the attributes lead
to are as they were when the call began, and are put back. The profile makes every call once more before a
plan relies on it, and compares all numbers.
"""

import copy
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from itertools import chain, islice
from operator import is_
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from lightning_dpx.memory.execute.call_draws import CallDraws, unseen
from lightning_dpx.memory.execute.compiled_calls import code_of, uncompiled_of
from lightning_dpx.memory.execute.flat_units import holds_views, is_flat_unit
from lightning_dpx.memory.execute.recipes import NotRecomputable
from lightning_dpx.memory.execute.transforms import is_transformed
from lightning_dpx.memory.execute.untracked_inputs import UntrackedInputs
from lightning_dpx.python_objects.object_graph import CopiedEmpty
from lightning_dpx.python_objects.object_state import ObjectState
from lightning_dpx.python_objects.process_generators import GeneratorWatch
from lightning_dpx.torch_compat import (
    AnyBatchNorm,
    AnyInstanceNorm,
    FakeTensor,
    buffers_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    function_modes,
    has_any_global_hook,
    key_of,
    parameters_of,
    submodules_of,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    version_counter,
    view_base,
)

_TAG = "lightning_dpx.calls"
_TENSORS = (torch.Tensor, nn.Parameter, FakeTensor)  # steps are profiled on fakes, too
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_PLAIN = (*_NUMBERS, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_LEAVES = (torch.Tensor, bool, int, float, type(None))
_NORMS = (AnyBatchNorm.forward, AnyInstanceNorm.forward)
_SMALL_BUFFER = 4096  # bytes; of larger ones no copy is made at every call, which no plan counts
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


class Passive(CopiedEmpty):
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

    __slots__ = ("_counter", "_held", "_reference", "_version", "requires_grad", "source")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._held: torch.Tensor | None = None
        self._reference = TensorWeakRef(tensor)
        self._version = version_counter(tensor)
        self._counter: torch.Tensor | None = None
        self.requires_grad: bool = tensor.requires_grad
        self.source = None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)

    def tensor(self) -> torch.Tensor | None:
        """The tensor as it was, if it is still there.

        Raises:
            NotRecomputable: it was written to.
        """
        tensor: torch.Tensor | None = self._reference()
        counter = self._counter if tensor is None else tensor
        if counter is not None and version_counter(counter) != self._version:
            raise NotRecomputable("an argument of the call was changed in place")
        return tensor

    def apart(self) -> "Argument":
        """A copy of this argument without the graph that leads to it."""
        duplicate = copy.copy(self)
        duplicate.settle()
        return duplicate

    def hold(self) -> None:
        """Keeps it until the forward is over, for a value that is made from it and is saved only later."""
        self._held = self._reference()

    def settle(self) -> None:
        """Forward is over; the graph that leads to it must not be held any longer."""
        self.source = self._held = None

    def watch(self, tensor: torch.Tensor) -> None:
        """Keeps count of what is written to it, also through others once it is gone itself; not its memory."""
        # A detached tensor shares the count of writes, also after its data were exchanged.
        if type(tensor) is not FakeTensor:
            self._counter = tensor.detach()
            self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def is_in(self, storage: int) -> bool:
        """Whether that is its memory."""
        tensor: torch.Tensor | None = self._reference()
        return tensor is not None and key_of(tensor.untyped_storage()) == storage


class Call:
    """A call of a module, from its beginning on.

    Args:
        module: What is called.
        name: Of the call.
        args: What it is given.
        kwargs: Likewise, by name.
        saved: How many tensors autograd had saved before.
        states: What was found behind the attributes of modules in earlier calls, by module.

    Attributes:
        arguments: The tensors that it is given.
        num_bytes: Of these.
        outcome: The value that the call has become, weakly, once something is to be picked from it.
        is_counted: Whether all that autograd has saved since it began was counted.
        draws: The random numbers that it draws.
    """

    def __init__(
        self, module: nn.Module, name: str, args: Any, kwargs: Any, saved: int, states: "States | None" = None
    ) -> None:
        self.module = module
        self.name = name
        self.saved = saved
        self.is_counted = True
        self.outcome: Callable[[], Any] | None = None
        leaves, self._spec = _flattened(args, kwargs)
        self._states = States() if states is None else states
        self._obstacle = _obstacle(leaves)
        self._held = list[Any]()
        if self._obstacle:  # what attributes hold would be held for nothing, and walked
            self._anatomy = Anatomy(uncompiled_of(module), looks=False)
            leaves = []
        else:
            self._anatomy, self._held = self._states.of(uncompiled_of(module))
            self._obstacle = self._anatomy.obstacle
        if self._obstacle:
            leaves = []
            self._held = []
        given = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}  # one may be given several times
        arguments = {key: Argument(tensor) for key, tensor in given.items()}
        self._given = [arguments.get(id(leaf), leaf) for leaf in leaves]
        self.arguments: list[Argument] = list(arguments.values())
        self.num_bytes: int = sum(tensor.nbytes for tensor in given.values())
        # Autocast and random numbers are those of the device that the call runs on.
        home = next((tensor.device for tensor in (*self._anatomy.parameters, *given.values())), _HOST)
        self._autocast = _autocast_state(home)
        self.draws: CallDraws = CallDraws(home, self._states.generators)
        self._is_over = False
        self._training, self._parameters = self._anatomy.training(), self._anatomy.versions()
        self._buffers: list[_Buffer] = []
        if not self._obstacle and any(buffers_of(part) for part in self._anatomy.parts):
            # Copies of buffers are no part of the step, for those who watch its operators.
            with unseen(), torch.no_grad():
                self._buffers = _buffers_of(self._anatomy.parts)

    def settle(self) -> None:
        """Forward is over: nothing more will be picked, and a call must not hold the graph that leads to it."""
        for argument in self.arguments:
            argument.settle()

    def apart(self) -> "Call":
        """A copy of this call without its graph, to be kept for longer than that."""
        duplicate = copy.copy(self)
        arguments = {id(argument): argument.apart() for argument in self.arguments}
        duplicate.draws = copy.copy(self.draws)
        duplicate.arguments = list(arguments.values())
        duplicate._given = [arguments.get(id(leaf), leaf) for leaf in self._given]
        return duplicate

    def left(self, output: Any) -> None:
        """Ends the call, with this result; what it returned is marked in the graph."""
        self.draws.end()
        self._is_over = True
        if not self._obstacle and (changed := self._changed()):
            self._obstacle = f"it changes {changed}"
        # A call that is never made again holds nothing of its module either.
        if self._obstacle:
            self._states.forget(uncompiled_of(self.module))
            self._buffers = []
            self._held = []
            self._anatomy = Anatomy(uncompiled_of(self.module), looks=False)
        for number, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and not self._was_given(leaf):
                # An inner call that returned the tensor has left its mark first, and keeps it: to
                # make that one again runs less than to make this one.
                marks: dict[Any, Any] = leaf.grad_fn.metadata  # type: ignore[assignment]
                marks.setdefault((_TAG, leaf.output_nr), (self, OutputKey("returned", number)))

    def _changed(self) -> str:
        """Something that is not as it was when the call began; empty if all is."""
        if not self._anatomy.is_same():
            return f"what {type(self.module).__name__} consists of"
        if self._anatomy.versions() != self._parameters:
            return f"a parameter of {type(self.module).__name__}"
        # Norms may write their statistics. The second call gets copies, so they are written once.
        for buffer in self._buffers:
            if not buffer.is_there() or (buffer.is_changed() and not _is_norm(buffer.part)):
                return f"{type(buffer.part).__name__}.{buffer.key}"
        return self._anatomy.state.difference(self._held, self._anatomy.state.marks())

    def _was_given(self, tensor: torch.Tensor) -> bool:
        """Whether the call only hands on what it was given, and has not made it."""
        return any(argument.source == (tensor.grad_fn, tensor.output_nr) for argument in self.arguments)

    @property
    def obstacle(self) -> str:
        """Why it cannot be made again, as far as is known; empty if it can."""
        return self._obstacle or ("" if self.arguments else "it takes no tensor")

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """As it was when the call began; what the call changes is put back afterwards."""
        if self._anatomy.versions() != self._parameters:
            raise RuntimeError(f"A parameter of {self.name!r} was changed in place between forward and backward.")
        if not self._is_over:
            raise RuntimeError(
                f"{self.name!r} runs a backward of its own, and cannot be called again before it is over."
            )
        was = repeating()
        # Backward runs without gradients, and without them autograd would save nothing to catch.
        with ExitStack() as stack, torch.enable_grad():
            for kind, enabled, dtype in self._autocast:
                if torch.is_autocast_enabled(kind) != enabled or torch.get_autocast_dtype(kind) != dtype:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            stack.enter_context(self._anatomy.as_it_was(self._training))
            if any(buffers_of(part) for part in self._anatomy.parts):
                stack.enter_context(self._buffers_of_then())
            stack.enter_context(self.draws.repeated())
            now = self._put_attributes_back()
            _REPEATING.on = True
            try:
                yield
            finally:
                _REPEATING.on = was
                self._anatomy.state.put_back(now)
            self.draws.check_end(self.name)

    def _put_attributes_back(self) -> list[Any]:
        """The caller of the module may have set others since, or written to what they hold; what they held now."""
        state = self._anatomy.state
        now = state.marks()
        if left := state.put_back(self._held, now):
            state.put_back(now)  # some of it may be back already
            raise RuntimeError(f"{left} of {self.name!r} was changed between forward and backward.")
        return now

    @contextmanager
    def _buffers_of_then(self) -> Iterator[None]:
        """Other tensors with the same numbers stand in for the buffers, which backward may need as they are."""
        # Of large buffers there are no copies: these must be as they were.
        for buffer in self._buffers:
            if buffer.copy is None and not _is_norm(buffer.part) and (not buffer.is_there() or buffer.is_changed()):
                raise RuntimeError(
                    f"Buffer {buffer.key!r} of a {type(buffer.part).__name__} in {self.name!r} was changed between "
                    "forward and backward."
                )
        parts = self._anatomy.parts
        before = [(part, dict(buffers_of(part))) for part in parts if buffers_of(part)]
        try:
            for part, buffers in before:
                for key, tensor in buffers.items():
                    if tensor is not None:
                        buffers_of(part)[key] = tensor.detach().clone()
            for buffer in self._buffers:
                if buffer.copy is not None:
                    buffers_of(buffer.part)[buffer.key] = buffer.copy.clone()
            yield
        finally:
            for part, buffers in before:
                buffers_of(part).clear()  # the call may have registered more of them
                buffers_of(part).update(buffers)

    def given_again(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """Its arguments, by position and by name, with these tensors."""
        # Leaves this time, for the graph of the second call ends with it; that need gradients as
        # they did, for autograd decides by that what it saves.
        anew = {
            argument: tensor.detach().requires_grad_(argument.requires_grad)
            for argument, tensor in zip(self.arguments, tensors, strict=True)
        }
        given = [anew[leaf] if isinstance(leaf, Argument) else leaf for leaf in self._given]
        if isinstance(self._spec, tuple):
            count, names = self._spec
            return given[:count], dict(zip(names, given[count:], strict=True))
        args, kwargs = tree_unflatten(given, self._spec)
        return args, kwargs


class Replay:
    """Makes a call again, for what is wanted of it.

    Attributes:
        call: Which.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self._wanted: dict[OutputKey, tuple[torch.Size, torch.dtype]] = {}
        self._tell: Callable[[OutputKey, torch.Tensor], None] | None = None

    def want(self, key: OutputKey, size: torch.Size, dtype: torch.dtype) -> None:
        """This tensor will be selected from the call's outputs."""
        self._wanted[key] = size, dtype

    def forgo(self, key: OutputKey) -> None:
        """This tensor will not be selected after all."""
        del self._wanted[key]

    @contextmanager
    def told(self, tell: Callable[[OutputKey, torch.Tensor], None]) -> Iterator[None]:
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

        with call.surroundings(), torch.autograd.graph.saved_tensors_hooks(catch, _never_unpacked):
            args, kwargs = call.given_again(tensors)
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
    base = view_base(tensor)
    return tensor if base is None or base.dtype != tensor.dtype else base  # a complex number is no view of its parts


def returned_by(node: Any, output: int) -> tuple[Call, OutputKey] | None:
    """The call that has returned what flows from there, if one was noted."""
    found: tuple[Call, OutputKey] | None = node.metadata.get((_TAG, output))
    return found


def _never_unpacked(_packed: Any) -> NoReturn:
    raise RuntimeError("no backward runs through a call that was made again")


def _described(key: OutputKey) -> str:
    return f"its {key.kind} tensor {key.number}"


def _obstacle(leaves: Collection[Any]) -> str:
    """Why a call that takes this cannot be made again; empty if it can."""
    # Writes to an argument have to be noticed and its memory has to be known: inference tensors
    # count no writes, and sparse tensors and subclasses need not have one storage.
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in _TENSORS or leaf.layout is not torch.strided or leaf.is_inference():
                return f"it takes a {type(leaf).__name__} with layout {leaf.layout}, of inference mode or a subclass"
            if is_transformed(leaf):
                return "it runs inside a transform of torch.func"
        elif not isinstance(leaf, (*_PLAIN, Enum)):
            return f"it takes a {type(leaf).__name__}, which may change"
    # Hooks on all modules would be told of the second call as of one more.
    if has_any_global_hook():  # type: ignore[no-untyped-call]
        return "there are hooks on all modules"
    # In backward the step's modes are off. Ours, which only notes operands, may be missing then.
    modes = [mode for mode in function_modes() if not isinstance(mode, UntrackedInputs)]  # type: ignore[no-untyped-call]
    return f"it runs under a {type(modes[-1]).__name__}" if modes else ""


def _obstacle_in(parts: Collection[nn.Module]) -> str:
    """Why calls of these modules cannot be made again; empty if they can."""
    for number, part in enumerate(parts):
        if isinstance(part, nn.SyncBatchNorm):
            return "a SyncBatchNorm in it meets the other replicas"
        if number and is_flat_unit(part):
            return "a unit of FullyShardedDataParallel in it meets the other processes"
        # functional_call puts tensors in their place that the step has computed: a call would hold
        # these, and is not counted for that.
        if not holds_views(part) and not all(map(_is_parameter, parameters_of(part).values())):
            return f"a {type(part).__name__} in it has other tensors in the place of its parameters"
        for hook in (*forward_pre_hooks_of(part).values(), *forward_hooks_of(part).values()):
            if number == 0 and is_sharding_hook(hook):
                continue  # its own parameters are there in its backward, and it is called without hooks
            # A hook is an object of ours or one of its methods.
            if not isinstance(getattr(hook, "__self__", hook), Passive):
                return f"a {type(part).__name__} in it has forward hooks"
    return ""


def _is_parameter(entry: torch.Tensor | None) -> bool:
    """Whether it is what a module has under the name of a parameter unless others put something else there."""
    return entry is None or isinstance(entry, nn.Parameter)


def is_sharding_hook(hook: Any) -> bool:
    """Whether ``fully_shard`` has registered it, to gather parameters before a forward and free them afterwards."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def _flattened(args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """The arguments one by one, and how they were put together: most calls take no lists."""
    # ``tree_flatten`` walks containers in Python, at every call.
    leaves = [*args, *kwargs.values()]
    if all(isinstance(leaf, _LEAVES) for leaf in leaves):
        return leaves, (len(args), tuple(kwargs))
    return tree_flatten((args, kwargs))


def _autocast_state(device: torch.device) -> list[tuple[str, bool, torch.dtype]]:
    """Device type, whether autocast is on for it, and its dtype: of the host and of ``device``."""
    kinds = dict.fromkeys(["cpu", device.type])
    kinds.pop("meta", None)  # torch raises an error when it is asked about autocast there
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


class _Buffer(NamedTuple):
    """A buffer when a call began.

    Attributes:
        part: Whose it is.
        key: Its name there.
        tensor: Itself.
        version: Of the tensor.
        copy: Its numbers, where it is small: a batch norm writes into its statistics without a new version.
    """

    part: nn.Module
    key: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None

    def is_there(self) -> bool:
        """Whether the module has no other one by now."""
        return buffers_of(self.part).get(self.key) is self.tensor

    def is_changed(self) -> bool:
        """Whether it was written to."""
        return version_counter(self.tensor) != self.version


def _buffers_of(parts: Collection[nn.Module]) -> list[_Buffer]:
    buffers = list[_Buffer]()
    for part in parts:
        for key, tensor in buffers_of(part).items():
            if tensor is not None:
                # The second call of a norm in training may read any statistics: it uses none.
                small = tensor.nbytes <= _SMALL_BUFFER and not (_is_norm(part) and part.training)
                copy = tensor.detach().clone() if small else None
                buffers.append(_Buffer(part, key, tensor, version_counter(tensor), copy))
    return buffers


def _is_norm(part: nn.Module) -> bool:
    """Whether it is one of torch's, which in training writes its statistics and does not read them."""
    # Neither a subclass nor an instance may have a forward of its own, which may do anything.
    return type(part).forward in _NORMS and "forward" not in vars(part)


class Anatomy:
    """What a module consists of, found once and again where something in it was replaced.

    Args:
        module: Which.
        looks: Whether to look at what its attributes lead to.

    Attributes:
        parts: The module and those in it.
        parameters: Of all of them.
        state: What the objects behind their attributes hold.
        obstacle: Why no call of it can be made again, whatever it is given; empty if one can.
    """

    def __init__(self, module: nn.Module, *, looks: bool = True) -> None:
        # What is found is held: of a call that is never made again, nothing.
        self.parts: list[nn.Module] = list(module.modules()) if looks else []
        self.parameters: list[torch.Tensor] = []
        self.obstacle: str = _obstacle_in(self.parts)
        # The walk over objects is long.
        walked = [] if self.obstacle else self.parts
        self.state: ObjectState = ObjectState(walked)
        self.obstacle = self.obstacle or self.state.obstacle
        inside = list[dict[Any, Any]]()
        hooks = list[dict[Any, Any]]()
        for part in self.parts:
            inside.append(submodules_of(part))
            # Views of a flat parameter are other tensors in forward, in backward and in between.
            if not holds_views(part):
                inside.append(parameters_of(part))
                for parameter in parameters_of(part).values():
                    if parameter is not None:
                        self.parameters.append(parameter)
            hooks += (forward_pre_hooks_of(part), forward_hooks_of(part))
        self._inside = _Watched(inside)
        self._hooks = _Watched(hooks)

    def is_same(self) -> bool:
        """Whether it consists of the same still."""
        return self._inside.is_same()

    def has_same_hooks(self) -> bool:
        """Whether no hooks came since, or went."""
        return self._hooks.is_same()

    def versions(self) -> list[int]:
        """The versions of the parameters."""
        return [version_counter(parameter) for parameter in self.parameters]

    def training(self) -> list[bool]:
        """Whether each part is in training."""
        return [part.training for part in self.parts]

    @contextmanager
    def as_it_was(self, training: list[bool]) -> Iterator[None]:
        """It consists of the same in here, each part in ``training`` or not; afterwards all is as it was before.

        Parts may be others by the time of backward: ``functional_call`` puts its parameters in for one forward only.
        """
        now = self.training()
        if now == training and self.is_same():
            yield
            return
        with self._inside.put_back():
            _set_training(self.parts, training)
            try:
                yield
            finally:
                _set_training(self.parts, now)


def _set_training(parts: Sequence[nn.Module], training: Sequence[bool]) -> None:
    for part, trains in zip(parts, training, strict=True):
        part.training = trains


class _Watched:
    """What some dicts held when they were first looked at."""

    def __init__(self, dicts: list[dict[Any, Any]]) -> None:
        self._dicts = dicts
        self._found = self._held()
        self._keys = list(map(tuple, dicts))

    def _held(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._dicts)))

    def is_same(self) -> bool:
        # Every call asks, for all its parts: ``map`` compares them without a loop in Python.
        held = self._held()
        return len(held) == len(self._found) and all(map(is_, held, self._found))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """The dicts hold in here what they held then."""
        now = [dict(each) for each in self._dicts]
        found = iter(self._found)
        try:
            for each, keys in zip(self._dicts, self._keys, strict=True):
                each.clear()
                each.update(zip(keys, islice(found, len(keys)), strict=True))
            yield
        finally:
            for each, before in zip(self._dicts, now, strict=True):
                each.clear()
                each.update(before)


class States:
    """What modules consist of, and what the objects behind their attributes hold, of those that calls were noted of."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[nn.Module, Anatomy, list[Any]]] = {}
        self.generators: GeneratorWatch = GeneratorWatch()

    def of(self, module: nn.Module) -> tuple[Anatomy, list[Any]]:
        """What was found for ``module``, and what that holds now."""
        # The entry holds the module, so no other one gets its id.
        known = self._known.get(id(module))
        if known is not None and known[1].is_same() and known[1].has_same_hooks():
            _, anatomy, before = known
            now = anatomy.state.marks()
            if not anatomy.state.difference(before, now):
                return anatomy, now
        # Another object may lead to other objects: those are looked for anew.
        anatomy = Anatomy(module)
        now = anatomy.state.marks()
        if not anatomy.obstacle:
            self._known[id(module)] = module, anatomy, now
        return anatomy, now

    def forget(self, module: nn.Module) -> None:
        """Forgets what was found for ``module``."""
        self._known.pop(id(module), None)
