"""Batch norm over the whole batch: every replica normalizes its slice by the statistics of all slices."""

import copy
import copyreg
from typing import Any

import torch
from torch import nn

from lightning_dpx.replicas.collectives import sum_over_replicas
from lightning_dpx.replicas.context import ReplicaRank, current_rank
from lightning_dpx.torch_compat import AnyBatchNorm, check_input_dim

_synced: dict[type, type] = {}
_plain: dict[type, type] = {}  # the other way round


def batch_norms_by_slice(module: nn.Module) -> list[str]:
    """Names of the batch norms in ``module`` that would normalize every slice of a batch for itself."""
    names = []
    for name, child in module.named_modules():
        if isinstance(child, AnyBatchNorm) and child.training and not isinstance(child, SyncedBatchNorm):
            names.append(name)
    return names


class SyncedBatchNorm(AnyBatchNorm):
    """Mixed into a batch norm class; without other replicas, and in eval mode, that class does its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(n, C, ...) to the same shape, normalized over the slices of all replicas."""
        rank = current_rank()
        # In eval mode the running statistics count; a replica that is alone has nobody to meet.
        if rank is None or rank.is_alone or not (self.training or self.running_mean is None):
            return super().forward(input)
        check_input_dim(self, input)
        return self._normalized(input, rank)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SyncedBatchNorm":
        """A copy is synchronized, too: replicas are copies."""
        copied: SyncedBatchNorm = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Pickles the batch norm that it was: its own class is made here, and unknown elsewhere."""
        # What pickle protocols 0 and 1 call; the later ones insist on the object's own class.
        return copyreg._reconstructor, (_plain[type(self)], object, None), vars(self)  # type: ignore[attr-defined]

    def _normalized(self, input: torch.Tensor, rank: ReplicaRank) -> torch.Tensor:
        # In float32 at least, under autocast, too: sums of half precision over a whole batch stop growing early.
        values = input if input.dtype == torch.float64 else input.float()
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        # It travels with the sums: slices may have different numbers of rows.
        count = values.new_full((1,), input.numel() / input.shape[1])
        totals = sum_over_replicas(rank, torch.cat([values.sum(dims), count]))
        # The mean first, and then the squares of what is centered: a second meeting, but the difference of a mean of
        # squares and the square of a mean loses the digits that two large numbers have in common.
        mean = totals[:-1] / totals[-1]
        total = totals[-1].detach()
        centered = values - mean.view(shape)
        variance = sum_over_replicas(rank, centered.square().sum(dims)) / total
        self._remember(mean.detach(), variance.detach(), total)
        result = centered * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if not (self.training and self.track_running_stats):
            return
        if self.num_batches_tracked is not None:  # state dicts of old versions of torch have none
            self.num_batches_tracked.add_(1)
        momentum = self._momentum_now()
        if self.running_mean is not None:
            self.running_mean.lerp_(mean.to(self.running_mean), momentum)
        if self.running_var is not None:
            # torch normalizes by the biased variance, and remembers the unbiased one.
            unbiased = variance * count / (count - 1).clamp(min=1)
            self.running_var.lerp_(unbiased.to(self.running_var), momentum)

    def _momentum_now(self) -> float:
        """How far the statistics go towards those of this batch, as torch's own ``forward`` has it."""
        if self.momentum is not None:
            return self.momentum
        if self.num_batches_tracked is None:
            return 0.0
        return 1.0 / float(self.num_batches_tracked)


def synchronize_batch_norm(module: nn.Module) -> None:
    """Makes every batch norm inside ``module`` a synchronized one, in place; names and state dicts stay."""
    for child in module.modules():
        if isinstance(child, AnyBatchNorm) and not isinstance(child, SyncedBatchNorm):
            kind: type = type(child)
            if kind not in _synced:
                _synced[kind] = type(f"Synced{kind.__name__}", (SyncedBatchNorm, kind), {})
                _plain[_synced[kind]] = kind
            child.__class__ = _synced[kind]


def restore_batch_norm(module: nn.Module) -> None:
    """Undoes :func:`synchronize_batch_norm`."""
    for child in module.modules():
        if type(child) in _plain:
            child.__class__ = _plain[type(child)]
