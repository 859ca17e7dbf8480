"""Why a run chooses no micro-batches, as far as is known before any profile; its dry run says the same."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunToCut:
    """A run, as far as it decides whether micro-batches are chosen for its training steps.

    Attributes:
        verify: As in the strategy.
        optimizes_by_hand: Whether the module does.
        shifts: Whether parts of it are on other devices.
        takes_batches_whole: Whether they are not cut into slices either.
        has_processes: Whether there are several.
        spans_devices: Whether a replica runs on several devices.
    """

    verify: str = "warn"
    optimizes_by_hand: bool = False
    shifts: bool = False
    takes_batches_whole: bool = False
    has_processes: bool = False
    spans_devices: bool = False


def why_none_are_chosen(run: RunToCut) -> str:
    """What stands in the way of micro-batches, as the end of a sentence; nothing if they may be chosen."""
    reasons = {
        "they optimize by hand.": run.optimizes_by_hand,
        "parts of the module are shifted to other devices.": run.shifts,
        "their batches cannot be cut.": run.takes_batches_whole,
        "there are several processes.": run.has_processes,
        "a replica runs on several devices.": run.spans_devices,
        "verify='off' leaves out the rehearsal that says whether they are what one device gives.": run.verify == "off",
        # A Trainer that is to be deterministic asks torch for it, also that of a dry run.
        "deterministic algorithms are asked for, and how many would be chosen depends on times that are measured; "
        "micro_batches=M names a number.": torch.are_deterministic_algorithms_enabled(),
    }
    for reason, holds in reasons.items():
        if holds:
            return reason
    return ""
