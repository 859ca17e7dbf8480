"""Where the rows of a step lie in what it draws."""

import pytest

from lightning_dpx.replicas.drawn_rows import DrawnRows, find_drawn_rows, orders_of_rows


@pytest.mark.parametrize(
    ("shapes", "found"),
    [
        ([(5, 7), (3, 7), (2, 7)], [DrawnRows((0, 7), 0, 1)]),
        ([(7, 5), (7, 2), (7, 3)], [DrawnRows((7, 0), 1, 1)]),
        ([(35,), (21,), (14,)], [DrawnRows((0,), 0, 7)]),
        ([(20, 7, 4), (12, 7, 4), (8, 7, 4)], [DrawnRows((0, 7, 4), 0, 4)]),
        ([(10, 7), (10, 7), (10, 7)], []),
        ([(5, 5), (3, 3), (2, 2)], []),
        ([(17,), (9,), (8,)], []),
        ([(5, 7), (21,), (14,)], []),
        ([(), (), ()], []),
    ],
    ids=["rows", "time first", "flattened", "heads", "weights", "pairs", "padded", "another on slices", "a number"],
)
def test_rows_lie_where_shapes_grow_with_them(shapes: list[tuple[int, ...]], found: list[DrawnRows]) -> None:
    whole, *sliced = [[shape] for shape in shapes]
    assert find_drawn_rows(whole, sliced, (3, 2)) == tuple(found)


def test_slices_that_draw_at_other_times_say_nothing_of_rows() -> None:
    assert not find_drawn_rows([(5,), (5,)], [[(3,), (3,)], [(2,)]], (3, 2))
    assert not find_drawn_rows([(5,)], [[(3,)]], (3, 2))


def test_flattened_rows_may_lie_in_several_orders() -> None:
    assert orders_of_rows([DrawnRows((0, 7), 0, 1), DrawnRows((7, 0), 1, 1)]) == [1]
    assert orders_of_rows([DrawnRows((0,), 0, 7), DrawnRows((0,), 0, 28)]) == [1, 2, 7, 28]


def test_a_shape_tells_its_rows() -> None:
    heads = DrawnRows((7, 0, 4), 1, 2)
    assert heads.num_rows((7, 6, 4)) == 3
    assert heads.num_rows((7, 5, 4)) == 0
    assert heads.num_rows((6, 6, 4)) == 0
    assert heads.num_rows((7, 6)) == 0
