"""Hooks of modules that ``torch.compile`` looks into: all other code of this package it leaves alone."""

import warnings
from typing import Any

import torch
from torch import nn

from lightning_dpx.torch_compat import compiles_one_graph


class AsideInOneGraph:
    """A hook before the forward, and one behind it, that a compiler may leave out that has to make one graph of all.

    Otherwise, with a break of the graph before and behind, compiled code calls them as they are.

    Args:
        told: The warning where they are left out; empty for hooks that must not be, which such a compiler refuses.
    """

    def __init__(self, told: str) -> None:
        self._told = told

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # The compiler runs the second one when it traces, and takes its answer for a constant.
        if torch.compiler.is_compiling() and self._told and _makes_one_graph():
            _tell(self._told)
            return
        self.begin(module, args, kwargs)

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Behind the forward."""
        if torch.compiler.is_compiling() and self._told and _makes_one_graph():
            return
        self.end(module, inputs, output)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """What is done before the forward."""
        raise NotImplementedError

    def end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """What is done behind it."""
        raise NotImplementedError


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _makes_one_graph() -> bool:
    return compiles_one_graph()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tell(told: str) -> None:
    warnings.warn(told, stacklevel=2)
