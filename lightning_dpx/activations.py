"""What a model keeps between forward and backward: which module call keeps how many bytes, in the order of forward.

Autograd reports every tensor that it saves to a pack hook; forward hooks tell which module call is running. Nothing is
changed: the module, and random generators, are put back after the traced run.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_dpx.arguments import check_is_module
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.python_objects.compiled import uncompiled
from lightning_dpx.python_objects.leave_no_trace import BeforeWrites, untouched
from lightning_dpx.python_objects.overrides import preserve_modes
from lightning_dpx.torch_compat import key_of, tree_leaves, tree_map_only

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Activation:
    """One tensor that backward keeps.

    Attributes:
        name: The path of the innermost module that was running, with ``#2``, ``#3``, ... for its later calls, and
            ``:1``, ``:2``, ... for what it keeps beside the first tensor. The root module's own are under ``""``.
        module: The path alone.
        shape: Of the tensor that was saved.
        dtype: Of the tensor that was saved.
        num_bytes: Of its storage; 0 where an earlier activation keeps the same one.
        device: Where it is.
        operator: The autograd node that keeps it.

    Examples:
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        >>> kept = dpx.trace_activations(net, torch.ones(4, 8))
        >>> [(one.name, one.shape, one.num_bytes) for one in kept]
        [('1', (4, 16), 256), ('2', (4, 16), 0)]
    """

    name: str
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    device: torch.device
    operator: str


class Inputs(NamedTuple):
    """What the step of a module is called with.

    Attributes:
        positional: The inputs of ``forward``; the batch, for a ``training_step``.
        named: Those that ``forward`` gets by keyword.
    """

    positional: tuple[Any, ...]
    named: Mapping[str, Any]


def inputs_of(module: nn.Module, batch: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Inputs:
    """``batch`` and ``kwargs``, as a step of ``module`` gets them.

    Raises:
        ConfigurationError: ``kwargs`` are no keywords, or the module's step has none.
    """
    if kwargs is None:
        return Inputs(batch, {})
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        given = list(kwargs) if isinstance(kwargs, Mapping) else type(kwargs).__name__
        raise ConfigurationError(f"kwargs of {given} is not allowed; give the keyword inputs of forward by name.")
    if kwargs and hasattr(module, "training_step"):
        raise ConfigurationError(
            f"kwargs names {', '.join(kwargs)}, and a training_step gets nothing by keyword; give its batch alone."
        )
    return Inputs(batch, dict(kwargs))


def trace_activations(module: nn.Module, *batch: Any, kwargs: Mapping[str, Any] | None = None) -> list[Activation]:
    """The activations of one forward, in order.

    Args:
        module: Any module. One with a ``training_step`` runs that, as Lightning does, with the batch and index 0.
        batch: The inputs of ``module.forward``; the batch, for a ``training_step``.
        kwargs: Those that ``module.forward`` gets by keyword.

    Returns:
        One entry per saved tensor, without parameters, buffers and the inputs themselves.

    Raises:
        ConfigurationError: ``module`` is none, or ``kwargs`` are none of its step. Errors of that are passed on.

    Examples:
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        >>> sum(one.num_bytes for one in dpx.trace_activations(net, torch.ones(4, 8)))
        256
    """
    check_is_module(module)
    inputs = inputs_of(module, batch, kwargs)
    return trace_run(module, step_on(module, inputs), tree_leaves(inputs))


def step_on(module: nn.Module, inputs: Inputs) -> Run:
    """A training step of ``module``: its own, as Lightning calls it, or its ``forward``."""
    step = getattr(module, "training_step", None)
    if step is None:
        return lambda: module(*inputs.positional, **inputs.named)
    batch = inputs.positional
    # Lightning gives a step one batch, however many tensors are in it.
    return lambda: step(*arguments_of_step(step, batch[0] if len(batch) == 1 else batch))


def arguments_of_step(step: Callable[..., Any], batch: Any, index: int = 0) -> tuple[Any, ...]:
    """What Lightning calls ``training_step`` with: the batch, and its index if it takes a second argument.

    Args:
        step: The bound method; its arguments may have any names.
        batch: The first one.
        index: The second one.
    """
    # By the number of arguments, as they may have any names.
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    takes_any = inspect.Parameter.VAR_POSITIONAL in kinds
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # A step may leave the index out, and Lightning then calls it with the batch alone.
    if takes_any or sum(kind in by_position for kind in kinds) > 1:
        return (batch, index)
    return (batch,)


def example_run(module: nn.Module, device: torch.device) -> Run | None:
    """``forward`` with the module's ``example_input_array`` in evaluation mode, as Lightning's summary runs it."""
    example = getattr(module, "example_input_array", None)
    if example is None:
        return None
    return run_on_example(module, example, device)


def run_on_example(module: nn.Module, example: Any, device: torch.device) -> Run:
    """``forward`` with ``example`` on ``device``, as :func:`example_run` has it."""

    def run() -> Any:
        inputs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), example)
        # A part may have been frozen in evaluation mode.
        with preserve_modes(module.modules()):
            module.eval()  # batch normalization refuses to train on an example of one row
            if isinstance(inputs, dict):
                return module(**inputs)
            # As Lightning hands an example on: a dict by keyword, a list or a tuple by position.
            if isinstance(inputs, list | tuple):
                return module(*inputs)
            return module(inputs)

    return run


def trace_run(module: nn.Module, run: Run, inputs: list[Any]) -> list[Activation]:
    """The activations of ``run``, which calls ``module`` or parts of it."""
    found: list[Activation] = []
    known = [*module.parameters(), *module.buffers(), *(leaf for leaf in inputs if isinstance(leaf, torch.Tensor))]
    # They are there with or without a backward, and so are views of them.
    given = {key_of(tensor.untyped_storage()) for tensor in known}
    kept: dict[int, torch.UntypedStorage] = {}  # holds them, so that no address is used twice
    calls = CallStack(module)
    counts = Counter[str]()
    saved: list[list[torch.Tensor]] = []

    # Autograd gets a box that can be emptied, in the place of the tensor.
    def pack(tensor: torch.Tensor) -> list[torch.Tensor]:
        saved.append([tensor])
        storage = tensor.untyped_storage()
        # Boxed all the same, and only not listed: emptying the box lets go of its part
        # of the graph.
        if key_of(storage) in given:
            return saved[-1]
        number = counts[calls.name]
        counts[calls.name] += 1
        name = f"{calls.name}:{number}" if number else calls.name
        size = 0 if key_of(storage) in kept else storage.nbytes()
        kept[key_of(storage)] = storage
        # A leaf, such as an input that needs a gradient, was made by no operator.
        operator = tensor.grad_fn.name() if tensor.grad_fn is not None else "leaf"
        found.append(Activation(name, calls.path, tuple(tensor.shape), tensor.dtype, size, tensor.device, operator))
        return saved[-1]

    # Callers may be in `no_grad`, where nothing would be saved.
    with preserve_module_state(module), calls.tracked(), torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box[0]):
            run()
    for box in saved:
        box.clear()  # a graph that never runs backward and holds its own outputs would never be freed
    return found


class CallStack:
    """Which module call is running, by forward hooks."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._stack: list[tuple[str, int]] = [("", 1)]
        self._calls: Counter[str] = Counter()

    @property
    def path(self) -> str:
        """The innermost running module."""
        return self._stack[-1][0]

    @property
    def name(self) -> str:
        """The path, with the number of the call from the second one on."""
        path, call = self._stack[-1]
        if call == 1:
            return path
        return f"{path}#{call}"

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """Follows the calls for a while."""
        handles = []
        for path, child in self._module.named_modules():
            # What the module itself keeps goes by the empty path, also where a step calls its parts
            # past its forward.
            if child is self._module:
                continue

            def enter(_module: nn.Module, _inputs: Any, path: str = path) -> None:
                self._calls[path] += 1
                self._stack.append((path, self._calls[path]))

            def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
                self._stack.pop()

            handles.append(child.register_forward_pre_hook(enter))
            # Also after an error, or later calls would be taken for parts of the one that failed.
            handles.append(child.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def preserve_module_state(module: nn.Module) -> Iterator[None]:
    """What runs in here leaves no trace; see :func:`lightning_dpx.python_objects.leave_no_trace.untouched`."""
    # The mode ends first, so that what is put back does not count as a write of the run.
    with uncompiled(), untouched(module) as writes, BeforeWrites(writes):
        yield
