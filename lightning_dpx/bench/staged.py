"""Models as chains of stages, so that every way of checkpointing can be put on the same arithmetic.

A stage maps a tuple of tensors to the next one. The models: a deep residual CNN, a GPT with dropout, a U-Net, an LSTM
unrolled over time, and a vision transformer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State = tuple[Tensor, ...]
Stage = Callable[..., State]
Runner = Callable[[Sequence[Stage], State], State]


def run_plainly(stages: Sequence[Stage], state: State) -> State:
    """One stage after the other."""
    for stage in stages:
        state = stage(*state)
    return state


class Staged(nn.Module):
    """A model with a list of stages.

    Attributes:
        runner: How the stages are run.
    """

    # Static, or the class would bind the function to the model as a method.
    runner: Runner = staticmethod(run_plainly)

    def stages(self, x: Tensor) -> list[Stage]:
        """What to run for ``x``."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        # The last stage leaves one tensor.
        return self.runner(self.stages(x), (x,))[0]


class _Wrap(nn.Module):
    """A module of one tensor, as a stage."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> State:
        return (self.inner(x),)


class _Residual(nn.Module):
    """Pre-activation residual block: (B, C, H, W) to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.norm2 = nn.BatchNorm2d(channels)
        # A bias in front of a batch norm is taken away by it.
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return out


class Block(nn.Module):
    """Pre-norm transformer block with dropout: (B, T, C) to the same."""

    def __init__(self, width: int, heads: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.norm1: nn.LayerNorm = nn.LayerNorm(width)
        self.norm2: nn.LayerNorm = nn.LayerNorm(width)
        self.qkv: nn.Linear = nn.Linear(width, 3 * width)
        self.out: nn.Linear = nn.Linear(width, width)
        self.up: nn.Linear = nn.Linear(width, 4 * width)
        self.down: nn.Linear = nn.Linear(4 * width, width)
        self.drop: nn.Dropout = nn.Dropout(dropout)
        self.heads = heads
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=self.causal)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class Chain(Staged):
    """Modules of one tensor, one after the other."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        # Stages are modules, so that their parameters are found.
        self.chain: nn.ModuleList = nn.ModuleList(_Wrap(module) for module in modules)

    def stages(self, x: Tensor) -> list[Stage]:
        return list(self.chain)


class Patches(nn.Module):
    """Images (B, 3, H, W) to tokens (B, T, C)."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.conv: nn.Conv2d = nn.Conv2d(3, width, size, stride=size)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.conv(x).flatten(2).transpose(1, 2)
        return tokens


class _Double(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
        )  # fmt: skip


class UNet(Staged):
    """Images (B, 3, H, W) to maps (B, 2, H, W), over ``depth`` resolutions; the state carries the skips."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth)]
        self.down: nn.ModuleList = nn.ModuleList(_Double(i, o) for i, o in zip([3, *sizes], sizes, strict=False))
        self.up: nn.ModuleList = nn.ModuleList(
            _Double(deep + skip, skip) for deep, skip in zip(sizes[:0:-1], sizes[-2::-1], strict=True)
        )
        self.out: nn.Conv2d = nn.Conv2d(width, 2, 1)

    def stages(self, x: Tensor) -> list[Stage]:
        # A function makes each lambda, so that it keeps its own module and not the last
        # of the loop.
        def shrink(module: nn.Module) -> Stage:
            # Skips travel in the state, so that they are inputs of a stage that is checkpointed.
            return lambda x, *skips: (module(F.max_pool2d(x, 2)), x, *skips)

        def grow(module: nn.Module) -> Stage:
            return lambda x, skip, *skips: (module(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1)), *skips)

        down = [shrink(module) for module in self.down[1:]]
        return [lambda x: (self.down[0](x),), *down, *(grow(module) for module in self.up), lambda x: (self.out(x),)]


class UnrolledLSTM(Staged):
    """Sequences (T, B, C) to the last hidden state (B, H), one cell call per stage."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.cell: nn.LSTMCell = nn.LSTMCell(inputs, hidden)
        self.head: nn.Linear = nn.Linear(hidden, 10)
        self.hidden = hidden

    def stages(self, x: Tensor) -> list[Stage]:
        # The cell makes its own zeros for the first step.
        def begin(x: Tensor) -> State:
            return self.cell(x[0])  # type: ignore[no-any-return]

        def step(time: int) -> Stage:
            return lambda h, c: self.cell(x[time], (h, c))

        return [begin, *(step(time) for time in range(1, len(x))), lambda h, _c: (self.head(h),)]


@dataclass(frozen=True, slots=True)
class StagedModel:
    """How to build a model and an input of ``rows`` rows."""

    build: Callable[[], Staged]
    make_input: Callable[[int], Tensor]
    rows: int


def _cnn(depth: int) -> Callable[[], Staged]:
    return lambda: Chain(
        nn.Conv2d(3, 16, 3, padding=1), *(_Residual(16) for _ in range(depth)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )  # fmt: skip


def _gpt() -> Staged:
    blocks = [Block(256, 4, 0.1, causal=True) for _ in range(12)]
    return Chain(nn.Embedding(256, 256), *blocks, nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256)))


def _vit() -> Staged:
    blocks = [Block(192, 3, 0.0, causal=False) for _ in range(12)]
    return Chain(Patches(192, 4), *blocks, nn.Sequential(nn.LayerNorm(192), nn.Linear(192, 10)))


STAGED_MODELS = {
    "cnn": StagedModel(_cnn(100), lambda rows: torch.randn(rows, 3, 32, 32), rows=16),
    "gpt": StagedModel(_gpt, lambda rows: torch.randint(256, (rows, 256)), rows=4),
    "unet": StagedModel(lambda: UNet(16, 4), lambda rows: torch.randn(rows, 3, 64, 64), rows=8),
    "lstm": StagedModel(lambda: UnrolledLSTM(64, 256), lambda rows: torch.randn(64, rows, 64), rows=64),
    "vit": StagedModel(_vit, lambda rows: torch.randn(rows, 3, 32, 32), rows=16),
}
