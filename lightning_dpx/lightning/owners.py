"""Optimizers follow their parameters to other copies of them: to their owners, or back to the user's module."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lightning_dpx.lightning.lightning_api import BaseFinetuning, rank_zero_warn
from lightning_dpx.lightning.manual.acts_once import held_optimizers
from lightning_dpx.reducers import choose_reducer
from lightning_dpx.torch_compat import tree_map_only

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


def move_optimizers(optimizers: Sequence[Optimizer], counterparts: Mapping[Any, torch.nn.Parameter]) -> None:
    """Has ``optimizers`` change other copies of the parameters; state that they hold moves along.

    Args:
        optimizers: The user's optimizers.
        counterparts: By the parameter that an optimizer holds, the one that it shall hold.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [counterparts.get(parameter, parameter) for parameter in group["params"]]
        # An optimizer finds the state of a parameter by its identity: under another parameter it would begin anew.
        for parameter in list(optimizer.state):
            other = counterparts.get(parameter, parameter)
            if other is not parameter:
                optimizer.state[other] = _moved(optimizer.state.pop(parameter), parameter.device, other.device)


def memory_of_dropped(
    optimizers: Sequence[Optimizer],
    counterparts: Mapping[Any, torch.nn.Parameter],
    parameters: Iterable[torch.nn.Parameter],
) -> set[int]:
    """Addresses of what optimizers hold beside the module's parameters.

    A parametrization, such as weight norm, puts a new parameter into the memory of the old one. The optimizer still
    steps the old one by a gradient that it got before, and on one device that moves the new one, too.

    Args:
        optimizers: The user's optimizers.
        counterparts: By the parameter that an optimizer holds, that of the user's module.
        parameters: Those that the user's module has by now.
    """
    known = {id(parameter) for parameter in parameters}
    found: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for held in group["params"]:
                parameter = counterparts.get(held, held)
                if id(parameter) not in known:
                    found.add(parameter.data_ptr())
    return found


def _moved(state: Any, source: torch.device, target: torch.device) -> Any:
    """Step counters that an optimizer keeps on the host stay there."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(target) if tensor.device == source else tensor, state)


def begin_optimizers(session: "Session") -> None:
    """The user's optimizers are made: they change the owners' copies, where that is possible."""
    step = session.step
    replicas = session.replicas
    reason = _why_all_on_first(session) if step.has_other_owners else None
    if reason is not None:
        name = choose_reducer(replicas.devices)
        device = session.strategy.root_device
        rank_zero_warn(f"dpx: gradients are summed by reducer={name!r}, all on {device}: {reason}")
        step.sums.exchange_reducer("auto")
    # After the reducer is known for good: it says whether there are other owners.
    session.gradient_hooks.begin(session.module, replicas, step)
    optimize_owners(session)


def _why_all_on_first(session: "Session") -> str | None:
    """Why parameters cannot have owners on several devices here; ``None`` where they can."""
    for callback in session.trainer.callbacks:
        if isinstance(callback, BaseFinetuning):
            return f"{type(callback).__name__} looks for the optimizer's parameters in the module."
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in session.strategy.optimizers):
        return "LBFGS keeps all parameters in one vector, which cannot be spread over devices."
    return None


def load_states(optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Any]) -> None:
    """Loads the state of every parameter to where the optimizer has it."""
    for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
        # Torch puts each state where its parameter is. Lightning would then move all of them to
        # the root device.
        optimizer.load_state_dict(state)


def optimize_owners(session: "Session") -> None:
    """Optimizers change the owners' copies, also in groups that they got later."""
    step = session.step
    root = session.replicas.root
    if not step.has_other_owners:
        return
    owned = dict(zip(root.parameters, step.owner_parameters, strict=True))
    for optimizer in [*session.strategy.optimizers, *held_optimizers(root.module)]:
        held = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        # Asked before every step, and usually nothing is new: the lists stay the same objects.
        if any(owned.get(parameter, parameter) is not parameter for parameter in held):
            # With the state, if there is some: an optimizer of the user's own may have stepped in an earlier run.
            move_optimizers([optimizer], owned)


def place_states(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """State that Lightning has moved to ``device``, that of an earlier run, goes to where its parameters are owned."""
    for optimizer, parameter, state in _states(optimizers):
        if parameter.device != device:
            optimizer.state[parameter] = _moved(state, device, parameter.device)


def _states(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Optimizer, torch.Tensor, Any]]:
    """What optimizers keep for each parameter; they may exchange it meanwhile."""
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            # Some keep what belongs to none under a name.
            if isinstance(parameter, torch.Tensor):
                yield optimizer, parameter, state


def bring_home(session: "Session") -> None:
    """The run ends: optimizers, which may outlast it, change the user's module again."""
    step = session.step
    root = session.replicas.root
    if not step.has_other_owners:
        return
    homes = dict(zip(step.owner_parameters, root.parameters, strict=True))
    # To the host at once, where Lightning's teardown takes it: on the first device there may be no room for all of it.
    for optimizer, parameter, state in _states(session.strategy.optimizers):
        optimizer.state[parameter] = _moved(state, parameter.device, torch.device("cpu"))
    move_optimizers([*session.strategy.optimizers, *held_optimizers(root.module)], homes)
