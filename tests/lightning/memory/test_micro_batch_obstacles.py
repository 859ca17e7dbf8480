"""Why a run chooses no micro-batches, before anything is profiled."""

import pytest
import torch

from lightning_dpx.lightning.memory.micro_batch_obstacles import RunToCut, why_none_are_chosen


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (RunToCut(verify="warn"), ""),
        (RunToCut(verify="off"), "verify='off'"),
        (RunToCut(verify="off", has_processes=True), "several processes"),
        (RunToCut(verify="warn", optimizes_by_hand=True), "by hand"),
        (RunToCut(verify="warn", shifts=True), "shifted"),
        (RunToCut(verify="warn", takes_batches_whole=True), "cannot be cut"),
        (RunToCut(verify="warn", spans_devices=True), "several devices"),
    ],
)
def test_the_first_reason_is_told(run: RunToCut, why: str) -> None:
    found = why_none_are_chosen(run)
    assert why in found
    assert bool(found) == bool(why)


def test_what_is_to_be_deterministic_depends_on_no_times() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic algorithms" in why_none_are_chosen(RunToCut(verify="warn"))
    finally:
        torch.use_deterministic_algorithms(False)
