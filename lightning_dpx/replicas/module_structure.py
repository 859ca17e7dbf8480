"""What the user's module was made of when its replicas were: where it has changed, they are made anew."""

import operator

from lightning_dpx.replicas.parameter_hooks import ParameterHooks
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.torch_compat import buffers_of

_SHAPE = operator.attrgetter("shape")  # mapped over every parameter of every step, not looped
_KEYS = operator.methodcaller("keys")  # what torch.jit has for a dict is asked for them alone


class ModuleStructure:
    """The parts of the user's module, the shapes of its parameters, the names of its buffers, and its hooks.

    Args:
        root: The replica that is the user's own module.
    """

    def __init__(self, root: Replica) -> None:
        self._root = root
        self._shapes = [parameter.shape for parameter in root.parameters]
        self._names = _names_of_buffers(root)
        self._hooks = ParameterHooks(root.parameters)

    @property
    def has_changed(self) -> bool:
        """Whether the module has other parts, or hooks of parameters, than then."""
        root = self._root
        # The cheap questions first: in nearly every step all are answered by no.
        if self._hooks.changed() is not None or root.has_other_structure():
            return True
        # A parameter may keep its identity and get other data, as pruning and lazy modules do.
        if not all(map(operator.eq, map(_SHAPE, root.parameters), self._shapes)):
            return True
        return _names_of_buffers(root) != self._names

    @property
    def name_with_other_hooks(self) -> str | None:
        """A parameter that got or lost a hook since then."""
        index = self._hooks.changed()
        if index is None:
            return None
        parameter = self._root.parameters[index]
        named = self._root.module.named_parameters()
        return next((name for name, other in named if other is parameter), "")


class FixedStructure:
    """The structure of a module that is its only replica, whose changes nothing has to follow."""

    has_changed = False
    name_with_other_hooks = None


def _names_of_buffers(replica: Replica) -> list[tuple[str, ...]]:
    return list(map(tuple, map(_KEYS, filter(None, map(buffers_of, replica.modules)))))
