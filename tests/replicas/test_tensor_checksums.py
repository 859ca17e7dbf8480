import torch

from lightning_dpx.replicas.tensor_checksums import checksums


def test_a_checksum_sees_a_single_bit_and_no_order() -> None:
    one = torch.tensor([1.0, 2.0, 3.0])
    assert checksums([one, one.flip(0)]) == checksums([one.flip(0), one])
    other = one.clone()
    other.view(torch.int32)[1] += 1
    assert checksums([one]) != checksums([other])
    assert checksums([torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.bool)])[1] == 2
    assert checksums([]) == []
