"""Small parameters travel together, the others one by one: all arrive, and nothing else is written."""

import pytest
import torch
from torch import nn

from lightning_dpx.replicas.parameter_copies import BUNDLE, SMALL, ParameterCopies
from lightning_dpx.simulate import clear_traffic, traffic
from lightning_dpx.torch_compat import version_counter


def parameters(sizes: list[tuple[int, ...]], device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(size, device=device).to(dtype)) for size in sizes]


@pytest.fixture
def sizes() -> list[tuple[int, ...]]:
    return [(3, 4), (5,), (), (0,), (SMALL + 1,), (2, 3)]


def test_every_parameter_arrives(sim, sizes) -> None:
    sources = [*parameters(sizes, "sim:0"), *parameters([(3,), (2,)], "sim:0", torch.bfloat16)]
    targets = [*parameters(sizes, "sim:1"), *parameters([(3,), (2,)], "sim:1", torch.bfloat16)]
    clear_traffic()
    ParameterCopies(sources, targets).copy()
    # One bundle of each dtype, the large parameter and the empty one.
    assert sum(transfer.num_copies for transfer in traffic()) == 4
    assert all(torch.equal(one.cpu(), two.cpu()) for one, two in zip(sources, targets, strict=True))
    assert all(target.requires_grad and target.is_leaf for target in targets)


def test_a_bundle_is_no_larger_than_its_limit(sim) -> None:
    sizes = [(SMALL,)] * (2 * BUNDLE // SMALL + 1)
    sources = parameters(sizes, "sim:0")
    targets = parameters(sizes, "sim:1")
    clear_traffic()
    ParameterCopies(sources, targets).copy()
    assert sum(transfer.num_copies for transfer in traffic()) == 3
    assert all(torch.equal(one.cpu(), two.cpu()) for one, two in zip(sources, targets, strict=True))


def test_other_strides_are_kept() -> None:
    source = nn.Parameter(torch.randn(2, 3, 4, 5))
    target = nn.Parameter(torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    stride = target.stride()
    ParameterCopies([source], [target]).copy()
    assert target.stride() == stride
    assert torch.equal(source, target)


def test_it_is_for_these_parameters_as_they_were() -> None:
    sources = parameters([(2,)], "cpu")
    targets = parameters([(2,)], "cpu")
    copies = ParameterCopies(sources, targets)
    assert copies.is_for(sources, targets)
    assert not copies.is_for(list(sources), targets)
    targets[0].data = targets[0].data.double()
    assert not copies.is_for(sources, targets)


def test_shared_parameters_are_left_alone() -> None:
    shared = parameters([(2,)], "cpu")
    version = version_counter(shared[0])
    ParameterCopies(shared, shared).copy()
    assert version_counter(shared[0]) == version
