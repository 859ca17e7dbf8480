"""Losses and logged values that are nan on a slice of a batch, where one device may have a number.

A mean over labelled rows, or over tokens that a mask leaves, has numbers in every slice for epochs, until it is given
a slice without any. One such step would leave nan in all weights, so that batch runs again, whole. On the host only: on
accelerators a look at every loss would have every step wait for them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.errors import some_of
from lightning_dpx.lightning.run_again import RunAgain
from lightning_dpx.replicas import BatchSlice, MergeRules, weights_of

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

T = TypeVar("T")
_ADVICE = "For all devices to take part, let a step give numbers on any rows (such as 0, weighed by loss_weight)."
_SOME = 4  # batches that run again, before it is asked whether most do


class LostNumbersError(RunAgain):
    """Slices have given nan: the step is to run again on the whole batch.

    Args:
        names: Of what is nan.
        rules: Of the step.
    """

    def __init__(self, names: Sequence[str], rules: MergeRules) -> None:
        self._rules = rules
        self._reason = (
            f"On a slice it gives nan ({some_of(names)}), which the whole batch may not have. Its slices had begun it: "
            "what it counts outside of the module, they did as well."
        )
        super().__init__(self._reason)

    def run_again(self, session: "Session", name: str, run: Callable[[], T]) -> T:
        """See :meth:`RunAgain.run_again`."""
        news = self._rules.news
        news.num_lost += 1
        # Twice the work for a batch here and there, and not for nearly all of them.
        if news.num_lost > _SOME and 4 * news.num_lost > news.batch:
            session.whole_batches.give_whole(name, self._reason, _ADVICE)
        else:
            session.whole_batches.give_next_whole(name, self._reason, _ADVICE)
        outputs = run()
        # A run that has diverged gives nan on one device, too: its batches need not run twice.
        news.are_lost = bool(_lost(numbers_of_output(outputs)))
        return outputs


def follow_lost_numbers(
    slices: Sequence[BatchSlice], values: Mapping[int, Mapping[str, Any]], rules: MergeRules
) -> list[str]:
    """Names of the values of a step that are nan on slices, and may be numbers on the whole batch.

    Args:
        slices: That have run.
        values: By the index of a replica, what its slice has given for the batch, by name.
        rules: Of the step.
    """
    # What counts nothing comes out of the mean, whatever it is.
    counted = [one for one, weight in zip(slices, weights_of(slices).of_loss, strict=True) if weight]
    given = [values.get(one.replica.index, {}) for one in counted]
    lost = [_lost(one) for one in given]
    if not any(lost):
        # No value at all says nothing of the next ones.
        rules.news.are_lost = rules.news.are_lost and not any(given)
        return []
    everywhere = set.intersection(*lost)
    some = set.union(*lost) - everywhere
    if some:
        return sorted(some)
    # A spread over single rows is nan on all slices, and not on one device. What was nan there before may be so again.
    return [] if rules.news.are_lost else sorted(everywhere - rules.news.lost_names)


def single_numbers(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Those of ``values`` that are one number for a batch, on the host, and may be nan."""
    found: dict[str, Any] = {}
    for name, value in values:
        if isinstance(value, torch.Tensor):
            # To read one of an accelerator waits for it, which no steady step does.
            if value.ndim == 0 and value.is_floating_point() and is_host(value.device):
                found[name] = value.detach()
        elif isinstance(value, float):
            found[name] = value
    return found


def numbers_of_output(output: Any) -> dict[str, Any]:
    """What a step returns as one number for its batch: a loss, and what is beside it."""
    values = output.items() if isinstance(output, Mapping) else [("the result", output)]
    return single_numbers(values)


def give_whole_after_lost(session: "Session", name: str, names: Sequence[str]) -> None:
    """Of a step that cannot run again, as by hand, the batches that follow are whole.

    Args:
        session: Of the step.
        name: Of the step.
        names: Of what was nan on slices.
    """
    reason = f"On a slice it has given nan ({some_of(names)}), which the whole batch may not have."
    session.whole_batches.give_whole(name, f"{reason} This batch has run on its slices.", _ADVICE)


def _lost(values: Mapping[str, Any]) -> set[str]:
    """The names of those that are nan."""
    return {name for name, value in values.items() if math.isnan(value)}
