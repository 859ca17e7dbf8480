"""What one replica gets of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dpx.replicas.merging.rules import Weights
from lightning_dpx.replicas.replica import Replica


@dataclass(slots=True)  # not frozen: K are made in every step, and that would cost them 1 us each
class BatchSlice:
    """One active replica's part of a batch.

    Attributes:
        replica: Whose part it is.
        num_rows: Its rows.
        batch: The part itself.
        weight: What its loss counts in the mean, where that is not its rows.
    """

    replica: Replica
    num_rows: int
    batch: Any
    weight: float | None = None


def weights_of(slices: Sequence[BatchSlice]) -> Weights:
    """What the slices of a batch count."""
    rows = [batch_slice.num_rows for batch_slice in slices]
    of_loss: list[float] = []
    for batch_slice in slices:
        weight = batch_slice.weight
        # Where the user says nothing else, a row counts as much as any other.
        of_loss.append(batch_slice.num_rows if weight is None else weight)
    return Weights(rows=rows, of_loss=of_loss)
