"""Which batch sizes are looked at."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dpx.arguments import is_whole_number
from lightning_dpx.errors import ConfigurationError

_DOUBLINGS = 6  # beyond the batch size of the loader, where nothing else ends the list
_HALVINGS = 2  # below it


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Which batch sizes are looked at.

    Attributes:
        batch_sizes: Those, over all devices; powers of two times the loader's own unless given.
        most_rows: No batch size is larger; as many as the data set has unless given.
    """

    batch_sizes: Sequence[int] = ()
    most_rows: int | None = None

    def __post_init__(self) -> None:
        for size in self.batch_sizes:
            if not is_whole_number(size) or size < 1:
                raise ConfigurationError(f"batch_sizes={list(self.batch_sizes)!r} is not allowed: {size!r} is no "
                                         "positive number of rows.")  # fmt: skip

    def sizes(self, current: int, devices: int) -> list[int]:
        """The batch sizes, growing; each gives every device a row."""
        if self.batch_sizes:
            return sorted(set(self.batch_sizes))
        # The loader's own batch size is looked at however small the data set is.
        limit = current << _DOUBLINGS if self.most_rows is None else max(self.most_rows, current)
        found = {current >> step for step in range(_HALVINGS + 1)}
        found |= {current << step for step in range(_DOUBLINGS + 1)}
        return sorted(size for size in found if devices <= size <= limit) or [current]
