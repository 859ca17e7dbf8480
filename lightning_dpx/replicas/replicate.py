"""Makes replicas: copies of a module that share with it whatever neither is nor holds a tensor or a submodule.

    module --walk--> what leads to tensors or modules --copy only that--> replica
                     everything else -----------------same objects------> replica

So plain Python state exists once: what a hook changes, every replica sees. Parameters and buffers keep their structure
(tied weights, parameter lists, flattened RNN weights, parametrizations). Replicas on one physical device share the
storage of their parameters (no copy, no broadcast); each has gradients and buffers of its own. Functions whose closure
captures the module, and weak references to it, lead to the replica's own module in the copy.
"""

import copy
import copyreg
import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, filterfalse
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset

from lightning_dpx.devices import canonical_device, device_beside
from lightning_dpx.errors import ReplicationError, describe_error
from lightning_dpx.python_objects.module_hooks import is_ours
from lightning_dpx.python_objects.object_graph import (
    ATOMS,
    CopiedEmpty,
    ObjectGraph,
    children_of_object,
    is_module_or_parameter,
    is_tensor_or_module,
)
from lightning_dpx.python_objects.own_attributes import is_made_from_state
from lightning_dpx.replicas.array_slices import copied_to
from lightning_dpx.replicas.hidden_tensors import HiddenTensors
from lightning_dpx.replicas.remote_tensor import RemoteTensor, source_of
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.shared_iterators import IteratorProxy
from lightning_dpx.torch_compat import (
    COMPILER_TYPES,
    OptimizedModule,
    compiled_call_of,
    is_traceable_wrapper_subclass,
    submodules_of,
)

# One object serves all replicas, whatever it holds: data, what acts on the parameters once a step, and what compiles:
# code that was compiled for one replica is found by the others only where it is the same object.
_SHARED_TYPES: tuple[type, ...] = (
    Dataset,
    DataLoader,
    Optimizer,
    LRScheduler,
    IteratorProxy,
    # A profiler's hooks keep the last range of each module, which torch cannot copy, and make one anew for every call.
    record_function,
    *COMPILER_TYPES,
)
# Python refuses to copy them, and what they guard is one object for all replicas.
_LOCKS: tuple[type, ...] = (type(threading.Lock()), type(threading.RLock()))
_STRUCTURE = ("_parameters", "_buffers", "_modules")
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
Memo = dict[int, Any]


def replicate(  # noqa: PLR0913  what belongs together is a ReplicaSet, which calls it
    module: nn.Module,
    devices: Sequence[torch.device],
    keep: Iterable[object] = (),
    existing: Sequence[Mapping[str, nn.Parameter]] = (),
    private: tuple[type, ...] = (),
    shared: Sequence[nn.Module] = (),
    micro_batches: Sequence[int] = (),
) -> tuple[Replica, ...]:
    """K replicas; the first is ``module`` itself, which must already live on ``devices[0]``.

    Args:
        module: The module to copy.
        devices: K devices, repeated ones allowed.
        keep: Objects that all replicas share by reference, whatever they hold.
        existing: Per replica, parameters by name that it takes instead of copies.
        private: Types of submodules of which nothing is shared, because their state is brought together elsewhere.
        shared: Submodules that all replicas share, and that stay where they are.
        micro_batches: Per device, how many replicas it has, which share the parameters of the first of them; one
            unless given.

    Raises:
        ReplicationError: something that holds the module or a part of it cannot be copied; names the attribute.
    """
    numbers = micro_batches or (1,) * len(devices)
    # A module that is its only replica is not copied, so it may be lazy or anything else.
    if sum(numbers) > 1:
        check_materialized(module)
        _check_not_parallel(module)
    kept = [*keep, *shared]
    root = canonical_device(devices[0])
    replicas: list[Replica] = []
    for place, device in enumerate(devices):
        target = canonical_device(device)
        given = existing[place] if existing else {}
        for turn in range(numbers[place]):
            if not replicas:
                replicas.append(Replica(0, root, module))
                continue
            # Micro-batches accumulate gradients in the parameters of their device's first replica.
            if turn:
                given = dict(replicas[-1].module.named_parameters())
            # On the first device they share the memory of the originals.
            values_on = None if target == root else target
            parameters = _own_parameters(module, values_on, given)
            with _staying(shared):
                copying = ModuleCopy(module, target, kept, parameters, private, given.values())
                copied = copying.make()
            _check_same_parameters(module, copied)
            replicas.append(Replica(len(replicas), target, copied, HiddenTensors(copying.hidden)))
    return tuple(replicas)


def _check_same_parameters(module: nn.Module, copied: nn.Module) -> None:
    """A class that lists its parameters itself, or shares them between its parts, may not do so in a copy.

    Raises:
        ReplicationError: the copy has others.
    """
    mine = {name for name, _ in module.named_parameters()}
    theirs = {name for name, _ in copied.named_parameters()}
    # A class may leave some out of ``parameters()``, as long as its copy leaves out the same.
    if mine == theirs and len(list(copied.parameters())) == len(list(module.parameters())):
        return
    others = ", ".join(sorted(mine ^ theirs)[:3]) or "another number of them"
    raise ReplicationError(
        f"The module cannot be copied: its copy has other parameters ({others}). copy.deepcopy and named_parameters() "
        "have to agree on it."
    )


@contextmanager
def _staying(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Moving a module that holds one of ``modules`` leaves that one where it is."""
    for module in modules:
        # Module.to() goes down by calling each child's _apply, and finds this one on the instance.
        vars(module)["_apply"] = functools.partial(_stay, module)
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["_apply"]


def _stay(module: nn.Module, *_args: Any, **_kwargs: Any) -> nn.Module:
    return module


def make_shadow_module(replica: Replica, keep: Iterable[object] = ()) -> nn.Module:
    """A shadow of a replica: it shares the parameters, and has a deep copy of all other state.

    For runs that must leave no trace. Every tensor stays on its device, also where parts of the replica are shifted
    to another one.

    Raises:
        ReplicationError: something cannot be copied; names the attribute.
    """
    module = replica.module
    return ModuleCopy(module, None, list(keep), _own_parameters(module, None, {}), (nn.Module,)).make()


def _own_parameters(
    module: nn.Module, device: torch.device | None, existing: Mapping[str, nn.Parameter]
) -> dict[int, nn.Parameter]:
    """The copy's parameters, by the originals' ids; with their storage if ``device`` is ``None``."""
    found: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        if name in existing:
            found[id(parameter)] = existing[name]
            continue
        data = parameter.detach() if device is None else _copied(parameter, device)
        found[id(parameter)] = like_parameter(parameter, data)
    return found


class ModuleCopy:
    """One copy of ``module``.

    Args:
        module: What is copied.
        device: Where the copy's tensors live; ``None`` leaves every tensor on its device.
        keep: Objects that the copy holds by reference.
        parameters: The copy's parameters, by the id of the original.
        private: Types of submodules whose state is copied whole, and not only what leads to tensors and modules.
        staying: Those of the copy's parameters that stay where they are.

    Attributes:
        hidden: Pairs of tensors in containers, objects and what modules those hold: the original's, and the copy's.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | None,
        keep: Sequence[object],
        parameters: Mapping[int, nn.Parameter],
        private: tuple[type, ...] = (),
        staying: Iterable[nn.Parameter] = (),
    ) -> None:
        self._module = module
        self._device = device
        # The device of the original, which tells what the user has put on the host on purpose.
        self._home = next((tensor.device for tensor in chain(module.parameters(), module.buffers())), None)
        self._private = private
        self._staying = {id(parameter) for parameter in staying}
        self._kept: Memo = {id(kept): kept for kept in keep}
        self._tensors: Memo = dict(parameters)
        self.hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        for child in modules_without(module, self._kept):
            for buffer in child.buffers(recurse=False):
                self._tensors[id(buffer)] = _copied(buffer, device)

    def make(self) -> nn.Module:
        """The copy.

        Raises:
            ReplicationError: something that must be copied cannot be; names the attribute.
        """
        # Each round finds one more object that cannot be copied, which a copy tells by failing only; in the next round
        # all replicas share it, unless it leads to the module.
        while True:
            try:
                return self._attempt()
            except Exception as error:
                path, value = self._uncopyable()
                # A shadow must leave no trace, so it shares nothing that it cannot copy. What leads
                # to the module would lead every replica to the user's own.
                if nn.Module in self._private or id(value) in self._kept or self._holds_module(value):
                    where = "" if self._device is None else f" to {self._device}"
                    text = f"The module cannot be copied{where}: {_blamed(path, value is self._module, error)}"
                    raise ReplicationError(text) from error
                self._kept[id(value)] = value  # a file, an iterator, a C handle: there is one of it

    def _attempt(self) -> nn.Module:
        self.hidden = []
        # A new one in every round: what a failed attempt has made in its memo is half-finished.
        memo = {**self._kept, **self._tensors}
        shared: list[Any] = []
        private: list[Any] = []
        for child in modules_without(self._module, self._kept):
            # What is no shell is copied by its own __deepcopy__ or constructor, which knows of no
            # sharing.
            is_private = isinstance(child, self._private) or not _can_be_a_shell(child)
            (private if is_private else shared).extend(_attribute_values(child))
        # Those of subclasses were copied together with them.
        attributed = [parameter for parameter in self._module.parameters() if _has_attributes(parameter)]
        for parameter in attributed:
            (private if nn.Module in self._private else shared).extend(vars(parameter).values())
        placed = prepare_memo(
            memo, shared, private, place=self._placed, is_boundary=self._is_boundary, module=self._module
        )
        self.hidden = [(tensor, memo[id(tensor)]) for tensor in placed]
        made: nn.Module = copy.deepcopy(self._module, memo)
        for parameter in attributed:
            copied = memo.get(id(parameter))
            # Given ones are another replica's, which has seen to theirs.
            if copied is not None and copied is not parameter and id(copied) not in self._staying:
                vars(copied).update(copy.deepcopy(vars(parameter), memo))
        if self._device is not None:
            given = [(parameter, parameter.data) for parameter in made.parameters() if id(parameter) in self._staying]
            # Given parameters may lie elsewhere, as those of a shifted part do, and stay there:
            # to() finds them empty, and gives them no other memory than that.
            for parameter, _ in given:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)
            made.to(self._device)  # states of metrics, and the device that a LightningModule remembers
            for parameter, values in given:
                parameter.data = values
        return made

    def _is_boundary(self, value: Any) -> bool:
        return is_shared(value, self._kept)

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        device = self._device
        if device is not None and self._home is not None:
            device = device_beside(tensor, self._home, device)
        copied = _copied(tensor, device)
        if isinstance(tensor, nn.Parameter):
            return like_parameter(tensor, copied)
        return copied

    def _uncopyable(self) -> tuple[str, Any]:
        """The path and value of the first attribute that cannot be copied; the module itself if each alone can."""
        # By reference, so that an attribute that leads to the module fails for what it is itself.
        modules = {id(child): child for child in self._module.modules()}
        for path, child in self._module.named_modules():
            for key, value in list(vars(child).items()):
                if key in _STRUCTURE:
                    continue
                memo = {**self._kept, **self._tensors, **modules}
                whole = [value] if isinstance(child, self._private) else []
                try:
                    stops = self._is_boundary
                    prepare_memo(memo, [value], whole, place=self._placed, is_boundary=stops)
                    copy.deepcopy(value, memo)
                except Exception:  # noqa: BLE001  the probe asks which attribute fails, not why
                    return f"{path}.{key}".lstrip("."), value
        return type(self._module).__name__, self._module

    def _holds_module(self, value: Any) -> bool:
        graph = ObjectGraph(is_module_or_parameter, self._is_boundary)
        graph.walk([value])
        return id(value) in graph.leading()


def _has_attributes(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and bool(vars(parameter))


def _blamed(path: str, is_all: bool, error: Exception) -> str:
    """What fails and what to do about it, of an attribute or of a module as a whole."""
    if is_all:
        return f"{path} fails with {describe_error(error)}. copy.deepcopy has to work on it, and on all of its parts."
    return (
        f"attribute {path!r} fails with {describe_error(error)}. Remove the attribute before fit, or create it lazily "
        "inside the step."
    )


def is_shared(value: Any, kept: Collection[int]) -> bool:
    """Whether one object serves all replicas whatever it holds, so that nothing looks into it.

    Args:
        value: What is asked about.
        kept: The ids of objects that are shared on request.
    """
    return id(value) in kept or isinstance(value, _SHARED_TYPES)


def modules_without(module: nn.Module, kept: Collection[int]) -> Iterator[nn.Module]:
    """The submodules of ``module``, itself first, each once; not those whose id is in ``kept``, nor what they hold."""
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        child = waiting.pop()
        if id(child) not in seen and id(child) not in kept:
            seen.add(id(child))
            yield child
            grandchildren = reversed(submodules_of(child).values())
            waiting.extend(grandchild for grandchild in grandchildren if grandchild is not None)


def _attribute_values(child: nn.Module) -> Iterator[Any]:
    """The plain attributes of a submodule, and what its hooks are; the dicts of hooks are each module's own."""
    for key, value in list(vars(child).items()):
        if key in OF_EVERY_MODULE:
            # Hooks may capture the module. Parameters, buffers and submodules have their
            # counterparts.
            if key not in _STRUCTURE and isinstance(value, dict):
                yield from value.values()
        else:
            yield value


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


def _enter_tensors(
    memo: Memo,
    walks: _Walks,
    place: Callable[[torch.Tensor], torch.Tensor],
    is_boundary: Callable[[Any], bool],
    known: frozenset[int],
) -> list[torch.Tensor]:
    """Gives ``memo`` the counterparts of tensors, and what is the same for all; returns tensors behind shared values.

    Args:
        memo: Gets both.
        walks: What the copy leads to.
        place: Makes the counterpart of a tensor.
        is_boundary: What stays the same object in any case.
        known: Ids that the memo had before.
    """
    placed: list[torch.Tensor] = []
    for key, value in walks.objects.items():
        if key in known:
            continue
        if isinstance(value, torch.Tensor):
            memo[key] = place(value)
            if key in walks.rest.objects or key in walks.hidden.objects:
                placed.append(value)
            continue
        is_copied = key in walks.leading or key in walks.whole.objects
        if is_boundary(value) or isinstance(value, _LOCKS) or not is_copied:
            memo[key] = value
    return placed


def prepare_memo(
    memo: Memo,
    shared: Iterable[Any],
    private: Iterable[Any],
    *,
    place: Callable[[torch.Tensor], torch.Tensor],
    is_boundary: Callable[[Any], bool],
    module: nn.Module | None = None,
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
    """
    shared = list(shared)
    private = list(private)
    # Before the walks, which end at what the memo knows: at submodules, too, though their copies
    # are still empty.
    states = [] if module is None else _make_shells(module, memo)
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
    placed = _enter_tensors(memo, walks, place, is_boundary, known)
    # Functions are made empty, then the modules get their states, then the functions what they
    # capture: either may lead to the other, and deepcopy finds what the memo has.
    unknown = {key: value for key, value in walks.objects.items() if key not in memo}
    functions = _make_functions(memo, unknown, walks.leading | _functions_that_keep(walks.whole.objects))
    references = [value for value in unknown.values() if isinstance(value, weakref.ref)]
    if references:
        _copy_references(memo, references, _held_strongly([*shared, *private], stops))
        _copy_weak_tables(memo, unknown.values())
    for _, shell, state in states:
        shell.__setstate__(_copied_state(state, memo))  # type: ignore[no-untyped-call]
    functions.fill()
    for child, shell, _ in states:
        # Last: what compiles a module looks at it, which has its state by now.
        _compile_like(child, shell, memo)
    return placed


def _held_strongly(values: Iterable[Any], stops: Callable[[Any], bool]) -> dict[int, Any]:
    """What ``values`` lead to by other ways than weak references, by id: a copy of it is held in its place."""
    graph = ObjectGraph(
        lambda value: isinstance(value, torch.Tensor),
        lambda value: isinstance(value, weakref.ref) or stops(value),
    )
    graph.walk(values)
    return graph.objects


def _copy_references(memo: Memo, references: Sequence[Any], held: Mapping[int, Any]) -> None:
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
        if _is_copied_by_state(referent):
            kind: Any = type(referent)
            memo[id(referent)] = _empty(kind)
            shells.append((memo[id(referent)], referent.__reduce_ex__(4)[2]))
        else:
            others.append(referent)
    _copy_known_references(memo, references)
    for referent in others:
        copy.deepcopy(referent, memo)
    _copy_known_references(memo, references)
    for shell, state in shells:
        _set_state(shell, copy.deepcopy(state, memo))


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


def _copy_weak_tables(memo: Memo, values: Iterable[Any]) -> None:
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


def _is_copied_by_state(value: Any) -> bool:
    """Whether ``copy.deepcopy`` makes an empty object and gives it a copy of its state, and does no more."""
    kind = type(value)
    if hasattr(kind, "__deepcopy__") or kind in copyreg.dispatch_table or isinstance(value, type | types.FunctionType):
        return False
    return is_made_from_state(kind, value.__reduce_ex__(4))


def _empty(kind: Any) -> Any:
    """An object without a state; past the ``__new__`` of its class, which may want what the constructor was given."""
    try:
        return object.__new__(kind)
    except TypeError:  # a class in C makes its objects itself
        return kind.__new__(kind)


def _set_state(value: Any, state: Any) -> None:
    """As ``copy.deepcopy`` does."""
    if state is None:
        return
    if hasattr(value, "__setstate__"):
        value.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if attributes:
        vars(value).update(attributes)
    for name, content in (slots or {}).items():
        setattr(value, name, content)


def _make_shells(module: nn.Module, memo: Memo) -> list[tuple[nn.Module, nn.Module, Any]]:
    """The submodules, each with an empty copy and the state that this will get.

    Weak references and closures can then lead to a copy that is not made yet. Modules that say themselves how they are
    copied (scripted, traced and parametrized ones) are left to ``copy.deepcopy``.
    """
    states: list[tuple[nn.Module, nn.Module, Any]] = []
    children = list(modules_without(module, memo))
    places = set(map(id, children))
    themselves = [child for child in children if not _can_be_a_shell(child)]
    # Such a module may be made by its constructor, from finished copies of what it holds.
    inside: set[int] = set()
    for child in themselves:
        inside.update(map(id, child.modules()))
    # Parts first: a module that takes its state by a method of its own may go through its parts, which need theirs.
    for child in _parts_first(module):
        if id(child) in places and id(child) not in inside:
            shell = _empty(type(child))
            memo[id(child)] = shell
            states.append((child, shell, _state_of(child)))
    # A compiled module looks at the one that it compiles when it gets its state.
    states.sort(key=lambda state: isinstance(state[1], OptimizedModule))
    return states


def _parts_first(module: nn.Module) -> list[nn.Module]:
    """``module`` and all submodules, each once and after all of its own."""
    ordered: list[nn.Module] = []
    seen: set[int] = set()
    waiting = [(module, False)]
    while waiting:
        child, has_parts_before = waiting.pop()
        if has_parts_before:
            ordered.append(child)
        elif id(child) not in seen:
            seen.add(id(child))
            waiting.append((child, True))
            waiting.extend((part, False) for part in submodules_of(child).values() if part is not None)
    return ordered


def _state_of(child: nn.Module) -> Any:
    """What a copy of ``child`` begins with."""
    # A compiled module would be copied by its constructor, which forgets its hooks.
    if isinstance(child, OptimizedModule):
        return child.__getstate__()  # type: ignore[no-untyped-call]
    reduced: Any = child.__reduce_ex__(4)  # as copy.deepcopy does
    return reduced[2]


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


def _compile_like(child: nn.Module, copied: nn.Module, memo: Memo) -> None:
    """What ``child.compile()`` has put on it, which no copy of a module has, leads to the copy."""
    compiled = compiled_call_of(child)
    if compiled is not None and not isinstance(copied, OptimizedModule):
        vars(copied)["_compiled_call_impl"] = copy.deepcopy(compiled, memo)


def _can_be_a_shell(child: nn.Module) -> bool:
    """Whether ``child`` is copied by an empty object and a state, as Python does unless told otherwise."""
    kind = type(child)
    if isinstance(child, OptimizedModule):
        return True
    if hasattr(kind, "__deepcopy__"):
        return False
    return is_made_from_state(kind, child.__reduce_ex__(4))


class _Functions:
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


def _make_functions(memo: Memo, unknown: Mapping[int, Any], copied: Collection[int]) -> _Functions:
    """Empty counterparts of those functions among ``unknown`` objects whose ids are in ``copied``."""
    functions = _Functions(memo)
    for key, value in unknown.items():
        # Adding a function that keeps its results has added the one that it wraps.
        if key in copied and key not in memo:
            functions.add(value)
    return functions


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def _functions_that_keep(objects: Mapping[int, Any]) -> set[int]:
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


def _copied(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Values of the replica's own, without history."""
    # It would fetch its values to its own device first, to have them copied once more.
    if isinstance(tensor, RemoteTensor):
        tensor = source_of(tensor)
    return copied_to(tensor, device or tensor.device)


def like_parameter(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """A parameter of the same class, flags and hooks of the user, with other values and no gradient."""
    # A subclass (of a library, or lazy) may have attributes and a constructor of its own.
    is_plain = type(parameter) is nn.Parameter
    # An evaluation that gave it other values by .data left a tensor that can have no gradient.
    if data.is_inference() and parameter.requires_grad:
        data = data.clone()
    duplicate = nn.Parameter(data, parameter.requires_grad) if is_plain else copy.copy(parameter)
    duplicate.data = data
    duplicate.grad = None
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, name)
        if hooks:
            # torch takes hooks only of what requires a gradient; a frozen one is frozen again
            # below.
            duplicate.requires_grad_(True)
            register = duplicate.register_post_accumulate_grad_hook
            if name == "_backward_hooks":
                register = duplicate.register_hook
            for hook in filterfalse(is_ours, hooks.values()):
                register(hook)  # type: ignore[no-untyped-call]
            duplicate.requires_grad_(parameter.requires_grad)
    return duplicate


def _check_not_parallel(module: nn.Module) -> None:
    """What another strategy spreads over devices or processes cannot be a part of a replica."""
    for name, child in module.named_modules():
        if isinstance(child, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ReplicationError(f"{name} is a {type(child).__name__}; give the module inside it.")
    for name, parameter in module.named_parameters():
        if is_traceable_wrapper_subclass(parameter) and hasattr(parameter, "device_mesh"):
            raise ReplicationError(f"Parameter {name} is distributed over {parameter.device_mesh}; give whole tensors.")


def check_materialized(module: nn.Module) -> None:
    """Whether all parameters and buffers have values.

    Raises:
        ReplicationError: one is lazy; names it.
    """
    for kind, named in (("Parameter", module.named_parameters()), ("Buffer", module.named_buffers())):
        for name, tensor in named:
            if isinstance(tensor, UninitializedTensorMixin):
                raise ReplicationError(f"{kind} {name} is lazy and has no value yet; run one forward before training.")
