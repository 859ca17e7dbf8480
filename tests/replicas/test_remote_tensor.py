"""A tensor of another device is copied when it is first used, and anew after it was written."""

import torch

from lightning_dpx.replicas.remote_tensor import RemoteTensor, fetched, source_of

CPU = torch.device("cpu")


def test_nothing_is_copied_before_the_values_are_needed_and_then_once() -> None:
    source = torch.arange(4.0)
    remote = RemoteTensor(source, CPU)
    assert (remote.shape, remote.dtype, remote.device) == (source.shape, source.dtype, CPU)
    assert remote.__dict__["_copy"] is None, "descriptions need no values"
    assert type(remote + 1) is torch.Tensor
    assert (remote + 1).tolist() == [1, 2, 3, 4]
    assert fetched(remote) is fetched(remote)
    assert fetched(remote).data_ptr() != source.data_ptr()
    assert source_of(remote) is source


def test_a_write_to_the_source_is_seen_and_one_to_the_copy_stays_here() -> None:
    source = torch.zeros(2)
    remote = RemoteTensor(source, CPU)
    remote.add_(1)
    assert source.tolist() == [0, 0]
    source.add_(5)
    assert torch.stack([remote, remote]).tolist() == [[5, 5], [5, 5]]


def test_the_copy_has_no_history() -> None:
    source = torch.ones(2, requires_grad=True) * 2
    assert fetched(RemoteTensor(source, CPU)).grad_fn is None
