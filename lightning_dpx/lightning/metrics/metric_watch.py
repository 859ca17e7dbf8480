"""Metrics that a run makes, or puts in the place of others: replicas must share them, and have copies until they do.

Lists, dicts and globals change without a trace, and a look walks everything that the module leads to. So it is taken in
the first batch of an epoch, whose hooks may have made some, in batches 1, 2, 4, 8, ... of a run, and after each batch
that had new ones. What steps make is seen at once: see ``made_metrics``.
"""

from collections.abc import Sequence

from torch import nn

from lightning_dpx.lightning.metrics.made_metrics import MadeMetrics
from lightning_dpx.lightning.metrics.metrics import ReplicaMetrics
from lightning_dpx.powers import is_power_of_two


class MetricWatch:
    """Says which metrics are new.

    Attributes:
        come_every_time: Whether two batches in a row have had new ones.
        made: Those that the last step on slices has made.
    """

    def __init__(self) -> None:
        self.come_every_time: bool = False
        self.made: MadeMetrics = MadeMetrics()
        self._num_batches = 0
        self._hooks_ran = True
        self._had_new = False
        self._repeats = False

    def note_hooks(self) -> None:
        """Hooks of an epoch or a stage have run."""
        self._hooks_ran = True

    def note_repeat(self) -> None:
        """The batch runs again, and whole: nothing is shared in it."""
        self._repeats = True

    def new_ones(self, metrics: ReplicaMetrics, modules: Sequence[nn.Module]) -> list[str]:
        """Before a batch: the paths of metrics that the module holds, and did not at the last look.

        Args:
            metrics: Those of the last look; they are those of this one afterwards.
            modules: The submodules of the module, a list that stays the same while they do.
        """
        if self._repeats:
            # It makes metrics, for the next batch to find.
            self._repeats = False
            self._hooks_ran = True
            return []
        self._num_batches += 1
        is_due = is_power_of_two(self._num_batches)
        if not (is_due or self._hooks_ran or self._had_new):
            return []
        new = metrics.find_new(modules)
        self.come_every_time = bool(new) and self._had_new
        self._had_new = bool(new)
        self._hooks_ran = False
        return new
