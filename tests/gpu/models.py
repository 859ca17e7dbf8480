"""Models to plan for: of the bench, and of a library, with random weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpx.bench.models import TransformerBlock
from lightning_dpx.bench.staged import STAGED_MODELS, Chain
from lightning_dpx.memory import Profile, profile_module
from lightning_dpx.memory.module_step import sum_of
from tests.gpu.place import Place


@dataclass(frozen=True, slots=True)
class Subject:
    """A module and its input on a device."""

    module: nn.Module
    inputs: tuple[Tensor, ...]

    def step(self) -> None:
        """Forward and backward; adds to gradients that are there."""
        torch.manual_seed(0)
        sum_of(self.module(*self.inputs)).backward()

    def activations(self, place: Place) -> int:
        """Bytes that a step takes at the most beside gradients, which are there before."""
        self.step()
        return place.peak_of(self.step)

    def profile(self, device: str | None = None) -> Profile:
        """Of such a step; on fakes of a device."""
        return profile_module(self.module, *self.inputs, device=device, accumulates=True)

    def gradients(self) -> list[Tensor]:
        """Of one step, with the algorithms of cuDNN whose bits are the same every time."""
        self.module.zero_grad()
        torch.manual_seed(0)
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            self.module(*self.inputs).float().pow(2).mean().backward()  # the sum behind a layer norm has none
        return [one.grad.clone() for one in self.module.parameters() if one.grad is not None]


def subjects(place: Place) -> dict[str, Callable[[], Subject]]:
    """How to make each; only the small ones where there is no real device."""
    names = list(STAGED_MODELS) if place.is_real else ["unet", "lstm"]
    made: dict[str, Callable[[], Subject]] = {}
    for name in names:
        made[name] = _staged(place, name)
    if place.is_real:
        for name in ("llama", "bert"):
            made[name] = _from_library(place, name)
        made["gpt bf16"] = lambda: large_gpt(place, width=1024, depth=12, rows=8)
    return made


def _staged(place: Place, name: str) -> Callable[[], Subject]:
    model = STAGED_MODELS[name]
    rows = 4 * model.rows if place.is_real else max(1, model.rows // 8)

    def make() -> Subject:
        torch.manual_seed(0)
        return Subject(model.build().to(place.device), (model.make_input(rows).to(place.device),))

    return make


def _from_library(place: Place, name: str) -> Callable[[], Subject]:
    def make() -> Subject:
        import transformers

        torch.manual_seed(0)
        sizes = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 1000}
        ids = torch.randint(1000, (8, 256), device=place.device)
        if name == "llama":
            module: Any = transformers.LlamaModel(transformers.LlamaConfig(intermediate_size=1024, **sizes))
        else:
            module = transformers.BertModel(transformers.BertConfig(intermediate_size=2048, **sizes))
        return Subject(OneOutput(module, "last_hidden_state").to(place.device), (ids,))

    return make


class OneOutput(nn.Module):
    """One tensor of a library's output."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.inner = inner
        self.name = name

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = getattr(self.inner(given), self.name)
        return found


def large_gpt(place: Place, *, width: int, depth: int, rows: int, context: int = 1024) -> Subject:
    """A decoder in bfloat16: token ids (B, T) to logits (B, T, V)."""
    torch.manual_seed(0)
    blocks = [TransformerBlock(width, max(1, width // 128)) for _ in range(depth)]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1024))
    module = Chain(nn.Embedding(1024, width), *blocks, head).to(place.device, torch.bfloat16)
    return Subject(module, (torch.randint(1024, (rows, context), device=place.device),))
