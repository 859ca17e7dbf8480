"""What autograd and its profiler do, beyond their public functions."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import graph as _graph
from torch.nn.utils import parametrize as _parametrize
from torch.utils import checkpoint

from lightning_dpx.torch_compat.names import is_torch_function_mode_enabled, top_saved_tensors_hooks


def run_backward(tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """``torch.autograd.backward`` for gradients that are known to have the shapes of their tensors.

    Its checks of that, in Python, are a third of the time of a small backward: 20 of 60 us for four losses.
    """
    if is_torch_function_mode_enabled() or any(type(tensor) is not torch.Tensor for tensor in tensors):
        torch.autograd.backward(tensors, gradients)  # modes and subclasses have a say in it
        return
    options = {"allow_unreachable": True, "accumulate_grad": True}
    # The two flags are those of torch.autograd.backward: keep no graph, and make none
    # of the backward.
    _graph._engine_run_backward(tuple(tensors), tuple(gradients), False, False, (), **options)


def roots_of(given: Any) -> tuple[Any, ...]:
    """One tensor or several, as functions of autograd take them, as a tuple."""
    # A GradientEdge is a named tuple, and one root.
    is_several = isinstance(given, list | tuple) and not isinstance(given, _graph.GradientEdge)
    if is_several:
        return tuple(given)
    return (given,)


def nodes_of_graph(roots: Iterable[Any]) -> Iterator[Any]:
    """The nodes that a backward from the nodes ``roots`` runs, each once; those of leaves have a ``variable``."""
    # One after the other: a graph may be deeper than Python's stack.
    waiting = list(roots)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield node
            further = {following for following, _ in node.next_functions} - seen
            seen |= further
            waiting += further


def nodes_so_far() -> int:
    """How many nodes this thread has made: the number that :func:`number_of` has for the next one."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def number_of(node: Any) -> int:
    """How many nodes its thread had made before ``node``; very large for the node of a leaf."""
    number: int = node._sequence_nr()
    return number


def is_in_checkpoint() -> bool:
    """Whether ``torch.utils.checkpoint`` has what autograd saves right now, and counts on the same once more."""
    top = top_saved_tensors_hooks(True)
    return top is not None and getattr(top[0], "__module__", "") == checkpoint.__name__


def parametrizations_are_cached() -> bool:
    """Whether this is inside of ``torch.nn.utils.parametrize.cached()``, in any thread."""
    return _parametrize._cache_enabled > 0


def profiler_is_enabled() -> bool:
    """Whether a profiler runs in this thread."""
    running: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return running


def has_legacy_profiler() -> bool:
    """Whether this torch has the older profiler."""
    # Asked before it is used, as it is the older one of two and may go.
    return hasattr(torch.autograd, "_enable_profiler_legacy")


def start_legacy_profiler(config: Any) -> None:
    """Starts the older profiler in this thread."""
    torch.autograd._enable_profiler_legacy(config)  # type: ignore[attr-defined]


def end_legacy_profiler() -> Any:
    """Ends it; returns its events, a list per thread."""
    return torch.autograd._disable_profiler_legacy()  # type: ignore[attr-defined]
