"""What one step lacks of another is cut where it belongs."""

from lightning_dpx.memory.profile.joining.splice import Splice, paths_round
from tests.memory.profile.joining.made_up import all_values, step_of


def test_a_piece_stands_between_the_layers_that_both_steps_call() -> None:
    base = step_of([1, 3])
    donor = step_of([1, 2, 3])
    splice = Splice.of(base, donor, all_values(donor))
    (piece,) = splice.pieces
    assert piece.values == (1,)
    assert piece.next_value == 2
    assert piece.forward == (1, 2)  # of the donor: | 1 [2] 3 | 3 [2] 1 |
    assert piece.backward == (4, 5)
    assert piece.forward_cut == 1  # of the base: | 1 ^ 3 | 3 ^ 1 |
    assert piece.backward_cut == 3
    assert piece.value_cut == 1
    assert splice.piece_of == {1: 0}


def test_layers_between_which_the_base_may_have_calls_are_pieces_of_their_own() -> None:
    donor = step_of([1, 2, 4])
    splice = Splice.of(step_of([3]), donor, all_values(donor))
    assert [piece.values for piece in splice.pieces] == [(0,), (1,), (2,)]
    # No layer is in both steps: they are called in the order of their numbers.
    assert [piece.value_cut for piece in splice.pieces] == [0, 0, 1]


def test_what_is_not_wanted_is_not_cut_out() -> None:
    assert not Splice.of(step_of([1]), step_of([1, 2]), wanted=[]).pieces


def test_the_modules_round_a_path() -> None:
    assert paths_round("a.0.b") == ["a.0.b", "a.0", "a"]
    assert paths_round("") == []
