"""NCCL keeps the contract of all reducers."""

import pytest
import torch

from lightning_dpx.reducers import make_reducer


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_keeps_the_same_contract() -> None:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    grads = [[torch.full((5,), float(k), device=device)] for k, device in enumerate(devices)]
    total = make_reducer("nccl", devices).reduce(grads)[0]
    assert total.tolist() == [sum(range(len(devices)))] * 5
