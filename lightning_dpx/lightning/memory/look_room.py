"""Whether a budget has room for another look at a step: it runs on copies of what the module holds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_dpx.devices import is_host
from lightning_dpx.lightning.memory.peak_check import is_worth_telling
from lightning_dpx.lightning.memory.planning import MemoryPlanning
from lightning_dpx.lightning.memory.static_of_steps import StaticOfSteps
from lightning_dpx.replicas import BatchSlice
from lightning_dpx.torch_compat import bytes_of

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

# Of buffers and attributes, beside those of the slices' replicas: of the shadow that runs as one device, of what it and
# the slices have left, which is compared, of what buffers were before, and of a difference.
_MORE_COPIES = 4
_ROWS_OF_SLICE = 8  # that a look takes at the most


class LookRoom:
    """Looks before a look.

    Args:
        session: Whose steps.
        planning: Has the plans.
        static: What a step needs beside its activations.
    """

    def __init__(self, session: "Session", planning: MemoryPlanning, static: StaticOfSteps) -> None:
        self._session = session
        self._planning = planning
        self._static = static

    def bytes_too_many(self, slices: Sequence[BatchSlice]) -> int:
        """Bytes of copies, where a look on rows of ``slices`` would exceed the budget with them; else 0."""
        copied = self._bytes_of_copy()
        home = self._session.replicas.root.device
        peak, limit = self._planning.devices.forecast(home)
        # Without state that is copied, a few rows take no more than the step does.
        if not copied or not limit:
            return 0
        copies = (len(slices) + _MORE_COPIES) * copied
        held = self._static.of(slices).between_steps(home)
        if is_host(home):
            held += self._static.bytes_left()
        # All without a graph, so no more than in proportion to what a planned step keeps.
        rows = max(batch_slice.num_rows for batch_slice in slices)
        activations = int(peak * min(1.0, (_ROWS_OF_SLICE * len(slices) + 1) / max(1, rows)))
        return copies if is_worth_telling(held + copies + activations, limit) else 0

    def _bytes_of_copy(self) -> int:
        """Bytes of what every shadow has of its own."""
        replicas = self._session.replicas
        return bytes_of(replicas.root.buffers) + bytes_of(replicas.copied_tensors())
