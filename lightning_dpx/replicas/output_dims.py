"""Along which dim each output of a module has its rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.replicas.batch_reading import BatchDim
from lightning_dpx.replicas.containers import join_path, named_nodes

_OUTPUT = "output"
_WHOLE = -1


@dataclass(frozen=True, slots=True)
class OutputDims:
    """The batch dims of outputs, by path.

    (hidden, (state, cell))  of an LSTM with batch_first: {"": 0, "1": 1}

    Attributes:
        named: By path in the outputs (``"1.0"``, ``"logits"``); what lies within has that of the nearest path that is
            named. ``""`` is for all others, and -1 for an output that has no rows and is the same on all replicas.
    """

    named: Mapping[str, int]

    @classmethod
    def read(cls, batch_dim: BatchDim) -> Self:
        """Those that a group's ``batch_dim`` gives: ``{"output": 0, "output.1": 1}``."""
        # What is given whole is an input: outputs are those of slices.
        if isinstance(batch_dim, int):
            return cls({"": max(batch_dim, 0)})
        named = {"": 0}
        for path, dim in batch_dim.items():
            kind, _, inner = path.partition(".")
            if kind == _OUTPUT:
                named[inner] = dim if inner else max(dim, 0)
        return cls(named)

    def of(self, path: str) -> int:
        """The batch dim of the output at ``path``, or -1."""
        while path not in self.named:
            path, _, _ = path.rpartition(".")
        return self.named[path]

    def is_whole(self, path: str) -> bool:
        """Whether the output at ``path`` has no rows."""
        return self.of(path) == _WHOLE

    def check(self, output: Any) -> None:
        """Whether each path that is named is there in what a replica returned.

        Raises:
            ConfigurationError: one is not.
        """
        known = [join_path(_OUTPUT, path) for path in named_nodes(output)]
        for path in self.named:
            if path and join_path(_OUTPUT, path) not in known:
                there = f"the outputs are {', '.join(map(repr, known))}" if known else "there is one output"
                raise ConfigurationError(
                    f"batch_dim names {join_path(_OUTPUT, path)!r}, but {there}; name one that is there, "
                    f"or {_OUTPUT!r} for all."
                )
