"""Between processes: sums of sparse gradients.

NCCL cannot reduce them, and gloo alone would be a second way for the same thing: so every process gets the rows of all
and adds them, in order of rank, which gives the same bits everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed

from lightning_dpx.errors import UnsupportedError

_INDEX = torch.int64


@dataclass(frozen=True)
class Rows:
    """What a process sends of one gradient: ``values`` (nnz, ...) at ``indices`` (sparse dims, nnz)."""

    indices: torch.Tensor
    values: torch.Tensor


def check_layout(index: int, gradient: torch.Tensor | None) -> None:
    """Refuses gradients that are neither dense nor COO.

    Raises:
        UnsupportedError: another layout.
    """
    if gradient is not None and gradient.layout not in (torch.strided, torch.sparse_coo):
        raise UnsupportedError(
            f"Gradient {index} has layout {gradient.layout}, which several processes cannot sum; return a dense or a "
            "COO gradient (to_dense(), to_sparse_coo())."
        )


def sum_over_processes(
    mine: Sequence[Rows | None], like: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], wire: torch.device
) -> list[torch.Tensor]:
    """The sums over all processes of N sparse gradients, coalesced, in float32 or wider, where they are sent from.

    Args:
        mine: What this process adds, in the dtypes that they travel in; ``None`` adds nothing.
        like: Tensors of the gradients' shapes.
        dtypes: What they travel in.
        wire: Where they are sent from.
    """
    shapes = _shapes_of_all(mine, like)
    sizes = [_num_bytes(of_process, dtypes) for of_process in shapes]
    received = _gather(_as_bytes(mine, wire), sizes)
    by_process = []
    for message, of_process in zip(received, shapes, strict=True):
        by_process.append(_from_bytes(message, of_process, dtypes))
    sums = []
    for number, tensor in enumerate(like):
        # In order of rank on every process: the same additions, and so the same bits.
        column = [gradients[number] for gradients in by_process]
        sums.append(_add(column, tensor))
    return sums


def _shapes_of_all(mine: Sequence[Rows | None], like: Sequence[torch.Tensor]) -> list[list[tuple[int, ...]]]:
    """Sparse dims, number of entries and sizes of an entry, by process and gradient."""
    outline = torch.tensor([(0, 0) if rows is None else tuple(rows.indices.shape) for rows in mine])
    outlines = [torch.empty_like(outline) for _ in range(distributed.get_world_size())]
    # On the host, although it costs a message more: the sizes decide what is allocated, and to read them from a device
    # would wait for all that is queued there.
    distributed.all_gather(outlines, outline)
    # A process without a gradient says 0, so the largest is what all others say.
    sparse_dims = torch.stack(outlines).amax(0)[:, 0].tolist()
    shapes = []
    for each in outlines:
        of_process = []
        for dims, nnz, tensor in zip(sparse_dims, each[:, 1].tolist(), like, strict=True):
            of_process.append((dims, nnz, *tensor.shape[dims:]))
        shapes.append(of_process)
    return shapes


def _as_bytes(mine: Sequence[Rows | None], device: torch.device) -> torch.Tensor:
    """All indices and values one after the other: one message, whatever the number of gradients and their dtypes."""
    parts = [torch.empty(0, dtype=torch.uint8, device=device)]  # a process without any gradient sends nothing
    for rows in mine:
        if rows is not None:
            for part in (rows.indices, rows.values):
                parts.append(part.to(device).reshape(-1).view(torch.uint8))
    return torch.cat(parts)


def _num_bytes(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> int:
    total = 0
    for (dims, nnz, *rest), dtype in zip(shapes, dtypes, strict=True):
        total += nnz * (dims * _INDEX.itemsize + torch.Size(rest).numel() * dtype.itemsize)
    return total


def _gather(mine: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The bytes of every process; on the way all are as long as the longest, which is what collectives ask for."""
    longest = max(sizes)
    if longest == 0:
        # No process has an entry, and all know it from the sizes: none of them sends.
        return [mine for _ in sizes]
    padded = torch.cat([mine, mine.new_zeros(longest - mine.numel())])
    everyone = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(everyone, padded)
    return [each[:size] for each, size in zip(everyone, sizes, strict=True)]


def _from_bytes(received: torch.Tensor, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> list[Rows]:
    result = []
    start = 0
    for (dims, nnz, *rest), dtype in zip(shapes, dtypes, strict=True):
        middle = start + dims * nnz * _INDEX.itemsize
        end = middle + nnz * torch.Size(rest).numel() * dtype.itemsize
        indices = received[start:middle].clone().view(_INDEX)  # cloned, as a view must start at a multiple of 8
        values = received[middle:end].clone().view(dtype)
        result.append(Rows(indices.view(dims, nnz), values.view(nnz, *rest)))
        start = end
    return result


def _add(column: Sequence[Rows], like: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    # Rows that several processes have stand there several times, and coalesce() adds them.
    indices = torch.cat([rows.indices for rows in column], dim=1)
    values = torch.cat([rows.values.to(dtype) for rows in column])
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False).coalesce()
