"""Host and accelerators work at the same time; what the host computes itself adds up."""

import pytest

from lightning_dpx import MemoryPlan
from lightning_dpx.lightning.tuning.beside_steps import BesideSteps, HostSeconds, Queue
from lightning_dpx.lightning.tuning.empty_step import EmptySeconds


def test_on_the_host_one_comes_after_the_other() -> None:
    beside = BesideSteps(EmptySeconds(whole=2.0, queued=2.0), loading=0.5)
    assert beside.of(8, 100.0, [None]) == HostSeconds(beside=2.0 + 8 * 0.5, queued=0.0)


def test_the_host_loops_and_loads_while_an_accelerator_computes() -> None:
    beside = BesideSteps(EmptySeconds(whole=5.0, queued=2.0), loading=0.5, queue=Queue(least=3.0, share=0.25))
    # The optimizer keeps the device at work when the host is through.
    assert beside.of(8, 10.0, [None]) == HostSeconds(beside=3.0, queued=3.0 + 2.0 + 8 * 0.5)
    waits_for_it = beside.of(8, 100.0, [None])
    assert waits_for_it.queued == 25.0 + 2.0 + 8 * 0.5


@pytest.mark.parametrize(
    ("micro_batches", "recompute_share", "times"), [(1, None, 1.0), (4, 0.5, 4.0), (1, 0.5, 1.5), (1, 0.0, 1.0)]
)
def test_what_is_cut_or_computed_again_is_handed_over_again(
    micro_batches: int, recompute_share: float | None, times: float
) -> None:
    plan = MemoryPlan(
        model="", fingerprint="", planner="", budget=None, unplanned_peak=0, peak=None, saved_bytes=None,
        recompute_share=recompute_share, least_share=None, decisions=(), micro_batches=micro_batches,
    )  # fmt: skip
    beside = BesideSteps(EmptySeconds(whole=2.0, queued=2.0), queue=Queue(least=3.0, share=0.0))
    assert beside.of(8, 100.0, [None, plan]).queued == times * 3.0 + 2.0
