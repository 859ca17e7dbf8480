"""The ways in which values of slices become one, and what each slice counts in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "join", "items", "union", "children", "equal", "mean", "loss mean", "sum", "max", "min", "quadratic mean",
    "geometric mean", "first", "last", "by type", "added", "changes",
]  # fmt: skip

MEANS: frozenset[Kind] = frozenset({"mean", "loss mean", "quadratic mean", "geometric mean"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How the values of slices become one.

    Attributes:
        kind: "join" along a dim, "items" of lists one after the other, "union" of mappings and sets with different
            keys, "children" each by its own rule, the name of a reduction, "by type" where nothing is known, "added"
            where what slices add to the value before comes together, or "changes" where each has changed elements of
            its own.
        dim: Of a join.
        blocks: Of a join: every value is as many blocks along the dim, and the n-th blocks of all come together.
    """

    kind: Kind
    dim: int = 0
    blocks: int = 1


@dataclass(slots=True, kw_only=True)  # not frozen: five are made in every step, and that would cost 1 us each
class Weights:
    """What the slices count.

    Attributes:
        rows: Of each slice.
        of_loss: What each slice's loss weighs; the rows unless the user says otherwise.
    """

    rows: Sequence[float]
    of_loss: Sequence[float]

    @property
    def differ(self) -> bool:
        """Whether the user gave weights of the loss that are not the rows."""
        return list(self.of_loss) != list(self.rows)

    def of(self, kind: Kind) -> Sequence[float]:
        """The weights that a mean of this kind takes."""
        if kind == "loss mean":
            return self.of_loss
        return self.rows
