"""Methods that one module object has instead of its class's while its replica runs a step, and no longer."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

_NAMES: set[str] = set()  # all that were ever given


class InstanceMethods:
    """Within the block ``module.name`` is ``methods[name]``; afterwards it is what it was.

    A step that was abandoned leaves its block late, perhaps when another step has put its own methods on the module:
    those stay.

    Args:
        module: Whose methods.
        methods: By name.
    """

    __slots__ = ("_before", "_methods", "_own")

    def __init__(self, module: nn.Module, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._own = vars(module)
        self._methods = methods
        self._before: dict[str, Any] = {}

    def __enter__(self) -> None:
        own = self._own
        for name, method in self._methods.items():
            # What an abandoned step has left there is not the user's, and is not to come back.
            if name in own and not _is_ours(own[name]):
                self._before[name] = own[name]
            own[name] = method
            _NAMES.add(name)

    def __exit__(self, *_: object) -> None:
        own = self._own
        for name, method in self._methods.items():
            if own.get(name) is not method:
                continue
            if name in self._before:
                own[name] = self._before[name]
            else:
                del own[name]


def remove_instance_methods(module: nn.Module) -> None:
    """Takes off what a step that never left its block has left there."""
    for child in module.modules():
        own = vars(child)
        for name in _NAMES & own.keys():
            if _is_ours(own[name]):
                del own[name]


def _is_ours(value: Any) -> bool:
    """A bound method of an object of this package; what the user has put there is not."""
    owner = getattr(value, "__self__", None)
    return type(owner).__module__.startswith("lightning_dpx.")
