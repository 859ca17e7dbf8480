"""What a copy shares with its original, whatever it holds: nothing looks into it."""

import threading
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset

from lightning_dpx.replicas.shared_iterators import IteratorProxy
from lightning_dpx.torch_compat import COMPILER_TYPES, submodules_of

# One object serves all replicas, whatever it holds: data, what acts on the parameters once a step, and what compiles:
# code that was compiled for one replica is found by the others only where it is the same object.
_SHARED_TYPES: tuple[type, ...] = (
    Dataset,
    DataLoader,
    Optimizer,
    LRScheduler,
    IteratorProxy,
    # A profiler's hooks keep the last range of each module, which torch cannot copy, and make one anew for every call.
    record_function,
    *COMPILER_TYPES,
)
# Python refuses to copy them, and what they guard is one object for all replicas.
LOCKS: tuple[type, ...] = (type(threading.Lock()), type(threading.RLock()))
# As that of copy.deepcopy: by the id of an original, what stands for it in the copy.
Memo = dict[int, Any]


def is_shared(value: Any, kept: Collection[int]) -> bool:
    """Whether one object serves all replicas whatever it holds, so that nothing looks into it.

    Args:
        value: What is asked about.
        kept: The ids of objects that are shared on request.
    """
    return id(value) in kept or isinstance(value, _SHARED_TYPES)


def modules_without(module: nn.Module, kept: Collection[int]) -> Iterator[nn.Module]:
    """The submodules of ``module``, itself first, each once; not those whose id is in ``kept``, nor what they hold."""
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        child = waiting.pop()
        if id(child) not in seen and id(child) not in kept:
            seen.add(id(child))
            yield child
            grandchildren = reversed(submodules_of(child).values())
            waiting.extend(grandchild for grandchild in grandchildren if grandchild is not None)
