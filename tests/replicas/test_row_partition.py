"""Rows are dealt by workload, neighbors on one device may share, and slices are cut into micro-batches."""

import torch

from lightning_dpx.replicas.row_partition import RowPartition, join_neighbors

CPU = torch.device("cpu")
META = torch.device("meta")


def test_neighbors_on_one_device_hand_their_rows_to_the_first_of_them() -> None:
    assert join_neighbors((3, 2, 2, 1), [CPU, CPU, META, META]) == (5, 0, 3, 0)
    assert join_neighbors((3, 2, 2), [CPU, META, CPU]) == (3, 2, 2), "the order of samples stays"


def test_training_steps_may_be_dealt_to_replicas_that_join_their_slices_otherwise() -> None:
    partition = RowPartition([CPU] * 2, workload="even", joins_slices=True, micro_batches=1)
    assert partition.is_one_slice
    assert partition.sizes(4, training=True) == (4, 0)
    partition.joins_slices_in_training = False
    assert partition.trains_apart
    assert not partition.is_one_slice
    assert partition.sizes(4, training=True) == (2, 2)
    assert partition.sizes(4, training=False) == (4, 0)


def test_slices_are_cut_into_micro_batches_in_training_alone_once_a_plan_has_chosen_their_number() -> None:
    partition = RowPartition([CPU] * 2, workload=[3, 1], joins_slices=False, micro_batches=1)
    partition.cut_slices([3, 1], training=True)
    assert partition.device_of == [0, 0, 0, 1]
    assert partition.sizes(8, training=True) == (2, 2, 2, 2)
    assert partition.sizes(8, training=False) == (6, 0, 0, 2)
    assert partition.by_device((2, 2, 2, 2)) == (6, 2)
    partition.stop_cutting_slices(training=True)
    assert partition.sizes(8, training=True) == (6, 0, 0, 2)


def test_a_few_large_rows_are_cut_as_a_full_batch_of_their_shape_is() -> None:
    """Six rows of 64 tokens may need what forty-eight of eight need: to run them in one piece breaks the budget."""
    partition = RowPartition([CPU], workload="even", joins_slices=False, micro_batches=2)
    short = ((8,), (8,))
    long = ((64,), (64,))
    assert partition.sizes(48, training=True, row_shapes=short) == (24, 24)
    assert partition.sizes(6, training=True, row_shapes=long) == (3, 3)
    assert partition.sizes(6, training=True, row_shapes=short) == (6, 0), "the last batch of an epoch"
    assert partition.sizes(3, training=True, row_shapes=long) == (3, 0)
    partition.forget_usual_rows()
    assert partition.sizes(6, training=True, row_shapes=short) == (3, 3)


def test_shapes_that_were_forgotten_are_cut_as_full_batches() -> None:
    partition = RowPartition([CPU], workload="even", joins_slices=False, micro_batches=2)
    assert partition.sizes(48, training=True, row_shapes=((0,),)) == (24, 24)
    for length in range(1, 5000):
        assert partition.sizes(4, training=True, row_shapes=((length,),)) == (2, 2)
    assert partition.sizes(6, training=True, row_shapes=((0,),)) == (3, 3)
