"""What optimizers, schedulers and backwards are to one replica inside a manual step."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_dpx.errors import UnsupportedError, WholeBatchError
from lightning_dpx.lightning.lightning_api import LightningOptimizer
from lightning_dpx.lightning.manual.acts_once import (
    acts_once,
    current_view,
    plain_attribute,
    unwrapped_optimizer,
    viewed,
)
from lightning_dpx.replicas import BatchSlice, Replica
from lightning_dpx.torch_compat import tree_map_only

if TYPE_CHECKING:
    from lightning_dpx.lightning.manual.manual import ManualOptimization

# Reading is no reason to meet. What user code calls beyond these is taken to change something.
_READS = frozenset(
    {
        "state_dict", "get_last_lr", "get_lr", "is_enabled", "get_scale", "get_growth_factor", "get_backoff_factor",
        "get_growth_interval", "scale",
    }
)  # fmt: skip
# Their private methods are parts of public ones, which are meetings already.
_OF_FRAMEWORK = frozenset({*dir(Optimizer), *dir(LightningOptimizer), *dir(LRScheduler), *dir(torch.amp.GradScaler)})
# Replicas in threads read the same objects, and to read the state of an optimizer may add to it: it
# is a defaultdict.
_READING = RLock()


class ReplicaView:
    """One replica's view in one step.

    Args:
        manual: What the replicas do together.
        batch_slice: The replica and its rows.
        weight: What the loss of its slice weighs in that of the batch.
        is_first: Whether what it rebinds is what counts.
    """

    def __init__(self, manual: "ManualOptimization", batch_slice: BatchSlice, weight: float, *, is_first: bool) -> None:
        self.replica: Replica = batch_slice.replica
        self.weight = weight
        self._manual = manual
        self.is_first = is_first
        owners = manual.step.owner_parameters
        self._mirror = {id(owner): mine for owner, mine in zip(owners, self.replica.parameters, strict=True)}
        self._owner_of = {id(mine): owner for owner, mine in zip(owners, self.replica.parameters, strict=True)}
        self._groups: dict[int, _Groups] = {}
        self._states: dict[int, _States] = {}

    @property
    def module(self) -> Any:
        """The replica's module."""
        return self.replica.module

    @property
    def is_alone(self) -> bool:
        """Whether this replica has all rows of the batch, so that its gradients are those of the batch."""
        return self._manual.sums_nothing

    # ---- backward ----

    def backward(self, loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """As ``Strategy.backward``: hooks once with the whole batch's loss, the module's own backward per replica."""
        manual = self._manual
        hooks = manual.has_backward_hooks()
        scaled = loss
        if hooks:
            factor = manual.meet("on_before_backward", loss.detach(), manual.before_backward, optional=True)
            if factor is not None:
                scaled = loss * factor.to(loss.device)
        manual.precision.wrapped.backward(scaled, self.module, optimizer, *args, **kwargs)
        if hooks:
            manual.meet("on_after_backward", None, manual.after_backward, optional=True)
        return loss.detach()

    def run_backward(self, run: Callable[[], None], *, create_graph: bool) -> None:
        """Runs a backward of this replica's part of the loss; afterwards all replicas hold the whole batch's.

        Raises:
            WholeBatchError: the gradients are to have a graph of their own, which cannot reach other replicas.
            UnsupportedError: nor other processes.
        """
        if create_graph and self.is_alone:
            run()  # the gradients of this replica are those of the batch; they keep their graph
            return
        if create_graph:
            self._refuse_graph_between_processes("A backward by hand with create_graph=True")
            raise WholeBatchError("Its backward creates a graph of the gradients (create_graph=True).")
        parameters = self.replica.parameters
        before = [parameter.grad for parameter in parameters]
        # What this backward gives must be told from what was there, which is not to
        # be summed again.
        for parameter in parameters:
            parameter.grad = None
        try:
            run()
            mine = [parameter.grad for parameter in parameters]
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        # A slice without the rows in question may skip a backward that others run.
        self._manual.meet("backward", mine, self._manual.add_gradients, optional=True)

    def sums_gradients_of(self, inputs: Sequence[Any], *, create_graph: bool) -> bool:
        """Whether gradients with respect to ``inputs`` are those of parameters, hence of the whole batch.

        Raises:
            WholeBatchError: they are, but are to have a graph, or come with those of other tensors.
            UnsupportedError: they are to have a graph, and there are several processes.
        """
        wanted = [id(value) in self._owner_of for value in inputs]
        if not any(wanted) or self.is_alone:
            return False
        if create_graph:
            self._refuse_graph_between_processes("torch.autograd.grad of parameters with create_graph=True, by hand,")
            raise WholeBatchError("It has torch.autograd.grad create a graph of the gradients of parameters.")
        if not all(wanted):
            raise WholeBatchError(
                "It asks torch.autograd.grad for gradients of parameters and of other tensors at once.",
                "For all devices to take part, ask for them one after the other.",
            )
        return True

    def _refuse_graph_between_processes(self, what: str) -> None:
        """One replica with the whole batch of its process has not that of the others."""
        if self._manual.step.has_processes:
            raise UnsupportedError(
                f"{what} needs gradients of the whole batch that have a graph, and those of several processes have "
                "none. Start one process with all devices of one machine; there one replica does such a step."
            )

    def total_of(self, parameters: Sequence[Tensor], gradients: list[Any]) -> list[Any]:
        """The sums of all replicas' gradients, on this replica's device."""
        positions = {id(parameter): index for index, parameter in enumerate(self.replica.parameters)}
        wanted = [positions[id(parameter)] for parameter in parameters]
        # Sums are made of a gradient, or none, for every parameter of the module.
        column: list[Any] = [None] * len(positions)
        for index, gradient in zip(wanted, gradients, strict=True):
            column[index] = gradient
        totals = self._manual.meet("torch.autograd.grad", column, self._manual.total_gradients)
        found = [totals[index] for index in wanted]
        own: list[Any] = []
        for parameter, total in zip(parameters, found, strict=True):
            # A copy for each replica: its step may write what it gets.
            own.append(None if total is None else total.to(parameter.device, copy=True))
        return own

    # ---- attributes of optimizers, schedulers and scalers ----

    def attribute(self, owner: Any, name: str) -> Any:
        """The value of ``owner.name`` for this replica's code."""
        if isinstance(owner, Optimizer):
            if name == "param_groups":
                return self._groups_of(owner).mine
            if name == "state":
                return self._states_of(owner)
            if name == "step":
                return partial(self._step, owner)
            if name == "toggle_model":
                return partial(self._toggled, owner)
            # An overridden zero_grad may do more: it is a call like any other, which happens once.
            if name == "zero_grad" and type(owner).zero_grad is Optimizer.zero_grad:
                return partial(self._zero_grad, owner)
        value = plain_attribute(owner, name)
        if isinstance(value, Optimizer):
            # An optimizer that holds another one hands it out in the step, and that must ask the
            # views as well.
            self._manual.exchanged.add([value])
            return value
        if not callable(value) or (name.startswith("_") and name in _OF_FRAMEWORK):
            return value
        # A callable that is no method of an optimizer or scheduler knows nothing of other replicas.
        if isinstance(value, type) or not _is_method_of(value, owner):
            return value
        if name in _READS:
            return partial(_read, value)
        return partial(self._call, owner, name)

    def assign(self, owner: Any, name: str, value: Any) -> None:
        """What a step rebinds is the first replica's."""
        # All replicas run the same code: each of them would rebind it, so that `x += 1`
        # counted K times.
        if self.is_first:
            with viewed(None):
                setattr(owner, name, _mapped(value, self._owner_of))

    def _call(self, owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        def act(arguments: Any) -> Any:
            # Optimizers hold the owners' parameters; the replica has given its own.
            positional, named = _mapped(arguments, self._owner_of)
            return getattr(owner, name)(*positional, **named)

        result = self._manual.call_once(f"{self._name_of(owner)}.{name}()", (args, kwargs), act)
        return _mapped(result, self._mirror, self.replica.device)

    def _step(self, owner: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        # A step with a signature of its own is a call like any other: no closure of it is known.
        if args or (closure is not None and not callable(closure)):
            return self._call(owner, "step", closure, *args, **kwargs)
        if kwargs and closure is None:
            return self._call(owner, "step", **kwargs)

        def take_step(together: Callable[[], Any] | None) -> Any:
            if together is None:
                return owner.step(**kwargs)
            return owner.step(closure=together, **kwargs)

        result = self._manual.step_once(f"{self._name_of(owner)}.step()", closure, take_step)
        return _mapped(result, self._mirror, self.replica.device)

    def _name_of(self, owner: Any) -> str:
        """What replicas meet at: a step of one optimizer is none of another, which a branch may take instead."""
        if isinstance(owner, torch.amp.GradScaler):
            return "scaler"
        kind = "optimizer" if isinstance(owner, Optimizer) else "scheduler"
        number = self._manual.number_of(owner)
        if number is None:
            return kind
        return f"{kind} {number}"

    def _zero_grad(self, owner: Any, set_to_none: bool = True) -> None:
        """Of this replica's parameters only: the others do the same."""
        for group in self._groups_of(owner).mine:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = None if set_to_none else parameter.grad.detach().zero_()

    @contextmanager
    def _toggled(self, owner: Any, sync_grad: bool = True) -> Iterator[None]:
        """As ``LightningOptimizer.toggle_model``, on the replica's module."""
        self.module.toggle_optimizer(owner)
        yield
        self.module.untoggle_optimizer(owner)

    def _groups_of(self, owner: Any) -> "_Groups":
        # Lightning's wrapper and its optimizer must show the same dicts, whichever of them
        # the step asks.
        real = unwrapped_optimizer(owner)
        if id(real) not in self._groups:
            self._groups[id(real)] = _Groups(real, self._mirror, self.replica.device, is_first=self.is_first)
        return self._groups[id(real)]

    def _states_of(self, owner: Any) -> "_States":
        real = plain_attribute(owner, "state")
        if id(real) not in self._states:
            self._states[id(real)] = _States(self, real)
        return self._states[id(real)]

    def commit(self) -> None:
        """What this replica wrote into groups and states is written into the real ones."""
        for groups in self._groups.values():
            groups.commit()
        for states in self._states.values():
            states.commit()

    def owner_of(self, parameter: Any) -> Any:
        """The owner's copy of one of this replica's parameters."""
        return self._owner_of.get(id(parameter), parameter)

    def mine(self, owner: Any) -> Any:
        """This replica's copy of an owner's parameter."""
        return self._mirror.get(id(owner), owner)

    def speaks_for(self, owner: Any) -> bool:
        """Whether no replica with rows in this step has the owner's copy itself."""
        return all(view.mine(owner) is not owner for view in self._manual.views)

    def refresh(self) -> None:
        """After something happened to the real optimizers: this replica sees it."""
        for groups in self._groups.values():
            groups.refresh()


@contextmanager
def optimizers_checked() -> Iterator[None]:
    """An optimizer of a replica's parameters that was not known may not step on its own, for a while."""

    def check(optimizer: Optimizer, *_: Any) -> None:
        view = current_view()
        # One replica with all rows has the gradients of the batch, so its own optimizer
        # does no harm.
        if view is None or view.is_alone or acts_once(optimizer):
            return
        known = {id(parameter) for parameter in view.module.parameters()}
        held = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        if any(id(parameter) in known for parameter in held):
            raise WholeBatchError(
                f"It steps a {type(optimizer).__name__} on the module's parameters that neither "
                "configure_optimizers returned nor an attribute of the module holds.",
                "For all devices to take part, return it from configure_optimizers.",
            )

    # Process-wide, as such an optimizer may be made in the middle of the step.
    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


class _Groups:
    """The parameter groups of an optimizer with a replica's own parameters in them."""

    def __init__(self, real: Any, mirror: Mapping[int, Any], device: torch.device, *, is_first: bool) -> None:
        self._real = real
        self._mirror = mirror
        self._device = device
        self._is_first = is_first
        self._seen: list[dict[str, Any]] = []
        self.mine: list[dict[str, Any]] = []
        self.refresh()

    def refresh(self) -> None:
        """Takes over what the real groups hold now; the dicts stay the same objects."""
        real = plain_attribute(self._real, "param_groups")
        del self.mine[len(real) :]
        self.mine.extend({} for _ in range(len(real) - len(self.mine)))
        for group, mine in zip(real, self.mine, strict=True):
            params = [self._mirror.get(id(parameter), parameter) for parameter in group["params"]]
            # User code may hold a group over a meeting, so its dict is filled anew.
            mine.clear()
            mine.update({key: self._own(value) for key, value in group.items() if key != "params"}, params=params)
        self._seen = [dict(group) for group in self.mine]

    def _own(self, value: Any) -> Any:
        # What is changed in place, such as a learning rate in a tensor, must change once: only the
        # first replica has the real object.
        if self._is_first or not isinstance(value, Tensor | list | dict | set):
            return value
        if isinstance(value, Tensor):
            return value.detach().clone()
        return copy.copy(value)

    def commit(self) -> None:
        """Writes what was rebound into the real groups."""
        real = plain_attribute(self._real, "param_groups")
        for group, mine, seen in zip(real, self.mine, self._seen, strict=False):
            for key, value in mine.items():
                # Only what was rebound: a meeting may have changed the rest of the real group.
                if key != "params" and (key not in seen or seen[key] is not value):
                    group[key] = value
            for key in seen.keys() - mine.keys():
                group.pop(key, None)
        self._seen = [dict(group) for group in self.mine]


class _States(Mapping[Any, Any]):
    """The state of an optimizer by a replica's own parameters.

    The owner of a parameter has its real state, the other replicas have copies on their devices, so that what a step
    does to it is done once. Where the owner has no rows in this step, the first replica's copy counts.
    """

    def __init__(self, view: ReplicaView, real: Any) -> None:
        self._view = view
        self._real = real
        self._copies: dict[int, tuple[Any, Any]] = {}

    def __getitem__(self, key: Any) -> Any:
        owner = self._view.owner_of(key)
        if owner is key or (owner.device == self._view.replica.device and self._view.is_first):
            return self._real[owner]
        with _READING:
            if id(owner) not in self._copies:
                copied = _mapped(copy.deepcopy(self._real[owner]), {}, self._view.replica.device)
                self._copies[id(owner)] = owner, copied
            return self._copies[id(owner)][1]

    def __setitem__(self, key: Any, value: Any) -> None:
        owner = self._view.owner_of(key)
        if owner is key:
            self._real[owner] = value
        else:
            self._copies[id(owner)] = owner, value

    def __delitem__(self, key: Any) -> None:
        owner = self._view.owner_of(key)
        self._copies.pop(id(owner), None)
        if owner is key or self._view.is_first:
            self._real.pop(owner, None)

    def __iter__(self) -> Iterator[Any]:
        return iter([self._view.mine(key) for key in list(self._real)])

    def __len__(self) -> int:
        return len(self._real)

    def commit(self) -> None:
        """Writes the copies of states whose owners have no rows back; forgets the others."""
        for owner, copied in self._copies.values():
            # Where the owner has rows, its own replica has written the real state.
            if self._view.is_first and self._view.speaks_for(owner):
                self._real[owner] = _mapped(copied, {}, owner.device)
        self._copies = {}


def _read(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _READING, viewed(None):
        return method(*args, **kwargs)


def _is_method_of(value: Any, owner: Any) -> bool:
    """Bound to it, or to the optimizer that it wraps, or put on it from outside (schedulers do that to ``step``)."""
    bound = getattr(value, "__self__", None)
    return bound is not None and (bound is owner or isinstance(bound, Optimizer | LRScheduler))


def _mapped(value: Any, counterparts: Mapping[int, Any], device: torch.device | None = None) -> Any:
    """``value`` with parameters exchanged for their counterparts, and other tensors on ``device`` if given."""

    def exchange(tensor: Tensor) -> Any:
        if id(tensor) in counterparts:
            return counterparts[id(tensor)]
        # Results come from the owners' device; a parameter without a counterpart is the user's own.
        is_own = device is not None and not isinstance(tensor, nn.Parameter)
        if is_own:
            return tensor.to(device)
        return tensor

    return tree_map_only(Tensor, exchange, value)
