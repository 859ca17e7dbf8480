"""Small models, from one that does nothing to one that is all arithmetic."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_dpx.lightning.lightning_api import LightningModule

Batch = tuple[torch.Tensor, torch.Tensor]


class TransformerBlock(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a layer norm: (B, T, C) to (B, T, C)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1: nn.LayerNorm = nn.LayerNorm(width)
        self.norm2: nn.LayerNorm = nn.LayerNorm(width)
        self.qkv: nn.Linear = nn.Linear(width, 3 * width)
        self.out: nn.Linear = nn.Linear(width, width)
        self.mlp: nn.Sequential = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.num_heads = num_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        fed: torch.Tensor = self.mlp(self.norm2(x))
        return x + fed


class GPT(nn.Module):
    """Token ids (B, T) to logits (B * T, V)."""

    def __init__(self, vocabulary: int = 256, width: int = 256, depth: int = 4, context: int = 128) -> None:
        super().__init__()
        self.tokens: nn.Embedding = nn.Embedding(vocabulary, width)
        self.positions: nn.Embedding = nn.Embedding(context, width)
        self.blocks: nn.Sequential = nn.Sequential(*(TransformerBlock(width, 4) for _ in range(depth)))
        self.head: nn.Sequential = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        logits: torch.Tensor = self.head(self.blocks(x))
        return logits.flatten(0, 1)


def _deep() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(100) for layer in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 10))


def _wide() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )  # fmt: skip


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def _digits() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 16, 10),
    )  # fmt: skip


def _rows(*shape: int) -> Callable[[int], Batch]:
    return lambda size: (torch.randn(size, *shape), torch.randint(10, (size,)))


def _text(size: int) -> Batch:
    # One more than the context: targets are the inputs moved by one.
    ids = torch.randint(256, (size, 129))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _cross_entropy(net: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(net(batch[0]), batch[1].flatten())


def _only_weight(net: nn.Module, batch: Batch) -> torch.Tensor:
    # No forward: what is left of a step is what the loop around it costs.
    return net.get_parameter("weight").sum()


@dataclass(frozen=True, slots=True)
class BenchModel:
    """What to train, the rows of its global batch, and how many steps make one measured chunk."""

    build: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]
    batch_size: int
    steps: int
    loss: Callable[[nn.Module, Batch], torch.Tensor] = _cross_entropy


MODELS = {
    "nothing": BenchModel(lambda: nn.Linear(1, 1, bias=False), _rows(1), batch_size=16, steps=300, loss=_only_weight),
    "tiny": BenchModel(
        lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)), _rows(32), batch_size=64, steps=200
    ),
    "deep": BenchModel(_deep, _rows(32), batch_size=256, steps=40),
    "wide": BenchModel(_wide, _rows(1024), batch_size=128, steps=25),
    "digits": BenchModel(_digits, _rows(1, 8, 8), batch_size=64, steps=100),  # of examples/digits.py
    "cnn": BenchModel(_cnn, _rows(3, 32, 32), batch_size=64, steps=12),
    "gpt": BenchModel(GPT, _text, batch_size=16, steps=8),
}


class BenchModule(LightningModule):
    """A model with its loss and plain SGD."""

    def __init__(self, model: BenchModel) -> None:
        super().__init__()
        self.net: nn.Module = model.build()
        self._loss = model.loss

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The model's own loss, a mean over the batch."""
        return self._loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class _ReadyBatches(Dataset[Batch]):
    """Batches made beforehand, so that the loader costs nothing; more of them than any run asks for."""

    def __init__(self, model: BenchModel, size: int) -> None:
        self._batches = [model.make_batch(size) for _ in range(8)]

    def __len__(self) -> int:
        # No epoch ends while steps are measured.
        return 1_000_000

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index % len(self._batches)]


def ready_loader(model: BenchModel, size: int) -> DataLoader[Any]:
    """A loader of finished batches of ``size`` rows."""
    # The data set gives whole batches, so there is nothing to collate.
    return DataLoader(_ReadyBatches(model, size), batch_size=None)
