"""One of two processes that train a small llama, sharded or copied; prints the most that it has allocated, as JSON."""

import gc
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.bench.allocations import peak_of_everything

WORDS = 500  # of which two ranks have 250 each, and eight need to be padded
WIDTH = 96
LENGTH = 32
ROWS = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sharded(model: Llama, mesh: Any, **options: Any) -> Llama:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class Whole(LightningModule):
    """Units are up to the command line."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Llama()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = loss_of(self.model, batch[0])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Sharded(Whole):
    def configure_model(self) -> None:
        sharded(self.model, self.device_mesh["data_parallel"])


class InHalves(Whole):
    def configure_model(self) -> None:
        sharded(self.model, self.device_mesh["data_parallel"], mp_policy=MixedPrecisionPolicy(torch.bfloat16))


class Words(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randint(WORDS, (4 * ROWS, LENGTH + 1))), ROWS)


def life(wrap: Callable[[Llama], nn.Module], plan: Any, *, keeps: bool) -> None:
    """A run of two steps, from its first allocation on; gradients become zeros, or go, between steps."""
    module = Whole()
    module.model = wrap(module.model)
    optimizer = module.configure_optimizers()
    words = torch.randint(WORDS, (ROWS, LENGTH + 1))
    following = nullcontext if plan is None else dpx.apply_plan(module, plan).active
    for _ in range(2):
        with following():
            loss = loss_of(module.model, words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keeps)
    if plan is not None:
        dpx.remove_plan(module)
    del module, optimizer, following
    gc.collect()


def least_of_several(run: Callable[[], None]) -> int:
    run()  # what a process makes once
    return min(peak_of_everything(run) for _ in range(3))


def main(rank: int, store: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    plan = dpx.MemoryPlan.load(f"{folder}/plan.yaml")
    kinds: dict[str, Callable[[Llama], nn.Module]] = {
        "fsdp2": lambda model: sharded(model, mesh),
        "ddp": DistributedDataParallel,
        "ddp_views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
        "halves": lambda model: sharded(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
    }
    found = {}
    for name, wrap in kinds.items():
        found[name] = least_of_several(partial(life, wrap, None, keeps=False))
    found["kept"] = least_of_several(partial(life, kinds["fsdp2"], None, keeps=True))
    found["planned"] = least_of_several(partial(life, kinds["fsdp2"], plan, keeps=False))
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
