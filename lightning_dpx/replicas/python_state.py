"""Plain Python attributes of the replicas: hooks write them on the user's module, steps write them on every replica.

Before a step, an attribute that was set on the user's module (replica 0) since the last step is set on the others too,
and a container that was changed outside a step is copied again. After a step, what the other replicas added to their
containers is added to the user's own, in replica order: items appended to a list, new keys of a dict, new members of a
set; tensors are moved to its device, and containers inside dicts are followed. Anything else that only another replica
wrote stays there. So ``self.outputs.append(x)`` collects all rows in sample order, and ``self.count += 1`` counts once
a step.
"""

import copy
import operator
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from lightning_dpx.errors import ReplicationError
from lightning_dpx.replicas.replica import SHARED_TYPES, Replica, reaches
from lightning_dpx.replicas.slicing import PLAIN

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class PythonState:
    """Keeps the plain attributes of the replicas together.

    Args:
        replicas: K replicas that are equal now.
        private: Names of attributes that belong to the framework.
        skip: Types of submodules that somebody else looks after.
    """

    def __init__(
        self, replicas: Sequence[Replica], private: frozenset[str] = frozenset(), skip: tuple[type, ...] = ()
    ) -> None:
        self._root, self._others = replicas[0], list(replicas[1:])
        self._private, self._skip = private | _OF_EVERY_MODULE, skip
        self._modules = {replica.index: self._looked_after(replica) for replica in replicas}
        self._seen = [dict(vars(child)) for child in self._modules[0]]  # holds them, so that no id is used twice
        self._containers = [self._signature(child) for child in self._modules[0]]
        self._slots = {replica.index: self._slots_of(replica) for replica in self._others}
        self._hooks = [_users_hooks(child) for child in self._modules[0]]
        self._parameter_hooks = {id(p): len(p._backward_hooks or ()) for p in self._root.parameters}
        self._sizes: dict[int, list[Any]] = {}

    def share(self) -> None:
        """Before a step, first of all: the replicas get what was set on the user's module since the last one.

        Raises:
            ReplicationError: submodules were added or removed.
        """
        if not self._others:
            return
        known, buffers = self._root.modules, self._root.buffers
        self._root.refresh()
        if self._root.modules is not known:
            self._check_modules()
        if self._root.buffers is not buffers:  # a step put new tensors in their place, on every replica
            for replica in self._others:
                replica.refresh()
        self._check_hooks_of_parameters()
        modules = self._looked_after(self._root)
        self._modules[0] = modules
        for index, child in enumerate(modules):
            if (hooks := _users_hooks(child)) != self._hooks[index]:
                self._hooks[index] = hooks
                self._send_hooks(index, child, hooks)
        changed = [index for index in range(len(modules)) if self._is_changed(index)]
        for replica in self._others:
            for index in changed:
                self._send(index, modules[index], replica)
            if changed:
                self._slots[replica.index] = self._slots_of(replica)
            children = self._modules[replica.index]
            self._sizes[replica.index] = [
                _known(vars(children[i]).get(key, ())) for i, key in self._slots[replica.index]
            ]
        self._remember(changed)

    def collect(self, active: Sequence[Replica]) -> None:
        """After a step: the user's module gets what the active replicas added to their containers."""
        owned = self._modules[0]
        for replica in active:
            if replica is self._root:
                continue
            children = self._modules[replica.index]
            for (index, key), known in zip(self._slots[replica.index], self._sizes[replica.index], strict=True):
                value, target = vars(children[index]).get(key), vars(owned[index]).get(key)
                if type(target) is type(value) and target is not value and value is not None:
                    _take(value, target, known, self._root.device)
        self._remember([index for index in range(len(owned)) if self._is_changed(index)])

    def _check_hooks_of_parameters(self) -> None:
        for parameter in self._root.parameters:
            hooks = parameter._backward_hooks
            if hooks and len(hooks) > self._parameter_hooks.get(id(parameter), 0):
                name = next(name for name, other in self._root.module.named_parameters() if other is parameter)
                raise ReplicationError(
                    f"Parameter {name} got a hook after setup, which would see the gradient of one replica only; "
                    "register it before fit (configure_model), so that every replica has it."
                )

    def _check_modules(self) -> None:
        mine, theirs = (dict(replica.module.named_modules()) for replica in (self._root, self._others[0]))
        for name in [*mine, *(name for name in theirs if name not in mine)]:
            now, then = (type(modules.get(name)).__name__ for modules in (mine, theirs))
            if type(mine.get(name)) is not type(theirs.get(name)):
                raise ReplicationError(
                    f"The module has other submodules now than its replicas: {name} is {now} and was {then}. Change it "
                    "before fit (configure_model)."
                )

    def _looked_after(self, replica: Replica) -> list[nn.Module]:
        return [child for child in replica.modules if not isinstance(child, self._skip)]

    def _is_changed(self, index: int) -> bool:
        child = self._modules[0][index]
        if not self._is_known(index, child):
            return True
        return bool(self._containers[index]) and self._signature(child) != self._containers[index]

    def _own(self, child: nn.Module) -> Iterator[tuple[str, Any]]:
        for key, value in list(vars(child).items()):
            if key not in self._private:
                yield key, value

    def _is_known(self, index: int, child: nn.Module) -> bool:
        seen, now = self._seen[index], vars(child)
        return len(seen) == len(now) and all(map(operator.is_, seen.values(), now.values()))

    def _signature(self, child: nn.Module) -> dict[str, Any]:
        return {key: _summary(value) for key, value in self._own(child) if type(value) in (list, dict, set)}

    def _remember(self, changed: Sequence[int]) -> None:
        for index in changed:
            child = self._modules[0][index]
            self._seen[index], self._containers[index] = dict(vars(child)), self._signature(child)

    def _send(self, index: int, child: nn.Module, replica: Replica) -> None:
        twin = self._modules[replica.index][index]
        before = self._seen[index]
        mine = dict(self._own(child))
        for key, value in mine.items():
            known = key in vars(twin) and before.get(key) is value
            if not known or (type(value) in (list, dict, set) and _summary(value) != self._containers[index].get(key)):
                vars(twin)[key] = self._copied(value, replica)
        for key, _ in self._own(twin):
            if key not in mine:
                del vars(twin)[key]

    def _send_hooks(self, index: int, child: nn.Module, hooks: dict[tuple[str, int], Any]) -> None:
        originals = {id(module) for module in self._root.modules}
        for (key, _), hook in hooks.items():
            if isinstance(hook, types.FunctionType) and reaches(hook, originals):
                name = next(name for name, other in self._root.module.named_modules() if other is child)
                raise ReplicationError(
                    f"{name}.{key} got a hook after setup, {hook.__qualname__!r}, whose closure captures this very "
                    "module; on a replica it would still act on the original. Use a bound method."
                )
        for replica in self._others:
            twin = self._modules[replica.index][index]
            for key in _HOOKS:
                held = vars(twin)[key]
                for number in [number for number, hook in held.items() if not _is_ours(hook)]:
                    del held[number]
                held.update({number: self._copied(hook, replica) for (of, number), hook in hooks.items() if of == key})
            for key in _HOOK_FLAGS:
                vars(twin)[key].update(vars(child)[key])

    def _copied(self, value: Any, replica: Replica) -> Any:
        if isinstance(value, (*PLAIN, *SHARED_TYPES)):
            return value
        if isinstance(value, torch.Tensor):
            return value.detach().to(replica.device)
        memo: dict[int, Any] = {}
        for mine, twins in zip(self._root.modules, replica.modules, strict=True):
            memo[id(mine)] = twins
        for own, mirrored in zip(self._root.parameters, replica.parameters, strict=True):
            memo[id(own)] = mirrored
        try:
            return _moved(copy.deepcopy(value, memo), replica.device)
        except Exception:  # noqa: BLE001  locks, files, graphs: what cannot be copied is shared
            return value

    def _slots_of(self, replica: Replica) -> list[tuple[int, str]]:
        """Where the replica has containers: the place of the submodule, and the attribute."""
        return [
            (index, key)
            for index, child in enumerate(self._modules[replica.index])
            for key, value in self._own(child)
            if type(value) in (list, dict, set)
        ]


def _is_ours(hook: Any) -> bool:
    owner = type(hook.__self__) if hasattr(hook, "__self__") else hook
    return (getattr(owner, "__module__", "") or "").startswith("lightning_dpx.")


def _users_hooks(child: nn.Module) -> dict[tuple[str, int], Any]:
    """By attribute and number; what the plan or a shift put there is not the user's."""
    state = vars(child)
    held = [(key, state[key]) for key in _HOOKS if state.get(key)]
    return {(key, number): hook for key, hooks in held for number, hook in hooks.items() if not _is_ours(hook)}


def _summary(value: Any) -> Any:
    """Differs if somebody changed a container, short of exchanging items in the middle of a list."""
    if isinstance(value, list):
        return id(value), len(value), id(value[-1]) if value else None
    if isinstance(value, dict):
        return id(value), {
            key: _summary(item) if type(item) in (list, dict) else id(item) for key, item in value.items()
        }
    return id(value), frozenset(value)


def _known(value: Any) -> Any:
    """What a container holds before a step: its length, or its keys with what they hold."""
    if isinstance(value, list):
        return len(value)
    if isinstance(value, dict):
        return {key: _known(item) if type(item) in (list, dict, set) else None for key, item in value.items()}
    return set(value)


def _take(source: Any, target: Any, known: Any, device: torch.device) -> None:
    """Moves what ``source`` holds beyond ``known`` into ``target``."""
    if isinstance(source, list):
        target.extend(_moved(source[known:], device))
        del source[known:]
    elif isinstance(source, set):
        target |= source - known
        source &= known
    else:
        for key in list(source):
            inner = target.get(key)
            if key in known and known[key] is not None and type(inner) is type(source[key]):
                _take(source[key], inner, known[key], device)
            elif key not in known:
                value = _moved(source.pop(key), device)
                if isinstance(value, list) and isinstance(inner, list):
                    inner.extend(value)
                else:
                    target.setdefault(key, value)


def _moved(value: Any, device: torch.device) -> Any:
    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
