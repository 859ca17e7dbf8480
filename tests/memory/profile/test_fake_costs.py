"""What is watched of operators on fake tensors, whose numbers cannot be read later."""

import weakref
from types import SimpleNamespace

import torch

from lightning_dpx.memory.profile.fake_costs import FakeTrace
from lightning_dpx.torch_compat import FakeTensorMode

CPU = torch.device("cpu")


def test_masks_are_known_from_the_operator_that_draws_them() -> None:
    with FakeTensorMode(), FakeTrace(CPU, CPU, None, numbers=False) as trace:
        mask = torch.empty(64, 64).bernoulli_(0.5)
        scaled = torch.empty(64, 64).bernoulli_(0.5).div_(0.5)
        other = torch.empty(64, 64).bernoulli_(0.5).add_(1)
        plain = torch.empty(64, 64)
    known = {id(allocation) for allocation in trace.masks}
    found = [trace.allocation_of(tensor.untyped_storage()) for tensor in (mask, scaled, other, plain)]
    assert [id(allocation) in known for allocation in found] == [True, True, False, False]


def test_storages_that_are_resized_are_counted_at_every_event() -> None:
    trace = FakeTrace(CPU, CPU, None, numbers=False)
    trace.mark()
    assert trace.resized_bytes == []
    whole = torch.empty(4)
    trace.watch_resized([SimpleNamespace(all_gather_outputs=[whole])])
    trace.mark()
    whole.untyped_storage().resize_(0)
    trace.mark()
    assert trace.resized_bytes == [16, 0]
    # It goes with its last name, and does not wait for the garbage collector.
    reference = weakref.ref(trace)
    del trace
    assert reference() is None
