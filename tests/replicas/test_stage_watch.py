"""A stage that uses what all replicas share is seen to, whether it writes it or torch has only one of it."""

import torch
from torch import nn
from torch.autograd import forward_ad

from lightning_dpx.replicas.stage_watch import StageWatch


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"steps": 0}


def test_writes_and_forward_mode_need_order_and_nothing_else_does() -> None:
    module = Counts()
    rows = torch.ones(2)
    with StageWatch(module, ()) as plain:
        torch.func.grad(lambda x: x.square().sum())(rows)
    assert plain.compare() == (False, False)
    with StageWatch(module, ()) as writes:
        module.counts["steps"] += 1
    assert writes.compare() == (True, False)
    before = forward_ad.enter_dual_level
    with StageWatch(module, ()) as differentiates:
        with forward_ad.dual_level():
            pass
    assert differentiates.compare() == (True, False)
    assert forward_ad.enter_dual_level is before
