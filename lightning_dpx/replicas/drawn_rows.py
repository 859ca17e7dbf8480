"""Along which dim of what a step draws its rows lie, which is not always dim 0, one by one.

shape of a mask    on 5 rows    on 3      on 2
rows               (5, 7)       (3, 7)    (2, 7)    dim 0, one each
time first         (7, 5)       (7, 3)    (7, 2)    dim 1, one each
flattened          (35,)        (21,)     (14,)     dim 0, 7 each
weights            (10, 7)      (10, 7)   (10, 7)   no rows
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class DrawnRows(NamedTuple):
    """A shape of what is drawn for rows.

    Attributes:
        shape: With a 0 in place of the dim that grows with the rows.
        dim: That dim.
        per_row: How many places in it each row has.
    """

    shape: tuple[int, ...]
    dim: int
    per_row: int

    def num_rows(self, shape: Sequence[int]) -> int:
        """Of how many rows such a shape is; 0 if it is another one."""
        if len(shape) != len(self.shape) or shape[self.dim] % self.per_row:
            return 0
        others = (*shape[: self.dim], 0, *shape[self.dim + 1 :])
        return shape[self.dim] // self.per_row if others == self.shape else 0

    @property
    def is_usual(self) -> bool:
        """Whether each row is one of dim 0."""
        return self.dim == 0 and self.per_row == 1


def find_drawn_rows(
    whole: Sequence[Sequence[int]], sliced: Sequence[Sequence[Sequence[int]]], sizes: Sequence[int]
) -> tuple[DrawnRows, ...]:
    """Shapes that grow with the rows of a step.

    Args:
        whole: Shapes of what one device has drawn, draw by draw.
        sliced: Of what each slice has drawn, in any order of slices.
        sizes: Rows of each slice.

    Returns:
        None of them where slices do not draw as often as one device, or are all of one size.
    """
    if len(sliced) != len(sizes) or len({len(whole), *map(len, sliced)}) > 1:
        return ()
    found: dict[DrawnRows, None] = {}
    for shapes in zip(whole, *sliced, strict=True):
        rows = _rows_of(shapes, sizes)
        if rows is not None:
            found[rows] = None
    # A dict, for its order: the same in every run.
    return tuple(found)


def _rows_of(shapes: Sequence[Sequence[int]], sizes: Sequence[int]) -> DrawnRows | None:
    """Along which dim shapes of one draw, that of one device first, grow with the rows."""
    whole, *sliced = shapes
    if any(len(shape) != len(whole) for shape in sliced):
        return None
    for dim, size in enumerate(whole):
        per_row, rest = divmod(size, sum(sizes))
        wanted = sorted(per_row * size_of_slice for size_of_slice in sizes)
        if per_row and not rest and sorted(shape[dim] for shape in sliced) == wanted:
            found = DrawnRows((*whole[:dim], 0, *whole[dim + 1 :]), dim, per_row)
            # What grows in two dims, such as a mask of pairs, belongs to no row.
            return found if all(found.num_rows(shape) for shape in sliced) else None
    return None


def orders_of_rows(rows: Iterable[DrawnRows]) -> list[int]:
    """How many parts of the places of a row may lie apart from one another, one after the other to be tried.

    Flattened rows follow one another with all that is theirs (1), or two views of the batch do (2), or time comes
    first: each row has as many places as there are steps then, or a multiple of that.
    """
    several = sorted({one.per_row for one in rows if one.per_row > 1})
    if not several:
        return [1]
    return list(dict.fromkeys([1, 2, several[0], several[-1]]))
