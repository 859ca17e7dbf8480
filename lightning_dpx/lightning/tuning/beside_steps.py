"""What a step takes beside its forward and backward, whatever its batch size, and how long the host is busy with it.

host           forward, backward | loop, optimizer | loading     one after the other: all of it adds up
accelerators   host    hands over forward, backward | loop, optimizer | loading
               device      forward, backward ...                         | optimizer
                                                     both work at once: a step lasts as long as the slower of them
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_dpx.lightning.tuning.empty_step import EmptySeconds
from lightning_dpx.memory import MemoryPlan


class Queue(NamedTuple):
    """How long the host takes to hand forward and backward to an accelerator, which computes meanwhile.

    Attributes:
        least: Seconds, however few rows there are.
        share: Of the time of a step, where that is longer: a step may wait for the device (``loss.item()``).
    """

    least: float
    share: float


class HostSeconds(NamedTuple):
    """What belongs to a step beside the seconds of its forward and backward on the slowest device.

    Attributes:
        beside: Seconds that come on top of those.
        queued: Seconds that the host takes for the whole step while the device computes: it takes no less.
    """

    beside: float
    queued: float = 0.0


@dataclass(frozen=True, slots=True)
class BesideSteps:
    """What was measured of a run.

    Attributes:
        step: The loop and the optimizer.
        loading: Seconds to load a row.
        queue: Of forward and backward; ``None`` where the host computes them, or was not timed.
    """

    step: EmptySeconds
    loading: float = 0.0
    queue: Queue | None = None

    def of(self, batch_size: int, compute: float, plans: Sequence[MemoryPlan | None]) -> HostSeconds:
        """What belongs to a step of a batch size.

        Args:
            batch_size: Its rows.
            compute: Seconds of its forward and backward on the slowest device.
            plans: Of every device.
        """
        loading = self.loading * batch_size
        if self.queue is None:
            return HostSeconds(self.step.whole + loading)
        times = max(map(_times_queued, plans))
        queued = max(times * self.queue.least, self.queue.share * compute) + self.step.queued + loading
        # What the device still has to do when the host is through with the loop.
        return HostSeconds(max(0.0, self.step.whole - self.step.queued), queued)


def _times_queued(plan: MemoryPlan | None) -> float:
    """How many times as much a planned step makes the host do as one in one piece that keeps everything."""
    if plan is None:
        return 1.0
    # Each micro-batch calls all operators, and what is computed again is called again.
    return max(float(plan.micro_batches), 1 + (plan.recompute_share or 0.0))
