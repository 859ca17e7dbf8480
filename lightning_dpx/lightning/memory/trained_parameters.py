"""Which parameters get gradients: a run may unfreeze some, and its steps then hold more than was planned for."""

from collections.abc import Sequence

from torch import nn


class TrainedParameters:
    """The parameters that have got gradients so far, by their places in a list."""

    def __init__(self) -> None:
        self._known: list[bool] = []

    def note(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Notes those that get gradients from now on; says whether they are others than before.

        Some that no longer do take nothing more, and are back in the steps of a run that trains parts in turns.

        Args:
            parameters: All of a module, in the order of every call.
        """
        now = [parameter.requires_grad for parameter in parameters]
        if now == self._known:
            return False
        known = self._known
        if len(known) != len(now):
            # Other parameters than before, none of which is known.
            self._known = now
            return bool(known)
        self._known = list(map(bool.__or__, known, now))
        return self._known != known
