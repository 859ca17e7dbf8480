"""Storages come and go as events; a sum that takes over the memory of its term is no second storage."""

import torch

from lightning_dpx.memory.tracing.allocator_account import OperatorMemory
from lightning_dpx.memory.tracing.storage_ledger import StorageLedger


def test_the_end_of_a_storage_is_an_event() -> None:
    ledger = StorageLedger()
    storage = torch.UntypedStorage(64)
    allocation = ledger.add(storage)
    ledger.add_event()
    assert ledger.allocation_of(storage) is allocation
    assert ledger.live == 64
    del storage
    assert ledger.live == 0
    assert ledger.curve == [64, 0]
    assert allocation.died == 1


def test_what_is_still_there_is_not_passing() -> None:
    ledger = StorageLedger()
    passing = torch.UntypedStorage(64)
    ledger.add(passing)
    lasting = torch.UntypedStorage(8)
    ledger.add(lasting)
    ledger.add_operator(inside=4, before=64, num_earlier=2, taken=OperatorMemory())
    del passing
    assert ledger.curve == [76, 8]
    assert ledger.passing() == [68, 0]


def _sum_after_term(ledger: StorageLedger) -> tuple[torch.UntypedStorage, torch.UntypedStorage]:
    term = torch.UntypedStorage(64)
    known = ledger.add(term)
    ledger.add_event()
    total = torch.UntypedStorage(64)
    ledger.add_open_sum(0, total, known)
    return term, total


def test_a_sum_whose_term_goes_at_once_was_made_in_its_memory() -> None:
    ledger = StorageLedger()
    term, total = _sum_after_term(ledger)
    del term
    ledger.settle()
    assert len(ledger.allocations) == 1
    assert ledger.live == 64
    del total
    assert ledger.live == 0


def test_a_sum_whose_term_is_held_by_others_has_memory_of_its_own() -> None:
    ledger = StorageLedger()
    term, total = _sum_after_term(ledger)
    ledger.settle()
    assert ledger.live == 128
    del term, total
    assert ledger.live == 0
