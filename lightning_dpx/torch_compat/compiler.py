"""How ``torch.compile`` has compiled a function, and with what; its modules are slow to import, so only where used."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.eval_frame import _TorchDynamoContext, innermost_backend
from torch._dynamo.symbolic_convert import tls as _tracing  # by thread


def dynamo_config() -> Any:
    """The settings of ``torch.compile``; slow to import, so only where they are used."""
    from torch._dynamo import config

    return config


def functorch_config() -> Any:
    """The settings of ``torch.compile``'s autograd, likewise."""
    from torch._functorch import config

    return config


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """How a function was compiled.

    Attributes:
        function: What was compiled.
        backend: What compiles its graphs.
        fullgraph: Whether it has to be one graph.
        dynamic: Whether sizes may vary.
    """

    function: Any
    backend: Any
    fullgraph: bool
    dynamic: bool | None


def compile_settings_of(compiled: Any) -> CompileSettings | None:
    """How ``compiled`` was compiled, if ``torch.compile`` has made it."""
    # What torch.compile returns is a plain function, whose settings are in its closure alone.
    original = getattr(compiled, "_torchdynamo_orig_callable", None)
    if original is None or not inspect.isfunction(compiled):
        return None
    context = context_of(compiled)
    if context is None:
        return None
    callback: Any = context.callback
    return CompileSettings(original, innermost_backend(callback), context.fullgraph, context._dynamic)


def context_of(compiled: Any) -> Any:
    """What holds the settings of a function that ``torch.compile`` has made; ``None`` for others."""
    # A method that was decorated is bound to its object.
    function = getattr(compiled, "__func__", compiled)
    if not inspect.isfunction(function):
        return None
    context = inspect.getclosurevars(function).nonlocals.get("self")
    return context if isinstance(context, _TorchDynamoContext) else None


def is_compiled_function(function: Any) -> bool:
    """Whether ``torch.compile`` has made ``function``, and its calls can be watched."""
    return context_of(function) is not None


@dataclass(frozen=True, slots=True, eq=False)
class CompiledFunctionHandle:
    """Takes off what :func:`hook_compiled_function` has put on.

    Attributes:
        context: What holds the settings of the function.
        enter: What was put on.
    """

    context: Any
    enter: Callable[[], Callable[[], None]]

    def remove(self) -> None:
        """From the next call on it is not called."""
        self.context.enter_exit_hooks = [hook for hook in self.context.enter_exit_hooks if hook is not self.enter]


def hook_compiled_function(compiled: Any, enter: Callable[[], Callable[[], None]]) -> CompiledFunctionHandle:
    """Has ``enter`` called before each call of a compiled function, also of one that runs uncompiled.

    Args:
        compiled: What ``torch.compile`` has made of a function.
        enter: Returns what is called when that call is over, also where it fails.

    Raises:
        ValueError: ``compiled`` is none; see :func:`is_compiled_function`.
    """
    context = context_of(compiled)
    if context is None:
        raise ValueError(f"A function that torch.compile has made is needed, and {compiled!r} is none.")
    # Other threads may be going through the list, so each change makes another one.
    context.enter_exit_hooks = [*context.enter_exit_hooks, enter]
    return CompiledFunctionHandle(context, enter)


def compiler_apart(backend: Any, *, fullgraph: bool, dynamic: bool | None) -> Any:
    """Compiles functions; what it has compiled does not count among the recompilations of others.

    Torch 2.12 and before count all of them together.
    """
    from torch._dynamo import optimize

    apart = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
    return optimize(backend=backend, nopython=fullgraph, dynamic=dynamic, **apart)


def never_compile(names: Iterable[str]) -> None:
    """Has ``torch.compile`` leave the code of packages and files alone; what it calls may be compiled all the same.

    Args:
        names: As one imports them.
    """
    # The public ``torch.compiler.disable`` is for one function, and costs at each of its calls.
    from torch._dynamo import trace_rules

    for name in names:
        trace_rules.add(name)


def compiles_one_graph() -> bool:
    """Whether ``torch.compile`` traces code in this thread, and may not break its graph: ``fullgraph=True``."""
    translator = getattr(_tracing, "current_tx", None)
    return translator is not None and bool(translator.one_graph or translator.error_on_graph_break)


def was_traced(parameter: torch.Tensor) -> bool:
    """Whether compiled code uses ``parameter``, which calls no hooks that modules around it got later on."""
    return hasattr(parameter, "_dynamo_static_input_type")


def compile_backends() -> list[str]:
    """The names that ``torch.compile`` knows, likewise."""
    from torch._dynamo import list_backends

    return list(list_backends(exclude_tags=()))


def find_compile_backend(name: str) -> Any:
    """What compiles under ``name``, likewise."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def inductor_compiler() -> str:
    """The C++ compiler that Inductor uses, likewise."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()
