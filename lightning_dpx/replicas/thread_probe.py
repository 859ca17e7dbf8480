"""Whether replicas on one CPU had better run in threads, decided from one watched step.

Threads share one interpreter, one memory and one random generator. They gain where operators are long enough to run
beside each other, they lose where the interpreter or the summing of gradients dominates, and their results equal those
of one device only if the step draws no random numbers, writes no state, and its loss is a mean over the rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from lightning_dpx.errors import describe_error
from lightning_dpx.python_objects.compiled import uncompiled
from lightning_dpx.python_objects.object_graph import size_of
from lightning_dpx.python_objects.preserve import GeneratorStates
from lightning_dpx.replicas.early_backward import loss_of
from lightning_dpx.replicas.tensor_checksums import checksums
from lightning_dpx.torch_compat import TorchDispatchMode, version_counter

MIN_FLOPS_PER_OPERATOR = 2e6  # of one replica's slice: some 30 us of arithmetic, against 5-10 us of interpreter
MIN_FLOPS_PER_PARAMETER = 1024  # of the whole batch: below, summing K gradients costs more than threads gain


class OperatorCensus(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators and their floating-point operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operators: int = 0
        self.flops: Any = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.num_operators += 1
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += count(*args, **kwargs, out_val=result)
        return result


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to run in threads, and why."""

    threads: bool
    reason: str

    @classmethod
    def inline(cls, reason: str) -> "Verdict":
        """The replicas run one after the other."""
        return cls(threads=False, reason=reason)

    @classmethod
    def in_threads(cls, reason: str) -> "Verdict":
        """The replicas run at the same time."""
        return cls(threads=True, reason=reason)


@dataclass(slots=True)
class Trial:
    """One step on the whole batch, watched, and the same step on its slices.

    Args:
        module: Replica 0, which runs the whole batch.
        num_replicas: K.
    """

    module: nn.Module
    num_replicas: int
    census: OperatorCensus = field(default_factory=OperatorCensus)
    random: bool = False
    written: str | None = None

    def watch(self, call: Callable[[], Any]) -> Any:
        """What ``call`` returns; its operators are counted, and what it writes on the module is noticed."""
        before = dict(_state(self.module))
        generators = GeneratorStates(modules=[self.module])
        # Compiled code cannot be watched operator by operator.
        with uncompiled(), self.census:
            result = call()
        self.random = generators != GeneratorStates(modules=[self.module])
        after = dict(_state(self.module))
        self.written = next((name for name in after if before.get(name) != after[name]), None)
        return result

    def verdict(self, whole: Any, on_slices: Callable[[], Any]) -> Verdict:
        """Judges by what was seen, and lastly by whether the merged loss of the slices is the loss of the batch.

        Args:
            whole: The loss of the whole batch.
            on_slices: The merged loss of the slices; only called where nothing else speaks against threads.
        """
        census = self.census
        # The census is of the whole batch; each replica has a part of every operator.
        share = census.flops / max(census.num_operators, 1) / self.num_replicas
        size = sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)
        intensity = census.flops / max(size, 1)
        if self.random:
            return Verdict.inline("the step draws random numbers, and one CPU has one generator")
        if self.written is not None:
            return Verdict.inline(f"the step writes {self.written}")
        if share < MIN_FLOPS_PER_OPERATOR:
            return Verdict.inline(f"operators are small ({share / 1e6:.2f} MFLOP each on a slice)")
        if intensity < MIN_FLOPS_PER_PARAMETER:
            return Verdict.inline(f"there is little to compute per parameter ({intensity:.0f} FLOP)")
        if not isinstance(whole, torch.Tensor):
            return Verdict.inline("the step returned no loss")
        try:
            merged = on_slices()
        except Exception as error:  # noqa: BLE001  whatever a slice does not survive, the whole batch did
            return Verdict.inline(f"the step fails on a slice of the batch ({describe_error(error)})")
        if not _equal(whole, merged):
            return Verdict.inline(f"the loss is no mean over rows ({whole:.6g}, but {merged:.6g} from slices)")
        return Verdict.in_threads(f"operators are large ({share / 1e6:.1f} MFLOP each on a slice)")


def _equal(whole: torch.Tensor, merged: Any) -> bool:
    reduced = torch.is_autocast_enabled("cpu") or whole.dtype not in (torch.float32, torch.float64)
    tolerance = 1e-2 if reduced else 1e-4
    return isinstance(merged, torch.Tensor) and torch.allclose(merged.to(whole), whole, rtol=tolerance, atol=1e-7)


def _state(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What a step could write: buffers, parameters, and attributes with the length of their containers."""
    for path, child in module.named_modules():
        for key, value in vars(child).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                # Something appended leaves the container the same object.
                size = size_of(value) if isinstance(value, list | dict | set) else 0
                yield f"{path}.{key}".lstrip("."), (id(value), size)
    for path, buffer in module.named_buffers():
        yield path, (id(buffer), version_counter(buffer))
    named = list(module.named_parameters())
    sums = checksums([parameter for _, parameter in named])  # writes through ``.data`` count in no version
    for (path, parameter), bits in zip(named, sums, strict=True):
        yield path, (id(parameter), version_counter(parameter), bits)


def first_loss(output: Any) -> Any:
    """The loss of a step's output, as :func:`loss_of` finds that of a micro-batch's."""
    return loss_of(output)


__all__: Sequence[str] = ("OperatorCensus", "Trial", "Verdict", "first_loss")
