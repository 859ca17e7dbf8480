"""What slices count in sums and means."""

import torch
from torch import nn

from lightning_dpx.replicas import BatchSlice, weights_of
from lightning_dpx.replicas.replica import Replica


def test_a_row_counts_as_much_as_any_other_unless_the_user_weighs_slices() -> None:
    replica = Replica(0, torch.device("cpu"), nn.Identity())
    weights = weights_of([BatchSlice(replica, 3, None), BatchSlice(replica, 2, None, weight=0.5)])
    assert weights.rows == [3, 2]
    assert weights.of_loss == [3, 0.5]
