"""What both processes of ``test_processes`` run: ``process_program.py all FOLDER``."""

import os
import sys
from pathlib import Path

import torch
from torch import distributed

from lightning_dpx.reducers import ProcessReducer

Grads = list[torch.Tensor | None]
ROWS = (6, 2)  # samples of the ranks


def rows_of(table: torch.Tensor, rows: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A gradient of ``table`` that is not coalesced, as an embedding leaves it: a row may come twice."""
    generator = torch.Generator().manual_seed(sum(rows) + len(rows))
    values = torch.randn(len(rows), *table.shape[1:], generator=generator).to(dtype)
    return torch.sparse_coo_tensor([rows], values, table.shape, check_invariants=True)


def sparse_cases() -> dict[str, tuple[list[torch.Tensor], list[Grads]]]:
    """Parameters, and the gradients of rank 0 and rank 1, by case."""
    table, other, weight = torch.zeros(9, 3), torch.zeros(5, 2, 2), torch.zeros(4, 4)
    half, many, dense = table.bfloat16(), rows_of(table, [0, 4, 4, 8, 2]), torch.full((4, 4), 2.0)
    both = torch.sparse_coo_tensor([[0, 3, 3], [1, 2, 2]], [1.0, 2.0, 3.0], (4, 4), check_invariants=True)
    return {
        "different-numbers": ([table], [[many], [rows_of(table, [4])]]),
        "missing-on-0": ([table], [[None], [many]]),
        "missing-on-1": ([other], [[rows_of(other, [1, 3])], [None]]),
        "missing-on-both": ([table, weight], [[None, dense], [None, dense]]),
        "empty": ([table], [[rows_of(table, [])], [many]]),
        "nothing-at-all": ([table], [[rows_of(table, [])], [rows_of(table, [])]]),
        "two-sparse-dims": ([weight], [[both], [None]]),
        "bfloat16": ([half], [[rows_of(half, [1, 1, 5], half.dtype)], [rows_of(half, [1, 6, 6, 6], half.dtype)]]),
        "float64": ([table.double()], [[many.double()], [rows_of(table, [3]).double()]]),
        "sparse-and-dense": ([weight], [[both], [dense]]),
        "mixed": (
            [weight, table, weight[0], half, other],
            [[dense, many, None, rows_of(half, [7], half.dtype), None],
             [dense * 3, None, weight[0] + 1, None, rows_of(other, [4, 0, 4])]],
        ),
    }  # fmt: skip


def main() -> None:
    folder, rank = Path(sys.argv[2]), int(os.environ["NODE_RANK"])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    seen = {}
    for case, (parameters, grads) in sparse_cases().items():
        for mode, rows in (("mean", ROWS[rank]), ("sum", -1)):
            seen[f"{case} {mode}"] = ProcessReducer().mean(grads[rank], parameters, rows)
        wire = ProcessReducer(communication_dtype=torch.bfloat16)
        seen[f"{case} on bfloat16"] = wire.mean(grads[rank], parameters, ROWS[rank])
    halves = torch.full((3,), 1 + 2.0**-7, dtype=torch.bfloat16)
    seen["dense bfloat16"] = ProcessReducer().mean([halves], [halves], ROWS[rank])
    seen["noticed"] = []
    for sets in (lambda: rank == 1, lambda: False):
        ProcessReducer(notice=sets, on_notice=seen["noticed"].append).mean([halves], [halves], 1)
    torch.save(seen, folder / f"seen_{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
    print("ended well", flush=True)


if __name__ == "__main__":
    main()
