"""The second pass over slices sees what the first one saw, and leaves what it left."""

import torch
from torch import nn

from lightning_dpx.replicas import ReplicaSet, TwoPasses


class Noisy(nn.Module):
    """Adds noise of the generator and of a buffer that every forward doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.ones(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        outputs = rows * self.scale + self.shift + torch.randn(len(rows))
        self.shift *= 2
        return outputs


def test_the_second_pass_repeats_the_first() -> None:
    module = Noisy()
    replicas = ReplicaSet(module, [torch.device("cpu")], micro_batches=3)
    slices = replicas.slices(torch.randn(7))
    replicas.state.synchronize()
    passes = TwoPasses(replicas)
    first = passes.first(slices, lambda one: one.replica.module(one.batch))
    replicas.state.buffers.collect([one.replica for one in slices])
    state = torch.get_rng_state()
    again = []
    passes.second(slices, lambda one: again.append(one.replica.module(one.batch)))
    assert torch.equal(torch.cat(first), torch.cat(again))
    assert [output.requires_grad for output in (*first, *again)] == [False] * 3 + [True] * 3
    assert torch.equal(torch.get_rng_state(), state)
    assert float(module.shift) == 2
    replicas.close()
