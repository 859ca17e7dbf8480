"""On fake tensors a step takes the branches of a real one wherever small whole numbers decide."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dpx.memory import profile_module
from lightning_dpx.torch_compat import FakeTensor
from tests.memory.profile.test_fake import described

LENGTH = 24


def mask_of_packed(positions: Tensor) -> Tensor | None:
    """As libraries do: a fake has no numbers to look at, so it gets the mask that a real tensor may do without."""
    restarts = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    if not isinstance(restarts, FakeTensor) and bool((restarts[:, -1] == 0).all()):
        return None
    return restarts[:, None, :, None] == restarts[:, None, None, :]


class Masked(nn.Module):
    """Attention over ids (B, T) of which 0 is padding; ``way`` tells what depends on numbers."""

    def __init__(self, way: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.mix = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.way = way
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += 1
        mask = self.way(ids)
        x = self.words(ids)
        q, k, v = self.mix(x).view(*ids.shape, 3, 2, 16).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2)).sin().mean()


def positions_count_up(ids: Tensor) -> Tensor | None:
    return mask_of_packed(torch.arange(ids.shape[1], device=ids.device).expand(ids.shape))


def nothing_is_padded(ids: Tensor) -> Tensor | None:
    padding = ids != 0
    return None if not isinstance(padding, FakeTensor) and bool(padding.all()) else padding[:, None, None, :]


def as_long_as_the_longest(ids: Tensor) -> Tensor | None:
    longest = int((ids != 0).sum(-1).max())
    return None if longest == ids.shape[1] else torch.ones(ids.shape[1], longest, dtype=torch.bool)


def rows_by_number(ids: Tensor) -> Tensor | None:
    rows = torch.nonzero(ids.sum(-1) > 0).squeeze(-1)
    return None if len(rows) == len(ids) else torch.zeros(len(ids), 1, 1, ids.shape[1], dtype=torch.bool)


WAYS = [positions_count_up, nothing_is_padded, as_long_as_the_longest, rows_by_number]


def step_of(way: Callable[[Tensor], Tensor | None]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Masked(way), torch.randint(1, 50, (3, LENGTH))


def both(module: nn.Module, *batch: Any) -> None:
    """The profile on fakes is that of a real step, and nobody says that fakes cannot run it."""
    real = profile_module(module, *batch)
    dry = profile_module(module, *batch, device="cpu")
    assert "from fake tensors" in dry.basis
    assert described(dry) == described(real)
    assert dry.peak == pytest.approx(real.peak, rel=2e-3)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_branch_of_a_real_step_is_taken(way: Callable[[Tensor], Tensor | None]) -> None:
    both(*step_of(way))


def test_the_batch_and_the_buffers_keep_their_numbers() -> None:
    def writes(ids: Tensor) -> None:
        ids[:, 0] = 7

    module, ids = step_of(writes)
    before = ids.clone()
    profile_module(module, ids, device="cpu")
    assert torch.equal(ids, before)
    assert int(module.seen) == 0


class ChoosesByScore(nn.Module):
    """Writes what a parameter decides into a mask of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(32, 1)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        chosen.scatter_(1, self.score(x).squeeze(-1).topk(4, dim=1).indices, True)
        return self.layers(x).masked_fill(~chosen[..., None], 0.0).sin().sum()


def test_numbers_of_fakes_are_never_taken_for_known() -> None:
    """The step is run again with nothing but fakes."""
    torch.manual_seed(0)
    both(ChoosesByScore(), torch.randn(4, LENGTH, 32))


class Edges(nn.Module):
    """Sums over the edges (2, E) of a graph with N nodes, of which some are chosen by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = torch.zeros_like(x).index_add(0, edges[1], self.layer(x)[edges[0]])
        return x[x[:, 0] < 1e9].sin().sum()


def test_rows_that_belong_together_are_run_together() -> None:
    """Of a graph no first rows can be taken: the others would be missing."""
    torch.manual_seed(0)
    module, x, edges = Edges(), torch.randn(40, 16), torch.randint(40, (2, 100))
    with pytest.warns(UserWarning, match="Fake tensors cannot run this step"):
        dry = profile_module(module, x, edges, device="cpu")
    assert dry.basis == "from a real step for cpu: times by FLOPs and bytes"
    assert dry.peak == profile_module(module, x, edges).peak
