"""Compiled parts that save less: torch's partitioner decides anew what is saved, and the code is compiled once more.

By itself the partitioner lets compiled code save what is fastest. ``activation_memory_budget`` is the share of those
bytes that it may save; the rest is computed again within the compiled backward, fused with what is there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_dpx.memory.execute.compiled_calls import exchange_code, own_code
from lightning_dpx.torch_compat import CompileSettings, compile_settings_of, compiler_apart, functorch_config


@dataclass(frozen=True)
class _Within:
    """A backend that may save a share of what it saves by itself.

    Args:
        backend: What compiles.
        share: From 0 to 1.
    """

    backend: Any
    share: float

    def __call__(self, graph: Any, inputs: Any) -> Any:
        with functorch_config().patch(activation_memory_budget=self.share):
            return self.backend(graph, inputs)


class _Compilers:
    """What compiles within a share: one for all parts that were compiled alike, as equal parts are one code."""

    def __init__(self) -> None:
        self._known: list[tuple[_Within, bool, bool | None, Any]] = []  # backends may not be hashable

    def compiled(self, settings: CompileSettings, share: float) -> Any:
        """The function of ``settings``, compiled anew when it is called first."""
        key = _Within(settings.backend, share), settings.fullgraph, settings.dynamic
        for *known, compiler in self._known:
            if tuple(known) == key:
                return compiler(settings.function)
        compiler = compiler_apart(key[0], fullgraph=settings.fullgraph, dynamic=settings.dynamic)
        self._known.append((*key, compiler))
        return compiler(settings.function)


_compilers = _Compilers()


class RecompiledParts:
    """The compiled parts of a module, each with a share of the bytes that it would save by itself.

    Args:
        module: The root.
        shares: By the path of the part.

    Attributes:
        refused: Parts that save what they did, and why.
    """

    def __init__(self, module: nn.Module, shares: Mapping[str, float]) -> None:
        self.refused: dict[str, str] = {}
        self._before: list[tuple[nn.Module, str, Any]] = []
        parts = dict(module.named_modules())
        for path, share in shares.items():
            changed = False
            for name, code in own_code(parts[path]).items():
                settings = compile_settings_of(code)
                if settings is not None:
                    exchange_code(parts[path], name, _compilers.compiled(settings, share))
                    self._before.append((parts[path], name, code))
                    changed = True
            if not changed:
                self.refused[path] = "it is not compiled, or not by torch.compile alone"

    def remove(self) -> None:
        """The parts run the code that they had."""
        for part, name, code in reversed(self._before):
            exchange_code(part, name, code)
        self._before = []
