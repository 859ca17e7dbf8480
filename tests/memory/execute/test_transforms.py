"""Transforms of ``torch.func`` inside a planned forward, and what is left of it in torch afterwards."""

import threading
from types import ModuleType

import pytest
import torch
from torch.autograd import graph

from lightning_dpx.memory.execute.transforms import STEP_ASIDE, is_transformed


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def test_a_transform_runs_under_hooks_and_they_are_on_again_afterwards() -> None:
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    x = torch.randn(3, requires_grad=True)
    before = STEP_ASIDE.count
    with STEP_ASIDE.hooks(pack, lambda tensor: tensor):
        slope = torch.func.grad(lambda value: value.sin().sum())(torch.zeros(2))
        assert packed == []  # what a transform saves is its own
        y = x.exp()
    assert STEP_ASIDE.count == before + 1
    torch.testing.assert_close(slope, torch.ones(2))
    assert packed == [x.shape]
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.exp())


def test_hooks_of_others_are_refused_by_torch_as_always() -> None:
    with (
        STEP_ASIDE.hooks(_double, _double),
        graph.saved_tensors_hooks(_double, _double),
        pytest.raises(RuntimeError, match="saved tensor hooks"),
    ):
        torch.func.grad(torch.sum)(torch.zeros(2))


def test_other_threads_find_torchs_own_and_so_does_everybody_afterwards() -> None:
    own = graph.disable_saved_tensors_hooks
    found: list[object] = []
    with STEP_ASIDE.standing_in():
        thread = threading.Thread(target=lambda: found.append(graph.disable_saved_tensors_hooks))
        thread.start()
        thread.join()
        assert graph.disable_saved_tensors_hooks is not own
    assert found == [own]
    assert graph.disable_saved_tensors_hooks is own
    assert type(graph) is ModuleType


def test_a_tensor_inside_a_transform_is_told_from_others() -> None:
    seen: list[bool] = []

    def looked_at(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(is_transformed(tensor))
        return tensor.sum()

    torch.func.grad(looked_at)(torch.zeros(2))
    assert seen == [True]
    assert not is_transformed(torch.zeros(2))
