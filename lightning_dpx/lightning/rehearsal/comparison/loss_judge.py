"""Whether the loss of the whole batch is the mean of the slices' losses, or their sum."""

from collections.abc import Sequence

import torch

from lightning_dpx.replicas import Weights
from lightning_dpx.replicas.merging.reductions import mean_of_slices
from lightning_dpx.replicas.merging.tolerance import Tolerance, difference


class LossJudge:
    """Decides by the loss that one device has.

    Args:
        whole: That loss; ``None`` where the step returns none.
        tolerance: How far slices may be from it.
        decides: Whether it may be either of both.
        is_unstable: Whether the loss changes from run to run.

    Attributes:
        values: The loss as the "mean" and as the "sum" of the slices'.
        largest: Of the slices' losses, in absolute value.
        rests_on_one: Whether it was taken for a sum, and all slices but one have given zero.
    """

    def __init__(self, whole: torch.Tensor | None, tolerance: Tolerance, *, decides: bool, is_unstable: bool) -> None:
        self._whole = whole
        self._tolerance = tolerance
        self._decides = decides
        self._is_unstable = is_unstable
        self.values: dict[str, float] = {}
        self.largest: float = 0.0
        self.rests_on_one: bool = False

    def reduction(self, losses: Sequence[torch.Tensor], weights: Weights, given: str) -> str:
        """Mean or sum, whichever is the whole batch's loss; what is ``given`` where both are, or neither is known."""
        values = [loss.detach().cpu().double().reshape(()) for loss in losses]
        mean = mean_of_slices(values, weights.of_loss, weights)
        self.values = {"mean": float(mean), "sum": float(sum(values))}
        if self._whole is None:
            return given
        target = float(self._whole.double().reshape(()))
        self.largest = max(map(float, map(torch.abs, values)))
        # What it began with is kept where both fit, as of a loss of zero.
        if not self._decides or self._fits(given, target):
            return given
        for name in self.values:
            if self._fits(name, target):
                # A mean over rows that one slice alone has is the sum of slices', too.
                self.rests_on_one = name == "sum" and sum(map(bool, values)) == 1
                return name
        return self._nearest(target)

    def _fits(self, name: str, target: float) -> bool:
        """Whether the loss is the target, in relation to the largest one: losses that cancel out leave roundings."""
        pair = torch.tensor([target, self.values[name]], dtype=torch.float64)
        error = difference(pair[0], pair[1], self._tolerance, terms=self.largest)
        return error <= self._tolerance.relative

    def _nearest(self, target: float) -> str:
        """A loss that depends on random draws is near one of both; any other is taken for a mean, as announced."""
        if not self._is_unstable:
            return "mean"
        return min(self.values, key=lambda name: abs(self.values[name] - target))
