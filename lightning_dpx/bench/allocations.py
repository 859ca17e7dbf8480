"""The peak of activations by the allocator's own account: the yardstick of ``dpx bench plan``.

Valid for eager and for compiled steps alike. A dispatch mode (``MemoryTrace``) is not: ``torch.compile`` runs the plain
Python code for as long as one is active, inside compiled code there would be no operators to see, and autograd adds up
the gradients of a parameter of many uses out of place. The profiler (``torch.profiler``) reports every block that the
CPU allocator gives out or takes back, wherever that is asked for.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile

from lightning_dpx.torch_compat import ProfilerEventType

_Block = tuple[int, int, int]  # nanoseconds, address, bytes (negative: given back)


def peak_of_passing(step: Callable[[], object]) -> int:
    """The most bytes, at any time of ``step``, of what was allocated in it and is gone by its end.

    Activations, what backward needs in between, and what operators take inside themselves; not the gradients of
    parameters, unless others were there already, nor what was there before. Only what ``step`` does on the CPU in its
    own thread is seen.
    """
    blocks = _blocks_of(step)
    changes = [0] * len(blocks)
    present: dict[int, int] = {}
    for event, (_, address, num_bytes) in enumerate(blocks):
        if num_bytes > 0:
            present[address] = event
        # A block that was there before has no birth here, and does not count.
        elif (born := present.pop(address, None)) is not None:
            # A block counts from its birth on, but only now is it known that the step gave it back.
            changes[born] = -num_bytes
            changes[event] = num_bytes
    return max(accumulate(changes), default=0)


def peak_of_everything(step: Callable[[], object]) -> int:
    """The most bytes, at any time of ``step``, of what was allocated in it, whether it is gone by its end or not.

    A block that another thread has given back, as those of gloo do now and then, is only known to be gone when its
    address is given out again: of several measurements the least is right.
    """
    present: dict[int, int] = {}
    live = 0
    most = 0
    for _, address, num_bytes in _blocks_of(step):
        # Either it is given back, or it went unseen before.
        live -= present.pop(address, 0)
        if num_bytes > 0:
            present[address] = num_bytes
            live += num_bytes
        most = max(most, live)
    return most


def _blocks_of(step: Callable[[], object]) -> list[_Block]:
    """What came and went during ``step``, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    # The tree has blocks under the operators that asked for them, not in the order of time.
    return sorted(_blocks(record.profiler.kineto_results.experimental_event_tree()), key=lambda block: block[0])


def _blocks(events: list[Any]) -> Iterator[_Block]:
    """What came and went during ``events``."""
    for event in events:
        if event.tag != ProfilerEventType.Allocation:
            yield from _blocks(event.children)
        elif event.extra_fields.device.type == "cpu":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
