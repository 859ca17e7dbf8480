"""Small real models of libraries and of published kinds, with random weights and inputs: nothing is downloaded.

None was written for this package. Each is a module that returns its loss, the inputs of one step, and, where its
library offers one, the library's own way to checkpoint it. The libraries are not needed for anything else: one that is
missing is found out when a model of it is made, as a ModuleNotFoundError.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Library:
    """A package that is imported when something of it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


transformers: _Library = _Library("transformers")
graphs: _Library = _Library("torch_geometric.nn")
_IDS = 100
_LENGTH = 48


@dataclass(frozen=True, slots=True)
class Animal:
    """A model to be planned.

    Attributes:
        module: Its forward returns a loss.
        inputs: Of a step; the first dim of each is the rows.
        checkpoint: Switches the library's own checkpointing on, where there is one.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    checkpoint: Callable[[], None] | None = None


class _Loss(nn.Module):
    """The mean sine of the first output of a library's model; that of its squares is constant behind a layer norm."""

    def __init__(self, inner: nn.Module, name: str, named: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.inner = inner
        self._name = name
        self._named = named or {}

    def forward(self, *inputs: Tensor) -> Tensor:
        # Libraries name their inputs, and a plan's step gives them by position.
        names = self._name.split()
        outputs = self.inner(**dict(zip(names, inputs, strict=True)), **self._named)
        first = outputs[0]
        loss: Tensor = first.float().sin().mean()
        return loss


def _text(config: Any, model: Any, rows: int = 4, **named: Any) -> Animal:
    module = _Loss(model(config), "input_ids", named)
    ids = torch.randint(_IDS, (rows, _LENGTH))
    return Animal(module, (ids,), _own_checkpointing(module.inner))


def _images(config: Any, model: Any, rows: int = 4, size: int = 64, **named: Any) -> Animal:
    module = _Loss(model(config), "pixel_values", named)
    return Animal(module, (torch.randn(rows, 3, size, size),), _own_checkpointing(module.inner))


def _own_checkpointing(inner: Any) -> Callable[[], None] | None:
    # transformers says so by this attribute of the class; modules of others have none.
    if not getattr(inner, "supports_gradient_checkpointing", False):
        return None

    def switch_on() -> None:
        # The variant without reentry, as PyTorch recommends it, and as the peers of other
        # benches have it.
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    return switch_on


_SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": _IDS}


def bert() -> Animal:
    """Attention with dropout, behind absolute positions."""
    config = transformers.BertConfig(**_SMALL, intermediate_size=128, max_position_embeddings=64)
    return _text(config, transformers.BertModel)


def llama() -> Animal:
    """RMS norm, rotary positions, gated layers, grouped heads."""
    config = transformers.LlamaConfig(**_SMALL, intermediate_size=128, num_key_value_heads=2)
    # A training step needs no keys and values for later tokens.
    return _text(config, transformers.LlamaModel, use_cache=False)


def mixtral() -> Animal:
    """A mixture of experts: what runs depends on the data."""
    config = transformers.MixtralConfig(
        **_SMALL, intermediate_size=96, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    return _text(config, transformers.MixtralModel, use_cache=False)


def qwen_moe() -> Animal:
    """Many small experts."""
    config = transformers.Qwen3MoeConfig(
        **_SMALL,
        intermediate_size=96,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        head_dim=16,
    )
    return _text(config, transformers.Qwen3MoeModel, use_cache=False)


def gpt2() -> Animal:
    """Convolutions of width 1 as linear layers, learned positions."""
    config = transformers.GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=_IDS, n_positions=64)
    return _text(config, transformers.GPT2Model, use_cache=False)


def t5() -> Animal:
    """Encoder and decoder, relative positions shared by all layers."""
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, vocab_size=_IDS, decoder_start_token_id=0
    )
    module = _Loss(transformers.T5Model(config), "input_ids decoder_input_ids", {"use_cache": False})
    ids = (torch.randint(_IDS, (4, _LENGTH)), torch.randint(_IDS, (4, _LENGTH // 2)))
    return Animal(module, ids, _own_checkpointing(module.inner))


def bart() -> Animal:
    """Encoder and decoder, with cross attention."""
    config = transformers.BartConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=_IDS, max_position_embeddings=64,
    )  # fmt: skip
    module = _Loss(transformers.BartModel(config), "input_ids decoder_input_ids", {"use_cache": False})
    # The first three ids are BART's own: begin, padding and end of a text.
    ids = (torch.randint(3, _IDS, (4, _LENGTH)), torch.randint(3, _IDS, (4, _LENGTH // 2)))
    return Animal(module, ids, _own_checkpointing(module.inner))


def deberta() -> Animal:
    """Attention that is three sums of products, gathered by relative position."""
    config = transformers.DebertaV2Config(
        **_SMALL, intermediate_size=128, max_position_embeddings=64, relative_attention=True,
        pos_att_type=["c2p", "p2c"],
    )  # fmt: skip
    return _text(config, transformers.DebertaV2Model)


def mamba() -> Animal:
    """A selective scan: many small tensors in a loop."""
    # Without mambapy's parallel scan, as the loop is what this model is here for.
    config = transformers.MambaConfig(
        hidden_size=64, num_hidden_layers=2, vocab_size=_IDS, state_size=8, use_mambapy=False
    )
    return _text(config, transformers.MambaModel, rows=2, use_cache=False)


def rwkv() -> Animal:
    """A recurrence over tokens whose state is small."""
    config = transformers.RwkvConfig(hidden_size=64, num_hidden_layers=2, vocab_size=_IDS, context_length=64)
    return _text(config, transformers.RwkvModel, rows=2, use_cache=False)


def fnet() -> Animal:
    """Fourier transforms in the place of attention."""
    config = transformers.FNetConfig(
        hidden_size=64, num_hidden_layers=4, intermediate_size=128, vocab_size=_IDS, max_position_embeddings=64
    )
    return _text(config, transformers.FNetModel)


def whisper() -> Animal:
    """Convolutions over time before an encoder and a decoder."""
    config = transformers.WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=_IDS, num_mel_bins=16, max_source_positions=50,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    module = _Loss(transformers.WhisperModel(config), "input_features decoder_input_ids", {"use_cache": False})
    # The second convolution has a stride of 2, so 100 frames become the 50 positions.
    inputs = (torch.randn(4, 16, 100), torch.randint(_IDS, (4, 16)))
    return Animal(module, inputs, _own_checkpointing(module.inner))


def vit() -> Animal:
    """Attention over patches."""
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, image_size=64, patch_size=8
    )
    return _images(config, transformers.ViTModel)


def swin() -> Animal:
    """Attention in shifted windows, over two resolutions."""
    config = transformers.SwinConfig(
        image_size=64, patch_size=4, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4, drop_path_rate=0.0
    )
    return _images(config, transformers.SwinModel)


def segformer() -> Animal:
    """Attention over a shorter sequence, depthwise convolutions."""
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64], decoder_hidden_size=32, drop_path_rate=0.0
    )
    return _images(config, transformers.SegformerModel)


def poolformer() -> Animal:
    """Pooling in the place of attention."""
    config = transformers.PoolFormerConfig(depths=[1, 1, 2, 1], hidden_sizes=[16, 24, 32, 48], drop_path_rate=0.0)
    return _images(config, transformers.PoolFormerModel)


def convnext() -> Animal:
    """Depthwise 7x7 convolutions, layer norm over channels."""
    config = transformers.ConvNextConfig(depths=[1, 1, 2, 1], hidden_sizes=[16, 32, 48, 64], drop_path_rate=0.0)
    return _images(config, transformers.ConvNextModel)


def resnet() -> Animal:
    """Bottlenecks with batch norm and in-place activations."""
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[32, 48, 64], depths=[2, 2, 2])
    return _images(config, transformers.ResNetModel)


def regnet() -> Animal:
    """Grouped convolutions with squeeze and excitation."""
    config = transformers.RegNetConfig(embedding_size=16, hidden_sizes=[32, 48], depths=[2, 2], groups_width=16)
    return _images(config, transformers.RegNetModel)


def efficientnet() -> Animal:
    """Inverted bottlenecks with depthwise convolutions."""
    config = transformers.EfficientNetConfig(
        image_size=64, width_coefficient=0.3, depth_coefficient=0.3, hidden_dim=384, dropout_rate=0.0,
        drop_connect_rate=0.0,
    )  # fmt: skip
    return _images(config, transformers.EfficientNetModel)


def levit() -> Animal:
    """Convolutions and attention with batch norm everywhere."""
    config = transformers.LevitConfig(
        image_size=64, hidden_sizes=[32, 48, 64], num_attention_heads=[2, 3, 4], depths=[1, 1, 1], key_dim=[8, 8, 8]
    )
    return _images(config, transformers.LevitModel)


def patchtst() -> Animal:
    """Patches of time series, channel by channel."""
    config = transformers.PatchTSTConfig(
        num_input_channels=3, context_length=64, patch_length=8, patch_stride=8, d_model=32, num_hidden_layers=3,
        num_attention_heads=4, ffn_dim=64,
    )  # fmt: skip
    module = _Loss(transformers.PatchTSTModel(config), "past_values")
    return Animal(module, (torch.randn(8, 64, 3),), _own_checkpointing(module.inner))


class _Graph(nn.Module):
    """Graph attention over a ring with chords."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (graphs.GCNConv(16, 32), graphs.GATConv(32, 8, heads=4), graphs.SAGEConv(32, 32), graphs.GCNConv(32, 8))
        self.layers = nn.ModuleList(kinds)
        nodes = torch.arange(200)
        ahead = torch.stack([nodes, (nodes + 1) % 200])
        across = torch.stack([nodes, (nodes * 7 + 3) % 200])
        # No input, as edges are not rows of a batch.
        self.register_buffer("edges", torch.cat([ahead, across], 1))

    def forward(self, features: Tensor) -> Tensor:
        for layer in self.layers:
            features = F.elu(layer(features, self.edges))
        return features.square().mean()


def graph() -> Animal:
    """Scatter and gather over edges; the rows are nodes."""
    return Animal(_Graph(), (torch.randn(200, 16),))


class _UNet(nn.Module):
    """Skips across the whole network, group norm, a step embedding: the shape of diffusion models."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = (3, width, 2 * width, 4 * width)
        self.down = nn.ModuleList(_block(sizes[i], sizes[i + 1]) for i in range(3))
        self.up = nn.ModuleList(_block(sizes[i + 1] + (sizes[i + 2] if i < 2 else 0), sizes[i + 1]) for i in range(3))
        self.steps = nn.ModuleList(nn.Linear(8, size) for size in sizes[1:])
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        x = images + noise[:, :1, None, None]
        skips = []
        for block, step in zip(self.down, self.steps, strict=True):
            x = block(x) + step(noise)[:, :, None, None]
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        lowest, *blocks = reversed(self.up)
        above = lowest(skips.pop())
        for block in blocks:
            lifted = F.interpolate(above, scale_factor=2)
            above = block(torch.cat([skips.pop(), lifted], 1))
        loss: Tensor = (self.out(above) - images).square().mean()
        return loss


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.SiLU(),
    )  # fmt: skip


def unet() -> Animal:
    """As in diffusion: images and a noise embedding."""
    return Animal(_UNet(), (torch.randn(4, 3, 32, 32), torch.randn(4, 8)))


class _VQVAE(nn.Module):
    """An argmin over a code book, with the straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 4, 2, 1))
        self.decode = nn.Sequential(nn.ConvTranspose2d(32, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1))
        self.codes = nn.Embedding(128, 32)

    def forward(self, images: Tensor) -> Tensor:
        z = self.encode(images)
        flat = z.permute(0, 2, 3, 1).reshape(-1, 32)
        codes = self.codes(torch.cdist(flat, self.codes.weight).argmin(1))
        codes = codes.view(len(z), *z.shape[2:], 32).permute(0, 3, 1, 2)
        # The values of the codes with the gradient of z: an argmin has none.
        passed = z + (codes - z).detach()
        loss: Tensor = (self.decode(passed) - images).square().mean() + (codes - z.detach()).square().mean()
        return loss


def vqvae() -> Animal:
    """Parts of the graph die in the forward."""
    return Animal(_VQVAE(), (torch.randn(8, 3, 32, 32),))


class _Flow(nn.Module):
    """Affine couplings, and the log of their determinants."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for number, net in enumerate(self.nets):
            # The halves change places, or one of them would pass through all layers as it was.
            a, b = x.chunk(2, 1) if number % 2 else x.flip(1).chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            scale = scale.tanh()
            x = torch.cat([a, b * scale.exp() + shift], 1)
            total = total + scale.sum(1)
        return (0.5 * x.square().sum(1) - total).mean()


def flow() -> Animal:
    """A normalizing flow."""
    return Animal(_Flow(), (torch.randn(256, 32),))


class _Potential(nn.Module):
    """An interatomic potential: energies from distances, and forces as their gradient (a double backward)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
        self.register_buffer("centers", torch.linspace(0.5, 4.0, 8))

    def forward(self, positions: Tensor) -> Tensor:
        # A leaf, as forces are the gradient for it.
        positions = positions.detach().requires_grad_()
        apart = positions[:, :, None] - positions[:, None]
        # An atom is at distance 0 from itself, where the slope of a norm is not defined.
        far = torch.eye(positions.shape[1])[None, :, :, None]
        distances = (apart + far).norm(dim=-1, keepdim=True)
        energy = self.net((-(distances - self.centers).square()).exp()).sum((1, 2, 3))
        # With a graph, because the loss depends on the forces, and so on this backward.
        (forces,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        loss: Tensor = energy.square().mean() + forces.square().mean()
        return loss


def potential() -> Animal:
    """Runs a backward of its own inside the forward."""
    return Animal(_Potential(), (torch.randn(4, 12, 3),))


class _Critic(nn.Module):
    """The loss of a WGAN's critic with its gradient penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
            nn.Linear(32 * 64, 1),
        )  # fmt: skip

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        between = (0.3 * real + 0.7 * fake).requires_grad_()
        # Likewise the penalty on the slope.
        (slope,) = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        loss: Tensor = self.net(fake).mean() - self.net(real).mean() + 10 * penalty
        return loss


def critic() -> Animal:
    """A gradient penalty."""
    return Animal(_Critic(), (torch.randn(8, 3, 32, 32), torch.randn(8, 3, 32, 32)))


ZOO: dict[str, Callable[[], Animal]] = {
    make.__name__: make
    for make in (
        bert, llama, mixtral, qwen_moe, gpt2, t5, bart, deberta, mamba, rwkv, fnet, whisper, vit, swin, segformer,
        poolformer, convnext, resnet, regnet, efficientnet, levit, patchtst, graph, unet, vqvae, flow, potential,
        critic,
    )
}  # fmt: skip
