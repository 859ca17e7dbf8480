"""Whether two nested batches are the same: types, keys, attributes, and every number."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_dpx.replicas.slicing import batch_size, slice_batch


def assert_same(ours: Any, theirs: Any, path: str = "batch") -> None:
    """Fails with the path of the first difference."""
    assert type(ours) is type(theirs), path
    if isinstance(theirs, PackedSequence):
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other, path)
    elif isinstance(theirs, torch.Tensor):
        _assert_same_tensors(ours, theirs, path)
    elif isinstance(theirs, np.ndarray):
        np.testing.assert_array_equal(ours, theirs, err_msg=path)
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs), path
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{path}.{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), path
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, other, f"{path}.{index}")
    elif dataclasses.is_dataclass(theirs):
        for field in dataclasses.fields(theirs):
            assert_same(getattr(ours, field.name), getattr(theirs, field.name), f"{path}.{field.name}")
    else:
        assert ours == theirs, path


def _assert_same_tensors(ours: torch.Tensor, theirs: torch.Tensor, path: str) -> None:
    assert ours.dtype == theirs.dtype, path
    if theirs.is_nested:
        for mine, other in zip(ours.unbind(), theirs.unbind(), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, msg=path)
    else:
        assert ours.layout == theirs.layout, path
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), rtol=0, atol=0, msg=path)


def halves(batch: Any, first: int, **options: Any) -> list[Any]:
    return slice_batch(batch, [first, batch_size(batch, **options) - first], **options)
