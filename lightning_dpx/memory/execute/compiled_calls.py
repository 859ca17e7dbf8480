"""Calls of compiled modules: hooks round the compiled code, and the code itself.

``module.compile()`` has a module's hooks compiled with it, so ours are put round its compiled call instead. What
``torch.compile(module)`` returns calls its own hooks outside of the code.
"""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_dpx.torch_compat import OptimizedModule, compiled_call_of, original_of

_ATTRIBUTE = "_compiled_call_impl"
Enter = Callable[[nn.Module, Any, Any], None]
Leave = Callable[[nn.Module, Any, Any], None]


class _HookedCall:
    """The compiled call of a module, with hooks; copies of the module have the call without them.

    Args:
        module: Whose.
        code: What ``module.compile()`` has made.
    """

    def __init__(self, module: nn.Module, code: Callable[..., Any]) -> None:
        self.code = code
        self.hooks: list[tuple[Enter, Leave]] = []
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The pairs that were entered are left again, whatever comes or goes meanwhile.
        hooks = list(self.hooks)
        for enter, _ in reversed(hooks):
            enter(self._module, args, kwargs)
        # As ``always_call=True`` does it for forward hooks: a name that is entered is left as well.
        output = None
        try:
            output = self.code(*args, **kwargs)
        finally:
            for _, leave in hooks:
                leave(self._module, args, output)
        return output

    # The hooks are those of a plan on this very module.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.code, memo)


class CompiledCallHandle:
    """Takes a pair of hooks off again."""

    def __init__(self, module: nn.Module, hooks: tuple[Enter, Leave]) -> None:
        self._module = module
        self._hooks = hooks

    def remove(self) -> None:
        """The last pair leaves the module as ``module.compile()`` had left it."""
        # After another ``module.compile()``, or a ``remove`` before, there is nothing to take off.
        hooked = compiled_call_of(self._module)
        if not isinstance(hooked, _HookedCall) or self._hooks not in hooked.hooks:
            return
        hooked.hooks.remove(self._hooks)
        if not hooked.hooks:
            vars(self._module)[_ATTRIBUTE] = hooked.code


def hook_compiled_call(module: nn.Module, enter: Enter, leave: Leave) -> CompiledCallHandle:
    """Hooks round the compiled call of ``module``, the later ones inside, also called where it fails.

    Args:
        module: One on which ``compile()`` was called.
        enter: Gets the module, the arguments by position and those by name.
        leave: Gets the module, the arguments by position and the output, ``None`` where there is none.
    """
    hooked = compiled_call_of(module)
    if not isinstance(hooked, _HookedCall):
        hooked = _HookedCall(module, hooked)
        vars(module)[_ATTRIBUTE] = hooked
    # The first pair of the list is entered last and left first.
    hooked.hooks.insert(0, (enter, leave))
    return CompiledCallHandle(module, (enter, leave))


def code_of(module: nn.Module) -> Callable[..., Any]:
    """What a call of ``module`` runs between its hooks: compiled code where it is compiled, else its forward."""
    # A call of the module itself would run its hooks once more.
    compiled = compiled_call_of(module)
    if compiled is None:
        forward: Callable[..., Any] = module.forward
        return forward
    code: Callable[..., Any] = compiled.code if isinstance(compiled, _HookedCall) else compiled
    return code


def own_code(module: nn.Module) -> dict[str, Any]:
    """What ``module`` itself calls that may be compiled, by the name of the attribute that holds it."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        code = value.code if isinstance(value, _HookedCall) else value
        if callable(code) and not isinstance(code, nn.Module):
            found[name] = code
    return found


def exchange_code(module: nn.Module, name: str, code: Callable[..., Any]) -> None:
    """Has ``module`` call ``code`` instead of what the attribute holds, between the same hooks."""
    held = vars(module)[name]
    if isinstance(held, _HookedCall):
        held.code = code
    else:
        vars(module)[name] = code


def uncompiled_of(module: nn.Module) -> nn.Module:
    """What ``torch.compile(module)`` was given, or ``module`` itself."""
    if isinstance(module, OptimizedModule):
        return original_of(module)
    return module
