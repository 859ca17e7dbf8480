"""How many rows of a later batch are run without a plan at a time, by what earlier ones took."""

from dataclasses import replace

import torch
from torch import nn

from lightning_dpx.lightning.memory.rows_that_fit import RowsThatFit
from lightning_dpx.replicas import BatchSlice, Replica
from tests.memory.made_up import chain

REPLICA = Replica(0, torch.device("cpu"), nn.Linear(1, 1))
PROFILE = replace(chain(2), curve=(1600,))


def of_size(rows: int, length: int = 4) -> BatchSlice:
    return BatchSlice(REPLICA, rows, torch.ones(rows, length))


def test_nothing_is_said_of_a_first_batch_and_of_what_fits_as_it_is() -> None:
    rows = RowsThatFit()
    assert rows.of(of_size(16), 1) is None
    rows.note(of_size(16), PROFILE)
    assert rows.of(of_size(16), 1600) is None
    assert rows.of(of_size(40), 4000) is None
    rows.forget()
    assert rows.of(of_size(40), 1) is None


def test_so_many_rows_are_run_that_their_replays_fit_as_well() -> None:
    rows = RowsThatFit()
    rows.note(of_size(16), PROFILE)
    most = rows.of(of_size(40), 2400)
    assert most is not None
    assert 16 <= most < 24


def test_longer_rows_count_by_the_square_of_their_length_and_shorter_ones_by_their_length() -> None:
    rows = RowsThatFit()
    rows.note(of_size(16), PROFILE)
    same = rows.of(of_size(64), 4 * 1600 - 1)
    longer = rows.of(of_size(64, 8), 4 * 4 * 1600 - 1)
    shorter = rows.of(of_size(64, 2), 4 * 1600 // 2 - 1)
    assert same == longer == shorter


def test_a_step_that_took_less_than_one_before_tells_nothing() -> None:
    rows = RowsThatFit()
    rows.note(of_size(16), PROFILE)
    known = rows.of(of_size(40), 2400)
    rows.note(of_size(16), replace(PROFILE, curve=(400,)))
    assert rows.of(of_size(40), 2400) == known


def test_where_they_have_not_shown_what_steps_save_all_are_run_next() -> None:
    rows = RowsThatFit()
    rows.note(of_size(16), PROFILE)
    assert rows.of(of_size(40), 2400) is not None
    rows.were_too_few()
    assert rows.of(of_size(40), 2400) is None
    rows.note(of_size(40), replace(PROFILE, curve=(4800,)))
    assert rows.of(of_size(40), 2400) is not None


def test_what_cannot_be_cut_is_taken_in_proportion_unless_it_is_much_larger() -> None:
    rows = RowsThatFit()
    assert rows.in_proportion(of_size(20)) is None
    rows.note(of_size(16), PROFILE)
    found = rows.in_proportion(of_size(20))
    assert found is not None
    assert found.peak == 2000
    assert found.scale == PROFILE.scale
    assert rows.in_proportion(of_size(40)) is None
    assert rows.in_proportion(of_size(8, 8)) is None, "as many numbers, of rows that are twice as long"


def test_of_a_batch_without_tensors_nothing_is_known() -> None:
    rows = RowsThatFit()
    rows.note(of_size(16), PROFILE)
    fetched = BatchSlice(REPLICA, 40, iter("a"))
    assert rows.of(fetched, 2400) is None
    assert rows.in_proportion(fetched) is None
