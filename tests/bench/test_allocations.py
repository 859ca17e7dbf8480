import pytest
import torch
from torch import nn

from lightning_dpx.bench.allocations import peak_of_everything, peak_of_passing
from lightning_dpx.bench.plan_peers import PEERS
from lightning_dpx.bench.staged import STAGED_MODELS, Staged, run_plainly
from lightning_dpx.memory import MemoryTrace


def traced(model: Staged, rows: torch.Tensor) -> int:
    model.zero_grad(set_to_none=True)
    with MemoryTrace(torch.device("cpu")) as trace:
        loss = model(rows).float().pow(2).mean()
        loss.backward()
    del loss
    return trace.peak_of_passing()


def recorded(model: Staged, rows: torch.Tensor) -> int:
    model.zero_grad(set_to_none=True)
    return peak_of_passing(lambda: model(rows).float().pow(2).mean().backward())


@pytest.mark.parametrize("name", ["cnn", "gpt", "lstm", "unet", "vit"])
def test_it_agrees_to_the_byte_with_the_trace_of_an_eager_step(name: str) -> None:
    model, rows = STAGED_MODELS[name].build(), STAGED_MODELS[name].make_input(2)
    recorded(model, rows)
    assert recorded(model, rows) == traced(model, rows)


def test_checkpointing_also_keeps_random_states_and_the_trace_counts_them_though_no_operator_makes_them() -> None:
    model, rows = STAGED_MODELS["unet"].build(), STAGED_MODELS["unet"].make_input(8)
    model.runner = PEERS["each block"]
    recorded(model, rows)
    assert recorded(model, rows) == traced(model, rows)
    model.runner = run_plainly


def test_what_lasts_and_what_was_there_does_not_count() -> None:
    kept: list[torch.Tensor] = []
    assert peak_of_passing(lambda: kept.append(torch.ones(1000))) == 0

    def step() -> None:
        kept[0] = torch.ones(500)
        passing = torch.ones(100)
        del passing

    assert peak_of_passing(step) == 400


def test_everything_counts_that_was_allocated_whether_it_is_gone_or_not() -> None:
    kept = []

    def step() -> None:
        kept.append(torch.ones(500))
        passing = torch.ones(100)
        del passing
        kept.append(torch.ones(50))

    assert peak_of_everything(step) == 2400


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor's own
def test_a_compiled_step_is_measured_by_what_it_allocates() -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(4)))
    rows = torch.ones(128, 64)
    module = torch.compile(layers, backend="aot_eager_decomp_partition", fullgraph=True)

    def step() -> None:
        module(rows).sum().backward()

    torch.compiler.reset()
    step()
    layers.zero_grad(set_to_none=True)
    saved, passing = 4, 2  # the outputs of four layers; two gradients of activations
    assert peak_of_passing(step) // rows.nbytes in range(saved, saved + passing + 1)
    torch.compiler.reset()
