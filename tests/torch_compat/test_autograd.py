"""A backward without torch's checks gives the gradients of one with them."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_dpx.torch_compat import is_in_checkpoint, nodes_of_graph, parametrizations_are_cached, run_backward


class Counted(TorchFunctionMode):
    """Counts the functions of torch that it sees."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_mode", [False, True])
def test_several_losses_with_gradients_of_their_own(with_mode: bool) -> None:
    found = []
    for backward in (run_backward, torch.autograd.backward):
        weights = torch.tensor([1.0, 2.0], requires_grad=True)
        losses = ((weights * 3).sum(), weights.square().sum())
        gradients = (torch.tensor(2.0), torch.tensor(0.5))
        if with_mode:
            with Counted():
                backward(losses, gradients)
        else:
            backward(losses, gradients)
        assert isinstance(weights.grad, torch.Tensor)
        found.append(weights.grad)
    assert torch.equal(found[0], torch.tensor([7.0, 8.0]))
    assert torch.equal(*found)


def test_a_checkpoint_tells_that_it_runs() -> None:
    told = []

    def block(rows: torch.Tensor) -> torch.Tensor:
        told.append(is_in_checkpoint())
        return rows.square()

    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert told == [True, True], "in its forward, and as it is repeated"
    assert not is_in_checkpoint()


def test_a_cache_of_parametrizations_is_seen() -> None:
    assert not parametrizations_are_cached()
    with torch.nn.utils.parametrize.cached():
        assert parametrizations_are_cached()
    assert not parametrizations_are_cached()


def test_each_node_of_a_graph_is_found_once_however_deep_it_is() -> None:
    leaf = torch.ones(2, requires_grad=True)
    result = leaf
    for _ in range(3000):
        result = result + result
    nodes = list(nodes_of_graph([result.grad_fn, None]))
    assert len(nodes) == 3001
    assert [node.variable is leaf for node in nodes if hasattr(node, "variable")] == [True]
