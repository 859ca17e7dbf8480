"""Makes replicas: copies of a module that share with it whatever neither is nor holds a tensor or a submodule.

    module --walk--> what leads to tensors or modules --copy only that--> replica
                     everything else -----------------same objects------> replica

So plain Python state exists once: what a hook changes, every replica sees. Parameters and buffers keep their structure
(tied weights, parameter lists, flattened RNN weights, parametrizations). Replicas on one physical device share the
storage of their parameters (no copy, no broadcast); each has gradients and buffers of its own. Functions whose closure
captures the module, and weak references to it, lead to the replica's own module in the copy.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from lightning_dpx.devices import canonical_device
from lightning_dpx.errors import ReplicationError
from lightning_dpx.replicas.copying.module_copy import ModuleCopy
from lightning_dpx.replicas.copying.own_parameters import own_parameters
from lightning_dpx.replicas.hidden_tensors import HiddenTensors
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.torch_compat import is_traceable_wrapper_subclass


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
            parameters = own_parameters(module, values_on, given)
            with _staying(shared):
                copying = ModuleCopy(module, target, kept, parameters, private, given.values())
                copied = copying.make()
            _check_same_parameters(module, copied)
            if turn:
                _check_shared_parameters(copied, given)
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


def _check_shared_parameters(copied: nn.Module, given: Mapping[str, nn.Parameter]) -> None:
    """A class that copies itself may make new parameters, which no optimizer would ever step.

    Raises:
        ReplicationError: the copy has parameters of its own, and not those that it was ``given``.
    """
    own = [name for name, parameter in copied.named_parameters() if parameter is not given.get(name)]
    if own:
        raise ReplicationError(
            f"Micro-batches cannot share parameter {own[0]}: the copy of its module has one of its own, as by a "
            "__deepcopy__ that makes new parameters. Let it take them from the memo, or choose micro_batches=1."
        )


def why_no_micro_batches(replica: Replica, keep: Iterable[object] = ()) -> str:
    """What keeps further replicas on its device from sharing the parameters of a replica; empty if nothing does.

    Found out by a copy, before anything depends on it: replicas are made anew where slices are cut.

    Args:
        replica: The first one of its device.
        keep: Objects that all replicas share by reference.
    """
    module = replica.module
    given = dict(module.named_parameters())
    try:
        check_materialized(module)
        _check_not_parallel(module)
        parameters = own_parameters(module, None, given)
        copied = ModuleCopy(module, None, list(keep), parameters, (nn.Module,), given.values()).make()
        _check_same_parameters(module, copied)
        _check_shared_parameters(copied, given)
    except ReplicationError as error:
        return str(error)
    return ""


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
    return ModuleCopy(module, None, list(keep), own_parameters(module, None, {}), (nn.Module,)).make()


def _check_not_parallel(module: nn.Module) -> None:
    """What another strategy spreads over devices or processes cannot be a part of a replica."""
    for name, child in module.named_modules():
        if isinstance(child, nn.DataParallel | nn.parallel.DistributedDataParallel):
            subject = name or "The module"
            raise ReplicationError(f"{subject} is a {type(child).__name__}; give the module inside it.")
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
