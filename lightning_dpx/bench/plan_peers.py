"""The peers of ``dpx bench plan``: ways of checkpointing by hand, and what ``torch.compile`` recomputes."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_dpx.bench.staged import Runner, Stage, State, run_plainly
from lightning_dpx.errors import ConfigurationError, UnsupportedError
from lightning_dpx.torch_compat import compile_backends, find_compile_backend, functorch_config, inductor_compiler

COMPILE_BUDGETS = (0.7, 0.5, 0.3)


def _each(stages: Sequence[Stage], state: State, **options: Any) -> State:
    for stage in stages:
        state = checkpoint(stage, *state, use_reentrant=False, **options)
    return state


def _segments(stages: Sequence[Stage], state: State) -> State:
    # So many segments of so many stages keep the fewest values at a time.
    size = max(1, round(math.sqrt(len(stages))))
    for start in range(0, len(stages), size):
        part = stages[start : start + size]
        # The default binds this segment: backward calls the lambda when the loop is long over.
        state = checkpoint(lambda *s, part=part: run_plainly(part, s), *state, use_reentrant=False)
    return state


# Costly operators of each kind of model; attention has another name for each kernel.
_SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _selective(stages: Sequence[Stage], state: State) -> State:
    """As torchtitan does: attention and every second matrix product of a block are kept."""

    def contexts() -> Any:
        # A recomputation counts anew, or it would keep the other half of the products.
        seen = {False: 0, True: 0}

        def policy(ctx: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
            if operator in _SAVED:
                seen[ctx.is_recompute] += 1
                if "attention" in str(operator) or seen[ctx.is_recompute] % 2:
                    return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    return _each(stages, state, context_fn=contexts)


PEERS: dict[str, Runner] = {
    "each block": _each,
    "sqrt(n) segments": _segments,
    "selective operators": _selective,
}


def compiled(model: nn.Module, budget: float, backend: str) -> nn.Module:
    """``model`` as one compiled graph, with the parameters of the original. The first backward ends its compilation.

    Args:
        model: What to compile.
        budget: ``activation_memory_budget``: of what torch would save for backward by itself (1), the share that it
            may save. It limits what is saved, not the peak: what backward computes again has to live, too.
        backend: Name of the backend; it has to partition as inductor does.
    """
    compile_graph = find_compile_backend(backend)

    def within_budget(graph: Any, inputs: Any) -> Any:  # a backend of its own, else compiled code is shared
        with functorch_config().patch(activation_memory_budget=budget):
            return compile_graph(graph, inputs)

    # In one graph or not at all: a break would leave parts to run eagerly without a word.
    return torch.compile(model, backend=within_budget, fullgraph=True)  # type: ignore[return-value]


def require_compiler(backend: str) -> None:
    """Whether models can be compiled here.

    Raises:
        ConfigurationError: there is no such backend.
        UnsupportedError: inductor has no C++ compiler.
    """
    if backend not in (names := compile_backends()):
        raise ConfigurationError(f"torch.compile has no backend {backend!r}; there are {', '.join(names)}.")
    if backend == "inductor":
        try:
            inductor_compiler()
        except RuntimeError as error:
            raise UnsupportedError(
                f"torch.compile needs a C++ compiler: {error}. Install one (for example `apt install g++`), set CXX to "
                "it, or leave out --compile."
            ) from error


def compiled_models(model: nn.Module, budgets: Sequence[float], backend: str) -> dict[str, nn.Module]:
    """By mode: without a budget, which tells what fusion alone costs and saves, then with each of ``budgets``."""
    within = {f"compiled {budget:.2f}": compiled(model, budget, backend) for budget in budgets}
    return {"compiled": compiled(model, 1.0, backend), **within}


def compiled_regions(model: nn.Module, backend: str) -> nn.Module:
    """A copy of ``model`` in which each part is compiled by itself: its children, and the items of its lists."""
    # What a copy of a compiled module runs may still be that of the original, so the copy comes first.
    own = copy.deepcopy(model)
    for name, child in list(own.named_children()):
        if isinstance(child, nn.ModuleList):
            for number, item in enumerate(child):
                child[number] = _region(item, backend)
        else:
            setattr(own, name, _region(child, backend))
    return own


def _region(part: nn.Module, backend: str) -> nn.Module:
    return torch.compile(part, backend=backend, fullgraph=True)  # type: ignore[return-value]
