import pytest
import torch
from torch import Tensor, nn

from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.bench.plan_peers import compiled_models, require_compiler
from lightning_dpx.errors import ConfigurationError, UnsupportedError
from lightning_dpx.memory import MemoryTrace

CHEAP = "aot_eager_decomp_partition"  # partitions as inductor does, and compiles nothing

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor's own


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    yield
    torch.compiler.reset()


def tiny() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 32)) for _ in range(4)]
    return nn.Sequential(*blocks)


def step(module: nn.Module, rows: Tensor) -> None:
    module.zero_grad(set_to_none=True)
    module(rows).pow(2).mean().backward()


def peak(module: nn.Module, rows: Tensor) -> int:
    step(module, rows)  # compiles
    module.zero_grad(set_to_none=True)
    return peak_of_passing(lambda: module(rows).pow(2).mean().backward())


def test_a_lower_budget_takes_less_memory_and_gives_the_same_gradients() -> None:
    model, rows = tiny(), torch.randn(64, 32)
    step(model, rows)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    modules = compiled_models(model, [0.7, 0.3], CHEAP)
    peaks = [peak(module, rows) for module in modules.values()]
    assert list(modules) == ["compiled", "compiled 0.70", "compiled 0.30"]
    assert peaks == sorted(set(peaks), reverse=True)
    assert peaks[0] <= 1.001 * peak(model, rows), "a few bytes of graphs apart"
    for module in modules.values():
        step(module, rows)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="compiled code runs under a mode, which sees nothing of it")
def test_under_a_dispatch_mode_nothing_compiled_runs() -> None:
    """Why the trace is no yardstick here: without fullgraph, the plain Python code would be measured silently."""
    module = compiled_models(tiny(), [], CHEAP)["compiled"]
    with MemoryTrace(torch.device("cpu")), pytest.raises(RuntimeError, match="dispatch mode"):
        module(torch.randn(64, 32))


def test_a_model_of_two_graphs_is_refused() -> None:
    class Breaks(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return rows + 1

    with pytest.raises(RuntimeError, match="graph_break"):
        compiled_models(Breaks(), [], CHEAP)["compiled"](torch.ones(1))


def test_without_a_compiler_it_says_what_to_install() -> None:
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        with pytest.raises(UnsupportedError, match=r"needs a C\+\+ compiler.*no-such-compiler.*apt install g\+\+"):
            require_compiler("inductor")
        require_compiler(CHEAP)


def test_an_unknown_backend_lists_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"no backend 'quick'; there are .*inductor"):
        require_compiler("quick")
