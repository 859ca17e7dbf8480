"""NCCL keeps the contract of all reducers."""

import pytest
import torch

from lightning_dpx.reducers import make_reducer
from tests.reducers.test_contract import check, make_grads


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_keeps_the_same_contract() -> None:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    grads = [[torch.full((5,), float(k), device=device)] for k, device in enumerate(devices)]
    total = make_reducer("nccl", devices).reduce(grads)[0]
    assert total.tolist() == [sum(range(len(devices)))] * 5


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_sums_gradients_of_all_kinds() -> None:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    reducer = make_reducer("nccl", devices)
    result, again = (reducer.reduce(make_grads(devices)) for _ in range(2))
    check(result, again, len(devices), "cuda")
    for row, repeated in zip(*(reducer.all_reduce(make_grads(devices)) for _ in range(2)), strict=True):
        check(row, repeated, len(devices), "cuda")
