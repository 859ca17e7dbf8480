"""A step on the same few rows, as one device and in slices: what a check of slices runs, as often as it needs to."""

from dataclasses import dataclass

from lightning_dpx.lightning.rehearsal.shadow_step import ShadowStep
from lightning_dpx.lightning.rehearsal.sliced_run import SlicedRun
from lightning_dpx.lightning.rehearsal.whole_run import WholeRun


@dataclass(frozen=True, slots=True)
class BothRuns:
    """The two ways in which a step is rehearsed.

    Attributes:
        whole: Runs it as one device.
        sliced: Runs it in slices.
        sizes: Rows of each slice.
    """

    whole: WholeRun
    sliced: SlicedRun
    sizes: tuple[int, ...]

    @property
    def step(self) -> ShadowStep:
        """The step that both of them run."""
        return self.whole.step

    @property
    def num_rows(self) -> int:
        """Rows of all slices together, which is what one device gets."""
        return sum(self.sizes)
