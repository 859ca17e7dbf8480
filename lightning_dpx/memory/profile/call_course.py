"""What a module call takes while it is made again, whichever of its tensors are wanted.

A tensor of the call that is wanted stays to the call's end; another goes when the call itself has no more use for it.
So one call that is watched while nothing is wanted tells the peak for every choice: it is divided into stretches that
end where one of these tensors goes, each with the most bytes that were there, and what is wanted adds to all stretches
after its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from lightning_dpx.memory.execute.calls import OutputKey, SelectiveReplay
from lightning_dpx.memory.execute.recipes import NotRecomputable
from lightning_dpx.memory.execute.recomputation import repeat
from lightning_dpx.memory.execute.values import Value
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.memory.tracing.storage_ledger import Allocation


@dataclass(frozen=True, slots=True)
class CallCourse:
    """The memory of a call.

    Attributes:
        stretches: Bytes at the most in each, while nothing is wanted.
        gone: For a tensor of the call, the first stretch without it.
    """

    stretches: tuple[int, ...]
    gone: Mapping[OutputKey, int]


def course_of(call: Value, trace: MemoryTrace) -> CallCourse:
    """Makes ``call`` again, watched by ``trace``, and keeps nothing of it.

    Raises:
        NotRecomputable: it talks to other processes, which would not answer.
    """
    assert isinstance(call.make, SelectiveReplay), "it is a call"
    spans: dict[OutputKey, Allocation] = {}

    def note(key: OutputKey, tensor: torch.Tensor) -> None:
        span = trace.allocation_of(tensor.untyped_storage())
        if span is not None:  # what was there before the call takes no memory of its own
            spans[key] = span

    with trace, call.make.outputs_reported(note):
        repeat(call)
    if trace.communicates:
        raise NotRecomputable(f"{call.operator} talks to other processes")
    end = len(trace.curve)
    died = {key: end if span.died is None else span.died for key, span in spans.items()}
    # Only where such a tensor goes the answer for another choice may change, so a stretch ends
    # there, and one number is enough for it.
    ends = sorted(set(died.values()))
    stretches = [max(trace.curve[start:stop], default=0) for start, stop in pairwise([0, *ends, end])]
    return CallCourse(tuple(stretches), {key: ends.index(event) + 1 for key, event in died.items()})
