"""Replicas: persistent copies of one module, made once.

The copy is a deepcopy whose memo maps every parameter and buffer to its copy on the target device, so tied weights,
parameter lists, flattened RNN weights and parametrisations keep their structure. Replicas on one physical device share
the storage of their parameters (no copy, no broadcast); each has its own gradients and its own buffers.
"""

import copy
import functools
import operator
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import DataLoader, Dataset

from lightning_dpx.devices import canonical_device
from lightning_dpx.errors import ReplicationError

SHARED_TYPES: tuple[type, ...] = (Dataset, DataLoader)


class Replica:
    """One copy of the module, with the device that it lives on.

    A CPU tensor does not know which replica it belongs to, so the replica carries its own index.

    Attributes:
        index: Its place in the group.
        device: Where it lives.
        module: The copy; replica 0's is the user's own.
        modules: All submodules, in the order of ``Module.modules()``, as of the last :meth:`refresh`.
        parameters: Likewise; tied ones once.
        buffers: Likewise.
    """

    __slots__ = ("buffers", "device", "index", "module", "modules", "parameters")

    def __init__(self, index: int, device: torch.device, module: nn.Module) -> None:
        self.index, self.device, self.module = index, device, module
        self.modules: list[nn.Module] = []
        self.parameters: list[nn.Parameter] = []
        self.buffers: list[torch.Tensor] = []
        self.refresh()

    def refresh(self) -> None:
        """Notes what the module consists of now, in one walk; lists of the same objects as before stay as they are."""
        modules = _walk(self.module)
        parameters = _distinct(value for child in modules for value in child._parameters.values())
        buffers = _distinct(value for child in modules for value in child._buffers.values())
        if not _same(modules, self.modules):
            self.modules = modules
        if not _same(parameters, self.parameters):
            self.parameters = parameters
        if not _same(buffers, self.buffers):
            self.buffers = buffers


def _walk(module: nn.Module) -> list[nn.Module]:
    """What ``Module.modules()`` yields, without the names that it computes on the way."""
    found: dict[nn.Module, None] = {}
    waiting = [module]
    while waiting:
        child = waiting.pop()
        if child not in found:
            found[child] = None
            waiting.extend(grandchild for grandchild in reversed(child._modules.values()) if grandchild is not None)
    return list(found)


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({id(value): value for value in values if value is not None}.values())


def _same(new: Sequence[object], old: Sequence[object]) -> bool:
    return len(new) == len(old) and all(map(operator.is_, new, old))


def replicate(
    module: nn.Module,
    devices: Sequence[torch.device],
    keep: Iterable[object] = (),
    existing: Sequence[Mapping[str, nn.Parameter]] = (),
) -> tuple[Replica, ...]:
    """K replicas; the first is ``module`` itself, which must already live on ``devices[0]``.

    Args:
        module: The module to copy.
        devices: K devices, repeated ones allowed.
        keep: Objects that all replicas share by reference (datasets and loaders always are).
        existing: Per replica, parameters by name that it takes instead of copies.

    Raises:
        ReplicationError: something cannot be copied, or its copy would still point at the original; the message
            names the path of the attribute.
    """
    _refuse_lazy(module)
    if len(devices) > 1:
        _refuse_parallel(module)
    root = canonical_device(devices[0])
    replicas = [Replica(0, root, module)]
    for index, device in enumerate(devices[1:], start=1):
        target = canonical_device(device)
        twin = _copy(module, target, target == root, keep, existing[index] if existing else {})
        _refuse_unfaithful(module, twin)
        replicas.append(Replica(index, target, twin))
    return tuple(replicas)


def stand_in(replica: Replica, keep: Iterable[object] = ()) -> nn.Module:
    """A copy that shares the replica's parameters, for runs that must leave its other state alone; see replicate().

    Every tensor stays on its device, also where parts of the replica are shifted to another one.
    """
    return _copy(replica.module, None, True, keep, {})


def _copy(
    module: nn.Module,
    device: torch.device | None,
    share: bool,
    keep: Iterable[object],
    existing: Mapping[str, nn.Parameter],
) -> nn.Module:
    memo: dict[int, Any] = {id(kept): kept for kept in keep}
    for child in module.modules():
        memo.update({id(value): value for value in vars(child).values() if isinstance(value, SHARED_TYPES)})
        if child._forward_pre_hooks:  # torch.nn.utils.weight_norm and its kind compute their tensors anew before use
            computed = [v for v in vars(child).values() if isinstance(v, torch.Tensor) and v.grad_fn is not None]
            memo.update({id(value): _copied(value, device) for value in computed})
    for name, parameter in module.named_parameters():
        if name in existing:
            memo[id(parameter)] = existing[name]
            continue
        data = parameter.detach() if share else _copied(parameter, device)
        memo[id(parameter)] = _like(parameter, data)
    for buffer in module.buffers():
        memo[id(buffer)] = _copied(buffer, device)
    try:
        twin = copy.deepcopy(module, dict(memo))  # what fails leaves half-made copies in its memo
        if device is not None:
            twin.to(device)  # what no memo knows: states of metrics, and the device that a LightningModule remembers
        return twin
    except Exception as error:
        path, where = _uncopyable_path(module, memo), "" if device is None else f" to {device}"
        raise ReplicationError(
            f"The module cannot be copied{where}: attribute {path!r} fails with {type(error).__name__}: {error}. "
            "Remove the attribute before fit, or create it lazily inside the step."
        ) from error


def _copied(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    return tensor.detach().to(device or tensor.device, copy=True)


def _like(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    twin = copy.copy(parameter) if type(parameter) is not nn.Parameter else nn.Parameter(data, parameter.requires_grad)
    twin.data, twin.grad = data, None
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, name)
        if hooks:
            twin.requires_grad_(True)  # torch takes hooks only while it does
            register = twin.register_hook if name == "_backward_hooks" else twin.register_post_accumulate_grad_hook
            for hook in hooks.values():
                register(hook)  # type: ignore[no-untyped-call]
            twin.requires_grad_(parameter.requires_grad)
    return twin


def _uncopyable_path(module: nn.Module, memo: dict[int, Any]) -> str:
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            if key in ("_modules", "_parameters", "_buffers"):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:  # noqa: BLE001  the probe asks which attribute fails, not why
                return f"{name}.{key}" if name else key
    return type(module).__name__


def _refuse_parallel(module: nn.Module) -> None:
    """What another strategy spreads over devices or processes cannot be a part of a replica."""
    for name, child in module.named_modules():
        if isinstance(child, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ReplicationError(f"{name} is a {type(child).__name__}; give the module inside it.")
    for name, parameter in module.named_parameters():
        if is_traceable_wrapper_subclass(parameter) and hasattr(parameter, "device_mesh"):
            raise ReplicationError(f"Parameter {name} is distributed over {parameter.device_mesh}; give whole tensors.")


def _refuse_lazy(module: nn.Module) -> None:
    for kind, named in (("Parameter", module.named_parameters()), ("Buffer", module.named_buffers())):
        for name, tensor in named:
            if isinstance(tensor, UninitializedTensorMixin):
                raise ReplicationError(f"{kind} {name} is lazy and has no value yet; run one forward before training.")


def _refuse_unfaithful(module: nn.Module, twin: nn.Module) -> None:
    """A deepcopy hands functions and weak references over as they are: those that lead to the original would still
    act on it."""
    originals = {id(child) for child in module.modules()}
    for (name, child), copied in zip(module.named_modules(), twin.modules(), strict=True):
        kept = {id(function) for _, function in _functions(copied)}
        for key, function in _functions(child):
            if id(function) in kept and reaches(function, originals):
                what = getattr(function, "__qualname__", type(function).__name__)
                raise ReplicationError(
                    f"{f'{name}.' if name else ''}{key} holds the function {what!r}, whose closure "
                    "captures this very module; in a copy it would still act on the original. Use a bound method."
                )


def _functions(module: nn.Module) -> Iterator[tuple[str, object]]:
    for key, value in vars(module).items():
        if key not in ("_parameters", "_buffers", "_modules"):
            for held in _pytree.tree_leaves(value):
                if isinstance(held, functools.partial):
                    held = held.func  # its arguments are copied
                if isinstance(held, (types.FunctionType, functools._lru_cache_wrapper, weakref.ref)):
                    yield key, held


def reaches(value: object, originals: set[int], depth: int = 4) -> bool:
    """Whether a function leads to one of the original modules: by its closure, defaults, or what those hold."""
    if id(value) in originals:
        return True
    if depth == 0 or isinstance(value, nn.Module):
        return False
    if isinstance(value, weakref.ref):
        nexts = [value()]
    elif isinstance(value, types.MethodType):
        nexts = [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        nexts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        nexts = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, functools._lru_cache_wrapper):
        nexts = [value.__wrapped__]
    elif isinstance(value, list | tuple | dict):
        nexts = list(value.values() if isinstance(value, dict) else value)
    else:
        return False
    return any(reaches(item, originals, depth - 1) for item in nexts)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a cell that is still empty captures nothing
        return None
