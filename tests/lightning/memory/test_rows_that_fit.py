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
