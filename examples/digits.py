"""The main job: a convolutional classifier on scikit-learn's handwritten digits, on as many replicas as you like."""

import argparse
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx  # noqa: F401  registers strategy="dpx"


class DigitClassifier(LightningModule):
    """Images (B, 1, 8, 8) to logits (B, 10); B images."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 16, 10),
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class DigitData(LightningDataModule):
    """The digits for ``dpx fit --config examples/digits.yaml``."""

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return loaders(self.batch_size)[0]

    def test_dataloader(self) -> DataLoader[Any]:
        return loaders(self.batch_size)[1]


def loaders(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Four fifths to train on, one fifth to test on, the same cut every time."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, test = torch.utils.data.random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def train(devices: int, strategy: str, args: argparse.Namespace) -> tuple[DigitClassifier, float]:
    """The trained model and its test accuracy."""
    seed_everything(0, verbose=False)
    model, (train_loader, test_loader) = DigitClassifier(), loaders(args.batch_size)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=devices,
        strategy=strategy,
        max_epochs=args.epochs,
        enable_progress_bar=not args.quiet,
        **quiet,
    )
    trainer.fit(model, train_loader)
    return model, trainer.test(model, test_loader, verbose=False)[0]["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--strategy", choices=["dpx", "auto", "ddp"], default="dpx")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")

    start = time.perf_counter()
    model, accuracy = train(args.devices, args.strategy, args)
    say = rank_zero_only(print)  # DDP runs this file once per process
    say(
        f"test accuracy {accuracy:.2%} in {time.perf_counter() - start:.1f} s ({args.strategy}, {args.devices} devices)"
    )
    if args.strategy == "dpx":
        reference = argparse.Namespace(**{**vars(args), "accelerator": "cpu"})
        one, _ = train(1, "auto", reference)
        pairs = zip(model.parameters(), one.parameters(), strict=True)
        difference = max((ours.cpu() - theirs.cpu()).abs().max().item() for ours, theirs in pairs)
        say(f"largest difference of a weight to one CPU: {difference:.1e}")
        if args.accelerator != "cpu" and args.devices > 1:
            say("(on several devices batch norm sees one slice at a time, as with DDP)")


if __name__ == "__main__":
    main()
