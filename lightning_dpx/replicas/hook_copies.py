"""Hooks of the user on replicas: what is put on the user's module, or taken off it, in the middle of a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_dpx.errors import ReplicationError
from lightning_dpx.python_objects.module_hooks import FLAGS, OF_MODULES, is_ours
from lightning_dpx.replicas.parameter_hooks import ParameterHooks
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.torch_compat import adopt_backward_hooks_kind


class HookCopies:
    """The hooks of the first replica's submodules, and copies of them on the others.

    Args:
        replicas: All of them, the first one first.
        modules: The submodules that are looked after, by the index of a replica and in the same order.
        translate: A hook of the first replica for another one.

    Attributes:
        are_outdated: Whether hooks may capture containers of which replicas have got their own since.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        modules: Mapping[int, Sequence[nn.Module]],
        translate: Callable[[Replica, Any], Any],
    ) -> None:
        self._root = replicas[0]
        self._others = list(replicas[1:])
        self._modules = modules
        self._translate = translate
        self._hooks = [_users_hooks(child) for child in modules[0]]
        self.are_outdated: bool = False
        self.accept_those_of_parameters()

    def accept_those_of_parameters(self) -> None:
        """Accepts the hooks that parameters have now; it has been seen to that they do no harm."""
        self._of_parameters = ParameterHooks(self._root.parameters)

    def check_parameters(self) -> None:
        """Refuses hooks that parameters have got since they were last accepted.

        Raises:
            ReplicationError: a parameter has a hook that it did not have when they were last accepted.
        """
        index = self._of_parameters.added()
        if index is None:
            return
        parameter = self._root.parameters[index]
        name = next(name for name, other in self._root.module.named_parameters() if other is parameter)
        raise ReplicationError(
            f"Parameter {name} got a hook after setup, which would see the gradient of one replica only; "
            "register it before fit (configure_model), so that every replica has it."
        )

    def follow(self) -> None:
        """The replicas get the hooks that the first one's submodules have now, where those have changed."""
        modules = self._modules[0]
        # The first part is for hooks that were there and have been removed since.
        if not any(self._hooks) and not any(any(map(hooks_of, modules)) for hooks_of in OF_MODULES):
            self.are_outdated = False
            return
        for index, child in enumerate(modules):
            hooks = _users_hooks(child)
            if hooks != self._hooks[index] or (hooks and self.are_outdated):
                self._hooks[index] = hooks
                self._send(index, hooks)
        self.are_outdated = False

    def _send(self, index: int, hooks: dict[tuple[int, int], Any]) -> None:
        child = self._modules[0][index]
        for replica in self._others:
            counterpart = self._modules[replica.index][index]
            for kind, hooks_of in enumerate(OF_MODULES):
                held = hooks_of(counterpart)
                # Hooks of plans and shifts are each replica's own, and stay.
                of_user = [number for number, hook in held.items() if not is_ours(hook)]
                for number in of_user:
                    del held[number]
                # Under the same numbers: the flags beside them, which go by number, apply as well.
                for (other, number), hook in hooks.items():
                    if other == kind:
                        held[number] = self._translate(replica, hook)
            for flags_of in FLAGS:
                flags_of(counterpart).update(flags_of(child))
            # A flag of the module, not of the hook, as both kinds are kept in one dict.
            adopt_backward_hooks_kind(counterpart, child)


def _users_hooks(child: nn.Module) -> dict[tuple[int, int], Any]:
    """The user's hooks by kind, as in ``OF_MODULES``, and number; without those of a plan or a shift."""
    found: dict[tuple[int, int], Any] = {}
    for kind, hooks_of in enumerate(OF_MODULES):
        for number, hook in hooks_of(child).items():
            if not is_ours(hook):
                found[kind, number] = hook
    return found
