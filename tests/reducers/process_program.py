"""What both processes of ``test_processes`` run: ``process_program.py all FOLDER``."""

import os
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from lightning_dpx.reducers import ProcessReducer, make_communication_hook

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


def hook_case() -> tuple[list[torch.Tensor], list[list[Grads]]]:
    """Parameters, and of every step the gradients of rank 0 and rank 1; one has none in the second, one never has."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 24), (24,), (8, 4), (5,)]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    steps = []
    for step in range(4):
        both: list[Grads] = []
        for _ in range(2):
            # An outer product is of rank 1, which PowerSGD sends as it is.
            rows = torch.randn(16, 1, generator=generator)
            columns = torch.ones(1, 24)
            plain = [torch.randn(shape, generator=generator) for shape in shapes[1:3]]
            both.append([rows @ columns, plain[0], None if step == 1 else plain[1], None, None])
        steps.append(both)
    return [*parameters, frozen], steps


def hooked(rank: int) -> dict[str, list[Grads]]:
    """What every hook makes of the steps of :func:`hook_case`."""
    parameters, steps = hook_case()
    state = PowerSGDState(process_group=None, start_powerSGD_iter=2, min_compression_rate=1)
    hooks = {"bf16": "bf16", "fp16": "fp16", "powersgd": state, "plain": (None, allreduce_hook)}
    means: dict[str, list[Grads]] = {}
    for name, given in hooks.items():
        reducer = ProcessReducer(2, hook=make_communication_hook(given))
        means[name] = [reducer.mean(step[rank], parameters, ROWS[rank]) for step in steps]
    means["sum"] = [ProcessReducer(2, hook=make_communication_hook("bf16")).mean(steps[0][rank], parameters, -1)]
    return means


WEIGHTLESS = {"rank 1": (6, 0), "no rank": (0, 0)}  # what their losses count, where some count no tokens


def tokenless(rank: int, weights: tuple[int, int]) -> tuple[list[torch.Tensor], Grads]:
    """Parameters and this rank's gradients: of a mean over its tokens, which is 0 / 0 where it has none."""
    generator = torch.Generator().manual_seed(rank)
    weight = torch.randn(4, 3, generator=generator, requires_grad=True)
    table = torch.nn.Embedding(5, 3, sparse=True)
    mask = torch.zeros(6)
    mask[: weights[rank]] = 1
    rows = torch.tensor([0, 1, 1, 2, 4, 4])
    outputs = table(rows) @ weight.T
    loss = (outputs.sum(1) * mask).sum() / mask.sum()
    loss.backward()
    return [weight, table.weight], [weight.grad, table.weight.grad]


def without_tokens(rank: int) -> dict[str, tuple[Grads, Grads]]:
    """This rank's gradients and the means, by who has no tokens and what sends them."""
    seen = {}
    for who, weights in WEIGHTLESS.items():
        parameters, grads = tokenless(rank, weights)
        seen[who] = grads, ProcessReducer().mean(grads, parameters, weights[rank])
        hook = make_communication_hook((None, allreduce_hook))
        seen[f"{who}, hook"] = grads, ProcessReducer(hook=hook).mean(grads, parameters, weights[rank])
    # torch's own loss over ignored targets is NaN as well, but its gradients are zeros.
    logits = torch.randn(4, 3, requires_grad=True)
    torch.nn.functional.cross_entropy(logits, torch.full((4,), -100)).backward()
    seen["ignored"] = [logits.grad], ProcessReducer().mean([logits.grad], [logits], 0)
    # Rank 0 has tokens, and rank 1's NaN is one of a step that diverges.
    broken = torch.full((3,), float("nan") if rank == 1 else 1.0)
    seen["diverged"] = [broken], ProcessReducer().mean([broken], [broken], ROWS[rank])
    return seen


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
    seen["hooks"] = hooked(rank)
    seen["without tokens"] = without_tokens(rank)
    seen["noticed"] = []
    for sets in (lambda: rank == 1, lambda: False):
        ProcessReducer(notice=sets, on_notice=seen["noticed"].append).mean([halves], [halves], 1)
    torch.save(seen, folder / f"seen_{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
    print("ended well", flush=True)


if __name__ == "__main__":
    main()
