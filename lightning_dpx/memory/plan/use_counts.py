"""How often each value of a profile will be used once more, as :mod:`lightning_dpx.memory.execute.values` counts it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_dpx.memory.plan.recomputed_values import Outline, RecomputedValues


class UseCounts:
    """Uses to come, of each value (V values).

    A profile that tells when autograd saves tensors tells when each use is known; otherwise all are known at once.

    Args:
        outline: Of the profile.
        choice: What is recomputed.

    Attributes:
        left: Uses that are known and have not been (V).
        of_backward: Uses in one backward that have become known so far (V): another one through the graph starts anew.
    """

    def __init__(self, outline: "Outline", choice: "RecomputedValues") -> None:
        profile = outline.profile
        self.left: list[int] = [0] * len(profile.values)
        self.of_backward: list[int] = [0] * len(profile.values)
        self._to_come = list[tuple[int, int]]()  # (event, value), the last one first
        # With several backwards a value is asked for again by later ones, which nothing knows of
        # before they have saved it.
        if profile.saves:
            self._to_come = _uses_in_order(outline, choice)
            return
        left = self.left
        for _, value, _ in outline.requests:
            left[value] += 1
        for index in choice.live:
            for source in choice.inputs[index]:
                left[source] += 1

    def advance(self, event: int) -> None:
        """Uses become known up to ``event``."""
        to_come = self._to_come
        while to_come and to_come[-1][0] <= event:
            value = to_come.pop()[1]
            self.left[value] += 1
            self.of_backward[value] += 1


def _uses_in_order(outline: "Outline", choice: "RecomputedValues") -> list[tuple[int, int]]:
    """When each value is waited for once more: where autograd saves it, and where what is made from it is saved."""
    profile = outline.profile
    first = dict[int, int]()
    for event, value in profile.saves:
        first.setdefault(value, event)
    uses = list(profile.saves)
    # What is computed from a value waits for it from the moment at which that itself is saved.
    for index in sorted(choice.live, reverse=True):  # inputs come first
        event = first.get(index, len(profile.curve))
        for source in outline.inputs[index]:
            uses.append((event, source))
            if outline.virtual[source]:
                first[source] = min(event, first.get(source, event))
    return sorted(uses, reverse=True)
