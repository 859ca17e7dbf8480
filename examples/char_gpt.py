"""A character-level GPT that learns the sources of the Python standard library, on as many replicas as you like.

It prints the validation loss before and after, in nats per character, and a few lines that the model wrote.
"""

import argparse
import sysconfig
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lightning_dpx  # noqa: F401  registers strategy="dpx"

CONTEXT = 64


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a layer norm: (B, T, C) to (B, T, C)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.num_heads = num_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CharGPT(LightningModule):
    """Character ids (B, T) to logits (B, T, V) of the next one; V characters."""

    def __init__(self, vocabulary: str, width: int = 128, depth: int = 3, num_heads: int = 4) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.characters, self.positions = nn.Embedding(len(vocabulary), width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(vocabulary)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.characters(ids) + self.positions.weight[: ids.shape[1]]))

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of every next character of (B, T + 1) ids."""
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(ids)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, ids: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(ids), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    @torch.no_grad()
    def write(self, beginning: str, length: int) -> str:
        """``beginning``, continued by sampling ``length`` characters."""
        ids = torch.tensor([[self.vocabulary.index(character) for character in beginning]], device=self.device)
        for _ in range(length):
            logits = self(ids[:, -CONTEXT:])[:, -1]
            ids = torch.cat([ids, torch.multinomial((logits / 0.7).softmax(-1), 1)], 1)
        return "".join(self.vocabulary[index] for index in ids[0])


class Text(Dataset[torch.Tensor]):
    """Consecutive windows of ``CONTEXT`` + 1 character ids."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.windows = ids.unfold(0, CONTEXT + 1, CONTEXT)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.windows[index]


def standard_library(limit: int = 2_000_000) -> str:
    """The sources of the standard library's top-level modules, one after the other; ASCII only."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in sorted(folder.glob("*.py")))
    return "".join(texts).encode("ascii", "ignore").decode()[:limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--strategy", default="dpx", help="dpx, auto or ddp")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")

    seed_everything(0, verbose=False)
    text = standard_library()
    vocabulary = "".join(sorted(set(text)))
    table = {character: index for index, character in enumerate(vocabulary)}
    train, held_out = torch.tensor([table[character] for character in text]).tensor_split([int(0.95 * len(text))])
    model = CharGPT(vocabulary)
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=args.strategy,
        max_steps=args.steps,
        limit_val_batches=20,
        enable_progress_bar=not args.quiet,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    held_out_loader = DataLoader(Text(held_out), args.batch_size)
    before = trainer.validate(model, held_out_loader, verbose=False)[0]["val_loss"]
    trainer.fit(model, DataLoader(Text(train), args.batch_size, shuffle=True), held_out_loader)
    after = trainer.validate(model, held_out_loader, verbose=False)[0]["val_loss"]
    if trainer.is_global_zero:
        print(f"validation loss {before:.2f} -> {after:.2f} nats per character in {args.steps} steps")
        print(model.eval().write("def ", 200))


if __name__ == "__main__":
    main()
