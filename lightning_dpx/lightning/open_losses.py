"""A loss that was taken for the sum of the slices', as one slice alone had any: the whole batch says whether it is.

A mean over marked rows is the sum of the slices' losses as long as one of them has all marked rows. The first batch in
which several slices have a loss runs again, whole.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_dpx.lightning.lost_numbers import numbers_of_output
from lightning_dpx.lightning.run_again import RunAgain
from lightning_dpx.replicas import MergeRules

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

T = TypeVar("T")
_ALIKE = 1e-3  # relatively: coarse dtypes differ by less, and a mean by more
_ADVICE = "For all devices to take part, compute the loss of the whole batch in training_step_end(outputs)."


class OpenLossError(RunAgain):
    """Several slices have a loss for the first time: the step is to run again on the whole batch.

    Args:
        total: The sum of their losses.
        rules: Of the step.
    """

    def __init__(self, total: float, rules: MergeRules) -> None:
        super().__init__("Several slices have a loss, where one alone had any when it was checked.")
        self._total = total
        self._rules = rules

    def run_again(self, session: "Session", name: str, run: Callable[[], T]) -> T:
        """See :meth:`RunAgain.run_again`."""
        reason = (
            "Several of its slices have a loss, where one alone had any when it was checked, so that it is not known "
            "whether losses are added up."
        )
        session.whole_batches.give_next_whole(name, reason, "")
        outputs = run()
        whole = _loss_in(numbers_of_output(outputs))
        self._rules.loss_is_open = False
        if whole is None or not math.isclose(whole, self._total, rel_tol=_ALIKE):
            text = f"Its loss is not the sum of the slices' ({whole} and {self._total}), as it was where one had any."
            session.whole_batches.give_whole(name, text, _ADVICE)
        return outputs


def sum_of_several_losses(values: Mapping[int, Mapping[str, Any]]) -> float | None:
    """The sum of the slices' losses; ``None`` where fewer than two have one that is large enough to tell.

    Args:
        values: By the index of a replica, what its slice has given for the batch, by name.
    """
    losses = [float(loss) for loss in map(_loss_in, values.values()) if loss is not None]
    total = sum(losses)
    # What is lost beside another slice's fits a sum and a mean.
    several = [loss for loss in losses if abs(loss) > 10 * _ALIKE * abs(total)]
    return total if len(several) > 1 else None


def _loss_in(numbers: Mapping[str, Any]) -> float | None:
    loss = numbers.get("loss", numbers.get("the result"))
    return None if loss is None else float(loss)
