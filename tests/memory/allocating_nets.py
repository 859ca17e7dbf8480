"""Small nets whose operators take memory inside themselves: convolutions of every kind, norms, attention, others."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Case = tuple[nn.Module, Tensor]


def _stack(count: int, *make: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(part() for _ in range(count) for part in make))


def _convolutions(kernel: int = 3, *, channels: int = 16, count: int = 4, **options: int) -> nn.Sequential:
    padding = options.get("dilation", 1) * (kernel // 2)
    return _stack(
        count,
        lambda: nn.Conv2d(channels, channels, kernel, padding=padding, **options),
        lambda: nn.BatchNorm2d(channels),
        nn.ReLU,
    )


def _plain() -> Case:
    return _convolutions(), torch.randn(4, 16, 32, 32)


def _channels_last() -> Case:
    module, rows = _plain()
    return module.to(memory_format=torch.channels_last), rows.to(memory_format=torch.channels_last)


def _grouped() -> Case:
    return _convolutions(channels=32, groups=4), torch.randn(2, 32, 32, 32)


def _dilated() -> Case:
    return _convolutions(dilation=2), torch.randn(4, 16, 32, 32)


def _depthwise() -> Case:
    module = _stack(
        3,
        lambda: nn.Conv2d(16, 64, 1),
        lambda: nn.BatchNorm2d(64),
        nn.SiLU,
        lambda: nn.Conv2d(64, 64, 3, padding=1, groups=64),
        lambda: nn.BatchNorm2d(64),
        nn.SiLU,
        lambda: nn.Conv2d(64, 16, 1),
    )
    return module, torch.randn(2, 16, 32, 32)


def _one_dimension() -> Case:
    module = _stack(4, lambda: nn.Conv1d(16, 16, 9, padding=4), lambda: nn.GroupNorm(4, 16), nn.GELU)
    return module, torch.randn(8, 16, 512)


def _three_dimensions() -> Case:
    return _stack(3, lambda: nn.Conv3d(8, 8, 3, padding=1), nn.GELU), torch.randn(2, 8, 8, 16, 16)


def _transposed() -> Case:
    module = _stack(2, lambda: nn.Conv2d(8, 16, 3, 2, 1), nn.GELU, lambda: nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.GELU)
    return module, torch.randn(4, 8, 32, 32)


def _small_images() -> Case:
    """Weights are far larger than what is computed with them."""
    return _convolutions(channels=128, count=3), torch.randn(2, 128, 4, 4)


def _strided() -> Case:
    module = nn.Sequential(
        nn.Conv2d(3, 16, 7, padding=3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return module, torch.randn(8, 3, 64, 64)


def _upsampled() -> Case:
    module = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(16, 8, 3, padding=1),
        nn.GELU(),
        nn.PixelShuffle(2),
        nn.InstanceNorm2d(2),
        nn.Conv2d(2, 2, 3),
    )
    return module, torch.randn(4, 4, 16, 16)


class UNet(nn.Module):
    """Two levels, joined by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(8, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(32, 32, 3, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.leave = nn.Conv2d(32, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Of images: (B, 8, H, W), H and W even."""
        first = F.silu(self.norm(self.enter(x)))
        low = F.silu(self.middle(F.silu(self.down(first))))
        return self.leave(torch.cat([first, self.up(low)], dim=1))


class Encoder(nn.Module):
    """Embedding, attention and a head over the vocabulary."""

    def __init__(self, *, heads: int = 4, vocabulary: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.layers = _stack(
            2, lambda: nn.TransformerEncoderLayer(64, heads, 128, batch_first=True, dropout=0.0, activation="gelu")
        )
        self.head = nn.Linear(64, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Of tokens: (B, T)."""
        return self.head(self.layers(self.embedding(x)))


class SoftmaxAttention(nn.Module):
    """With the scores in memory, and a mask of bools."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 32)."""
        for _ in range(2):
            query, key, value = self.project(self.norm(x)).chunk(3, dim=-1)
            mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
            scores = (query @ key.transpose(1, 2) / 6.0).masked_fill(mask, float("-inf"))
            x = x + self.out(torch.softmax(scores, dim=-1) @ value)
        return x


class Patches(nn.Module):
    """Images as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 64, 8, stride=8)
        self.layers = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W)."""
        return self.layers(self.cut(x).flatten(2).transpose(1, 2))


class Neighbors(nn.Module):
    """Every point looks at those near it; nothing leads from the distances to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.join = nn.Linear(16, 32), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, 16)."""
        for _ in range(3):
            points = self.project(x)
            nearest = torch.cdist(points, points).topk(4, largest=False).indices
            around = torch.stack([row[index] for row, index in zip(points, nearest, strict=True)])
            x = torch.relu(self.join(torch.cat([points, around.amax(2)], dim=-1)))
        return x


class Codes(nn.Module):
    """Every row becomes the code that is nearest to it."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.codes, self.decode = nn.Parameter(torch.randn(256, 32)), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 32)."""
        for _ in range(2):
            z = self.encode(x)
            distances = z.pow(2).sum(-1, keepdim=True) - 2 * z @ self.codes.t() + self.codes.pow(2).sum(-1)
            x = self.decode(z + (self.codes[distances.argmin(-1)] - z).detach())
        return x


class MaskedInPlace(nn.Module):
    """A mask of bools for each row, beside a call in place."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 32)."""
        for _ in range(3):
            query, key, value = self.project(x).chunk(3, dim=-1)
            scores = (query @ key.transpose(1, 2)).masked_fill_(torch.rand(len(x), x.size(1), 1) > 0.5, -1e4)
            x = x + self.out(scores.softmax(-1) @ value)
        return x


def _perceptron() -> Case:
    module = _stack(5, lambda: nn.Linear(128, 128), lambda: nn.LayerNorm(128), nn.GELU, lambda: nn.Dropout(0.1))
    return module, torch.randn(256, 128)


class Recurrent(nn.Module):
    """A library's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(32, 32, 2), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """(T, B, 32)."""
        return torch.tanh(self.head(self.layers(x)[0]))


NETS: dict[str, Callable[[], Case]] = {
    "convolution": _plain,
    "channels last": _channels_last,
    "grouped": _grouped,
    "dilated": _dilated,
    "depthwise": _depthwise,
    "one dimension": _one_dimension,
    "three dimensions": _three_dimensions,
    "transposed": _transposed,
    "small images": _small_images,
    "strided": _strided,
    "upsampled": _upsampled,
    "u-net": lambda: (UNet(), torch.randn(4, 8, 32, 32)),
    "encoder": lambda: (Encoder(), torch.randint(128, (8, 32))),
    "large vocabulary": lambda: (Encoder(vocabulary=4096), torch.randint(4096, (2, 16))),
    "softmax attention": lambda: (SoftmaxAttention(), torch.randn(8, 64, 32)),
    "patches": lambda: (Patches(), torch.randn(8, 3, 64, 64)),
    "perceptron": _perceptron,
    "embedding": lambda: (
        nn.Sequential(nn.Embedding(64, 64), nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)),
        torch.randint(64, (16, 64)),
    ),
    "neighbors": lambda: (Neighbors(), torch.randn(2, 128, 16)),
    "codes": lambda: (Codes(), torch.randn(512, 32)),
    "masked in place": lambda: (MaskedInPlace(), torch.randn(8, 64, 32)),
    "recurrent": lambda: (Recurrent(), torch.randn(24, 8, 32)),
}
