"""Modules that ``fully_shard`` (FSDP2) or ``FullyShardedDataParallel`` (FSDP1) has spread over processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dpx.torch_compat.distributed_tensors import distributed_like

# The name of what FSDP1 keeps in one, in the unit; the user's own parameters have theirs where use_orig_params is True.
FLAT_PARAMETER = "_flat_param"


def precision_policy_of(module: torch.nn.Module) -> Any:
    """The ``MixedPrecisionPolicy`` of a unit of ``fully_shard``; ``None`` for any other module."""
    # Only units that `fully_shard` has made have the method.
    read_state = getattr(module, "_get_fsdp_state", None)
    if read_state is None:
        return None
    return getattr(read_state(), "_mp_policy", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatParts:
    """The parameters that ``FullyShardedDataParallel`` keeps in one.

    Attributes:
        unit: The module whose they are.
        names: Modules in it, and the name of a parameter there; of a tied one all of them.
        shapes: Of each, before it was sharded.
        requires_grad: Whether the one that they are kept in does, and so all do in a step: as soon as one is trained.
        same: For each, the number of the one that it is tied to, or its own.
        dtype: What they are gathered in.
        policy: The ``MixedPrecision`` of the unit.
    """

    unit: torch.nn.Module
    names: list[tuple[torch.nn.Module, str]]
    shapes: list[torch.Size]
    requires_grad: bool
    same: list[int]
    dtype: torch.dtype
    policy: Any


def flat_parts_of(wrapper: Any) -> FlatParts:
    """The parameters of one unit of ``FullyShardedDataParallel``, none where others have them all."""
    flat = wrapper._flat_param
    policy = wrapper.mixed_precision
    kept = torch.float32 if flat is None else flat.dtype
    parts = FlatParts(
        unit=wrapper.module,
        names=[],
        shapes=[],
        requires_grad=_is_trained(flat),
        same=[],
        dtype=policy.param_dtype or kept,
        policy=policy,
    )
    # A unit within another may have none of its own.
    if flat is None:
        return parts
    written = vars(flat)
    for info, shape in zip(written["_param_infos"], written["_shapes"], strict=True):
        parts.same.append(len(parts.names))
        parts.names.append((info.module, info.param_name))
        parts.shapes.append(shape)
    for info in written["_shared_param_infos"]:
        first = parts.names.index((info.prim_module, info.prim_param_name))
        parts.same.append(first)
        parts.names.append((info.module, info.param_name))
        parts.shapes.append(parts.shapes[first])
    return parts


def _is_trained(flat: Any) -> bool:
    """Whether a flat parameter will require grad in the next forward."""
    if flat is None:
        return False
    own = []
    for info in vars(flat)["_param_infos"]:
        parameter = info.module._parameters.get(info.param_name)
        if parameter is not None:
            own.append(parameter.requires_grad)
    # With use_orig_params the user's own parameters say so, and the flat one is told when a forward begins.
    if own:
        return any(own)
    return bool(flat.requires_grad)


def sharded_parameters(module: torch.nn.Module) -> list[Any]:
    """What ``fully_shard`` keeps of every parameter of the units in ``module``, each once."""
    found: dict[int, Any] = {}
    for child in module.modules():
        for parameter in _sharded_parameters_of(child):
            found[id(parameter)] = parameter
    return list(found.values())


def _sharded_parameters_of(unit: torch.nn.Module) -> list[Any]:
    """What ``fully_shard`` keeps of the parameters of one unit; nothing for any other module."""
    read_state = getattr(unit, "_get_fsdp_state", None)
    if read_state is None:
        return []
    state = read_state()
    # Torch 2.12 and before have one group for a unit, under another name.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    found = []
    for group in groups:
        if group is not None:
            found += group.fsdp_params
    return found


def gathered_parameters(module: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
    """What parameters of ``fully_shard`` are in a forward of their unit, by the ids of those that modules have now.

    They are on the meta device, in the dtype that the unit computes in. Of one that is tensor-parallel as well, it is
    the part of this rank.
    """
    found: dict[int, torch.nn.Parameter] = {}
    for child in module.modules():
        policy = precision_policy_of(child)
        for one in _sharded_parameters_of(child):
            sharded = one.sharded_param
            dtype = sharded.dtype
            # A unit may hold whole numbers, which it gathers as they are.
            if policy is not None and policy.param_dtype is not None and dtype.is_floating_point:
                dtype = policy.param_dtype
            # An attribute that only instances have, so that it is in no table of names.
            whole = torch.empty(vars(one)["_orig_size"], dtype=dtype, device="meta")
            found[id(sharded)] = torch.nn.Parameter(_as_part(whole, one), sharded.requires_grad)
    return found


def _as_part(whole: torch.Tensor, sharded: Any) -> torch.Tensor:
    """``whole`` as the part of a tensor-parallel parameter, if ``sharded`` is one."""
    # Torch 2.12 and before have it under another name, and only where there is one.
    spec = getattr(sharded, "_unsharded_dtensor_spec", getattr(sharded, "_tp_spec", None))
    if spec is None:
        return whole
    return distributed_like(whole, spec.mesh, spec)


def shard_of(parameter: Any) -> torch.Tensor:
    """The part of one of :func:`sharded_parameters` that is here, flat, with what it is padded by."""
    # An attribute that only instances have, so that it is in no table of names.
    shard: torch.Tensor = vars(parameter)["_sharded_param_data"]
    return shard


def is_offloaded(parameter: Any) -> bool:
    """Whether one of :func:`sharded_parameters` has its part, and that of its gradient, on the host."""
    return bool(vars(parameter)["offload_to_cpu"])


def unpin(parameter: Any) -> None:
    """From now on one of :func:`sharded_parameters` is not moved to pinned memory."""
    # Torch asks for it when it moves the part, and a dry run has no device to pin for.
    parameter.pin_memory = False


def gathered_bytes(parameters: Sequence[Any]) -> int:
    """Bytes of those of :func:`sharded_parameters` that are whole now; torch resizes their storages unseen."""
    total = 0
    for parameter in parameters:
        # There are none before the first forward.
        for whole in getattr(parameter, "all_gather_outputs", ()):
            total += whole.untyped_storage().nbytes()
    return total


def reset_sharded(parameter: Any) -> None:
    """One of :func:`sharded_parameters` takes the tensor that its module has now, as before its first forward."""
    parameter.reset_sharded_param()
    parameter.all_gather_outputs = []
    # A view of those, which the next forward makes anew.
    vars(parameter).pop("_unsharded_param", None)
