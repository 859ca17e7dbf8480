"""The gradients of a group's parameters: computed on every replica, and summed into the module.

backward of each replica --> its own gradients --> reducer --> those of the module, the first replica
                                                               "write": these; "add": added to the earlier ones
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from lightning_dpx.group.arguments import GradReq
from lightning_dpx.group.parameter_hooks import ParameterHookCalls
from lightning_dpx.reducers import GradientReducer
from lightning_dpx.replicas import ReplicaSet
from lightning_dpx.replicas.gradient_addition import added_gradient


class GroupGradients:
    """What becomes of the gradients of each parameter.

    Args:
        replicas: Of the group.
        reducer: Sums the gradients of the replicas.
        requests: What is done with the gradient of each parameter, by name.
        fixed_params: Names of parameters that get none.
        otherwise: What is done with those of parameters that the module has got since.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        reducer: GradientReducer,
        requests: Mapping[str, GradReq],
        fixed_params: Collection[str],
        otherwise: GradReq = "write",
    ) -> None:
        self._set = replicas
        self._reducer = reducer
        self._requests = requests
        self._fixed_params = fixed_params
        self._otherwise = otherwise
        self.follow_module()

    def follow_module(self) -> None:
        """The module may have other parameters than before."""
        # By index: the replicas have their parameters in the same order.
        self._fixed: list[int] = []
        self._names: list[str] = []
        for index, (name, _) in enumerate(self._set.root.module.named_parameters()):
            self._names.append(name)
            # Autograd is told to leave out both; they differ only in how users write it.
            if name in self._fixed_params or self._request_of(name) == "null":
                self._fixed.append(index)

    def _request_of(self, name: str) -> GradReq:
        return self._requests.get(name, self._otherwise)

    @property
    def are_wanted(self) -> bool:
        """Whether any parameter gets a gradient."""
        return any(request != "null" for request in self._requests.values())

    @contextmanager
    def without_fixed(self) -> Iterator[None]:
        """A forward, in which autograd keeps nothing for the gradients of fixed parameters."""
        # Only while the graph is made: a group that shares them may want their gradients.
        candidates = [replica.parameters[index] for replica in self._set.replicas for index in self._fixed]
        paused = [parameter for parameter in candidates if parameter.requires_grad]
        try:
            for parameter in paused:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in paused:
                parameter.requires_grad_(True)

    @contextmanager
    def of_a_backward(self) -> Iterator[ParameterHookCalls]:
        """A backward and its :meth:`reduce`; an error leaves nothing of it on the module."""
        accumulated: dict[nn.Parameter, torch.Tensor | None] = {}
        for name, parameter in self._set.root.module.named_parameters():
            if self._request_of(name) == "null":
                continue
            # Gradients are written into the parameter one by one, so those of earlier steps wait
            # beside it.
            accumulated[parameter] = parameter.grad if self._request_of(name) == "add" else None
            parameter.grad = None
        # The other replicas gave theirs away in the last sum, unless users have walked outputs by themselves.
        self._forget_summed()
        hooks = ParameterHookCalls(self._set.replicas)
        try:
            with hooks.held_back():
                yield hooks
        except BaseException:
            self._forget_summed()
            _put_back(accumulated)
            raise
        _accumulate(accumulated, hooks)

    def _forget_summed(self) -> None:
        # Left there they would be added once more in the next step.
        for replica in self._set.primaries[1:]:
            replica.module.zero_grad(set_to_none=True)

    def reduce(self) -> None:
        """Sums the gradients of all replicas into those of the module."""
        # Replicas of further micro-batches share the parameters of the first on their device.
        primaries = self._set.primaries
        columns = [replica.parameters for replica in primaries]
        owners = [0] * len(columns[0])  # the user's optimizer steps on the module itself
        gradients = []
        for column in columns:
            # None stays None: a parameter that no replica has used gets no gradient, as on one device.
            gradients.append([parameter.grad for parameter in column])
        summed = self._reducer.reduce(gradients, owners=owners, names=self._names)
        self._forget_summed()
        for parameter, grad in zip(columns[0], summed, strict=True):
            parameter.grad = grad


def _put_back(accumulated: Mapping[nn.Parameter, torch.Tensor | None]) -> None:
    for parameter, grad in accumulated.items():
        parameter.grad = grad


def _accumulate(accumulated: Mapping[nn.Parameter, torch.Tensor | None], hooks: ParameterHookCalls) -> None:
    """Adds the gradients of this step to those of earlier ones; an error of a hook leaves these as they were."""
    # What no row has used has no gradient, and its hooks are not called.
    hooked = {parameter: parameter.grad for parameter in accumulated if hooks.are_on(parameter)}
    sums = {parameter: grad for parameter, grad in hooked.items() if grad is not None and parameter.requires_grad}
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for earlier in accumulated.values() if sums else ():
        # They are written in place, and the hooks come after that.
        if earlier is not None:
            copies[earlier] = earlier.clone()
    for parameter, earlier in accumulated.items():
        # Autograd itself adds up where it calls hooks.
        parameter.grad = earlier if parameter in sums else _sum_of(earlier, parameter.grad)
    if not sums:
        return
    try:
        hooks.accumulate(sums)
    except BaseException:
        with torch.no_grad():
            for earlier, copy in copies.items():
                earlier.copy_(copy)
        _put_back(accumulated)
        raise


@torch.no_grad()
def _sum_of(total: torch.Tensor | None, grad: torch.Tensor | None) -> torch.Tensor | None:
    """The gradients of earlier steps and of this one, of which either may be missing."""
    if total is None or grad is None:
        if total is None:
            return grad
        return total
    return added_gradient(total, grad)
