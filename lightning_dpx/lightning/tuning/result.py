"""What is found about batch sizes, and which of them is the best."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dpx.lightning.memory.dry_run.device_forecast import DeviceForecast
from lightning_dpx.notebook import html_table
from lightning_dpx.units import format_part

_ABOUT_AS_FAST = 0.98  # of the samples per second of the fastest: a smaller batch is better at the same speed


@dataclass(frozen=True, slots=True)
class BatchSizeForecast:
    """Training with one batch size.

    Attributes:
        batch_size: B, the rows of a batch over all devices.
        devices: One per device that gets rows, in bytes.
        compute: Seconds of a step's forward and backward on the slowest device, with what its plan computes again;
            infinite where a budget cannot be met.
        beside: Seconds of a step beside those: the optimizer; on the host also Lightning's loop with what is logged,
            slices and sums of gradients, and the loading of a batch without workers. On other devices the host does all
            that while they compute.
        queued: Seconds that the host takes for all of that, and to hand forward and backward to other devices, as far
            as it was measured: a step takes no less.
    """

    batch_size: int
    devices: tuple[DeviceForecast, ...]
    compute: float
    beside: float = 0.0
    queued: float = 0.0

    @property
    def seconds(self) -> float:
        """Of a step; infinite where a budget cannot be met. Reductions between devices are not in it."""
        return max(self.compute + self.beside, self.queued)

    @property
    def fits(self) -> bool:
        """Whether every device meets its budget."""
        return all(device.fits for device in self.devices)

    @property
    def samples_per_second(self) -> float:
        """Rows by seconds; 0 where it does not fit."""
        if self.fits:
            return self.batch_size / self.seconds
        return 0.0

    @property
    def tightest(self) -> DeviceForecast:
        """The device that takes the largest part of its budget, or most bytes where there is none."""
        return max(self.devices, key=lambda one: one.needed / (one.budget or 1))


@dataclass(frozen=True, slots=True)
class Tuning:
    """The forecasts of all batch sizes that were looked at.

    Attributes:
        batch_sizes: The forecasts, by growing batch size.
        current: The batch size of the loader.
        basis: What the figures rest on, if not on steps that were run and measured.

    Examples:
        >>> found = dpx.tune(BoringModel(), DataLoader(torch.ones(64, 32), batch_size=4), batch_sizes=[4, 8])
        >>> [one.batch_size for one in found.batch_sizes]
        [4, 8]
    """

    batch_sizes: tuple[BatchSizeForecast, ...]
    current: int
    basis: str = ""

    @property
    def best(self) -> BatchSizeForecast | None:
        """The smallest batch size that is about as fast (within 2%) as the fastest; ``None`` where none fits."""
        return _best_of(self.batch_sizes)

    def fastest(self, count: int) -> list[BatchSizeForecast]:
        """At most ``count`` forecasts that fit: the best one, then what would be the best without it, and so on."""
        # By the rule of the best one: of sizes that are about as fast the smaller ones, which are also tried sooner.
        left = list(self.batch_sizes)
        found: list[BatchSizeForecast] = []
        while len(found) < count:
            best = _best_of(left)
            if best is None:
                break
            found.append(best)
            left.remove(best)
        return found

    def __str__(self) -> str:
        """A line for each batch size."""
        best = self.best
        lines = []
        for one in self.batch_sizes:
            tightest = one.tightest
            peak = format_part(tightest.needed, tightest.budget or tightest.needed)
            speed = f"{one.samples_per_second:,.0f} samples/s" if one.fits else "does not fit"
            mark = "  <- best" if one is best else ""
            lines.append(f"batch_size={one.batch_size}: {speed}, peak {peak} on {tightest.device}{mark}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What a notebook shows: a row for each batch size, the best one in bold."""
        best = self.best
        rows: list[tuple[str, ...]] = []
        marked = -1
        for number, one in enumerate(self.batch_sizes):
            tightest = one.tightest
            peak = format_part(tightest.needed, tightest.budget or tightest.needed)
            speed = f"{one.samples_per_second:,.0f}" if one.fits else "does not fit"
            rows.append((str(one.batch_size), speed, peak, tightest.device))
            if one is best:
                marked = number
        heads = ("batch size", "samples/s", "peak", "on")
        return html_table(self.basis or "predicted from one step", heads, rows, marked=marked)


def _best_of(forecasts: Sequence[BatchSizeForecast]) -> BatchSizeForecast | None:
    """The first, by growing batch size, that is about as fast as the fastest; ``None`` where none fits."""
    most = max((one.samples_per_second for one in forecasts), default=0.0)
    for one in forecasts:
        if one.fits and one.samples_per_second >= _ABOUT_AS_FAST * most:
            return one
    return None
