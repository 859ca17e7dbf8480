"""Models that planning must get right: five ordinary ones and awkward ones."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Case = tuple[nn.Module, Tensor]


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(dropout)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        out: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(Block(64, 4, 0.1) for _ in range(4))
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 50))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 64, 4, stride=4), nn.Parameter(torch.randn(1, 1, 64))
        self.blocks = nn.Sequential(*(Block(64, 4, 0.0) for _ in range(4)))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.blocks(torch.cat([self.token.expand(len(x), -1, -1), x], dim=1))
        out: Tensor = self.head(x[:, 0])
        return out


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def double(i: int, o: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
                nn.Conv2d(o, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
            )  # fmt: skip

        self.down1, self.down2, self.middle = double(3, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.up2, self.up1 = double(6 * width, 2 * width), double(3 * width, width)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([b, F.interpolate(c, scale_factor=2.0)], 1))
        a = self.up1(torch.cat([a, F.interpolate(b, scale_factor=2.0, mode="bilinear")], 1))
        out: Tensor = self.out(a)
        return out


class UnrolledLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(16, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], 64)
        for step in x:
            h, c = self.cell(step, (h, c))
        out: Tensor = self.head(h)
        return out


class Adapted(nn.Module):
    """A frozen linear layer with a trainable detour of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base, self.drop = base, nn.Dropout(0.05)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(self.drop(x))) * 2.0
        return out


class MaskedBlock(nn.Module):
    """Attention and GELU by hand: with a mask that is added to the scores, and numbers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = self.drop((q @ k.transpose(2, 3) * k.shape[-1] ** -0.5 + mask).softmax(-1))
        x = x + self.drop(self.out((scores @ v).transpose(1, 2).flatten(2)))
        up = self.up(self.norm2(x))
        out: Tensor = x + self.drop(self.down(0.5 * up * (1.0 + torch.tanh(0.8 * (up + 0.045 * up.pow(3))))))
        return out


class LoRA(nn.Module):
    """A frozen language model with adapters in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 64), nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(MaskedBlock(64, 4) for _ in range(3))
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 50))
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        for block in self.blocks:
            for name in ("qkv", "out", "up", "down"):
                setattr(block, name, Adapted(getattr(block, name)))

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = torch.full((1, 1, length, length), -1e9, device=ids.device).triu(1)
        x = self.tokens(ids) + self.positions(torch.arange(length, device=ids.device))
        for block in self.blocks:
            x = block(x, mask)
        out: Tensor = self.head(x)
        return out


def residual_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *(Residual(8) for _ in range(8)), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip


ORDINARY: dict[str, Callable[[], Case]] = {
    "gpt": lambda: (GPT(), torch.randint(50, (4, 32))),
    "lora": lambda: (LoRA(), torch.randint(50, (4, 32))),
    "residual cnn": lambda: (residual_cnn(), torch.randn(4, 3, 16, 16)),
    "unet": lambda: (UNet(), torch.randn(2, 3, 32, 32)),
    "unrolled lstm": lambda: (UnrolledLSTM(), torch.randn(16, 32, 16)),
    "vit": lambda: (ViT(), torch.randn(8, 3, 16, 16)),
}


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.out = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.shared(self.shared(self.shared(x))))
        return out


class Branching(nn.Module):
    """Takes another path, with other operators, every other call."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.calls = nn.Linear(64, 64), nn.Linear(64, 64), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.sigmoid(self.one(x)) if self.calls % 2 else F.gelu(self.two(F.relu(self.one(x))))
        if x.mean() > 0.1:
            x = x * self.two(x)
        return x


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(torch.tanh(Cube.apply(F.silu(self.one(x)))))
        return out


class Swing(torch.autograd.Function):
    """Saves its input and something that nobody else has."""

    @staticmethod
    def forward(ctx, x, scale):  # type: ignore[no-untyped-def]
        swing = torch.sin(x)
        ctx.save_for_backward(x, swing)
        ctx.scale = scale
        return swing * scale

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, swing = ctx.saved_tensors
        return gradient * ctx.scale * torch.cos(x) + 0 * swing, None


class Swinging(nn.Module):
    """Amid random numbers and statistics; what it takes comes by name, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(64), nn.Dropout(0.3)

    def forward(self, given: list[Tensor], *, scale: float = 1.0) -> dict[str, Tensor]:
        x = Swing.apply(self.norm(given[0]), scale)
        return {"out": Swing.apply(self.drop(x), scale) + given[0]}


class CallsInCalls(nn.Module):
    """Modules whose results only they can make, one in another, one after another, and one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.swinging, self.other = nn.Linear(64, 64), Swinging(), Swinging()

    def forward(self, x: Tensor) -> Tensor:
        x = self.swinging([torch.tanh(self.one(x))])["out"]
        x = self.swinging(given=[x], scale=0.5)["out"]
        out: Tensor = torch.relu(self.other([x])["out"]) * 2
        return out


class Whole(nn.Module):
    """In which the calls have no gaps between them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.attention = CallsInCalls(), nn.MultiheadAttention(64, 4, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).view(4, -1, 64)
        out: Tensor = self.attention(y, y, y, attn_mask=torch.ones(16, 16, device=x.device).tril() == 0)[0]
        return out


class Aliasing(nn.Module):
    """Outputs that are views of inputs, and operators that write into views."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.identity = nn.Linear(64, 64), nn.Linear(32, 64), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.identity(torch.relu(self.one(x)))
        left, right = x.chunk(2, dim=1)
        y = self.two(left) * 1.5
        y[:, :32] += right
        y.mul_(2)
        out: Tensor = F.leaky_relu(y, inplace=True).clone().sigmoid_()
        return out


class Hooked(nn.Module):
    """With hooks on tensors and modules, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)
        self.seen: list[float] = []
        self.act.register_forward_hook(lambda _module, _inputs, output: output * 2)
        self.two.register_full_backward_hook(
            lambda _module, _inputs, outputs: self.seen.append(outputs[0].sum().item())
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.one(x))
        x.register_hook(lambda gradient: gradient * 0.5)
        out: Tensor = self.two(x)
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(16, 32, num_layers=2, dropout=0.2), nn.GRU(32, 32, bidirectional=True)
        self.other = nn.LSTM(64, 32, batch_first=True)  # copies its input into another order of dims
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.other(self.gru(self.lstm(x)[0])[0].relu())[0])
        return out


class Complex(nn.Module):
    """Numbers in memory that are not the numbers of the tensor, and views with another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(torch.sin(self.one(x)), self.two(x))
        spectrum = torch.fft.fft(z.conj() * torch.polar(x, self.two(x)))
        pairs = torch.view_as_real(spectrum * z) * self.one(x)[..., None]
        out: Tensor = pairs.sum(-1) * z.conj().imag
        return out


class Frozen(nn.Module):
    """Trainable layers below frozen ones of every kind, norms in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.trunk = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 8, 3, padding=1),
            nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8).eval(), nn.LayerNorm(16, eps=0.01),
            nn.Linear(16, 16), nn.Sigmoid(),
        )  # fmt: skip
        self.trunk.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out: Tensor = (1 - x) * self.trunk(x)
        return out


AWKWARD: dict[str, Callable[[], Case]] = {
    "called several times": lambda: (CalledTwice(), torch.randn(64, 64)),
    "data-dependent": lambda: (Branching(), torch.randn(64, 64)),
    "custom function": lambda: (CustomFunction(), torch.randn(64, 64)),
    "calls in calls": lambda: (Whole(), torch.randn(64, 64)),
    "aliases and in-place": lambda: (Aliasing(), torch.randn(64, 64)),
    "complex numbers": lambda: (Complex(), torch.rand(64, 64)),
    "frozen layers": lambda: (Frozen(), torch.rand(4, 3, 16, 16)),
    "hooks": lambda: (Hooked(), torch.randn(64, 64)),
    "recurrent layers": lambda: (Recurrent(), torch.randn(12, 32, 16)),
}
