"""What saved-tensor hooks cannot handle is kept, and the rest of the model is planned all the same."""

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lightning_dpx as dpx
from tests.memory.models import Swing
from tests.memory.steps import DropsEverything

Body = Callable[["Foreign", Tensor], Tensor]


class Foreign(nn.Module):
    """Something unusual between two layers."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.body = body
        self.register_buffer("graph", (torch.rand(64, 64) > 0.9).float().to_sparse().coalesce())

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return torch.tanh(self.last(self.body(self, x))) * x


def _sparse_weights(m: Foreign, x: Tensor) -> Tensor:
    indices = m.graph.indices()
    weights = torch.sparse_coo_tensor(indices, x[indices[0], indices[1]], (64, 64), check_invariants=True)
    return torch.sparse.mm(weights, m.inner(x))


def _jagged(m: Foreign, x: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 10, 30, 64]))
    return torch.cat([F.gelu(m.second(rows)).values(), x])[64:]


def _jvp(m: Foreign, x: Tensor) -> Tensor:
    value, tangent = torch.func.jvp(m.inner, (x,), (torch.ones_like(x),))
    return value * tangent


def _vjp(m: Foreign, x: Tensor) -> Tensor:
    value, pull = torch.func.vjp(m.inner, x)
    return pull(torch.ones_like(value))[0] * value


def _per_sample(m: Foreign, x: Tensor) -> Tensor:
    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(m.second, parameters, (row,)).pow(2).sum()

    each = torch.vmap(torch.func.grad(loss), (None, 0))(dict(m.second.named_parameters()), x)
    return torch.tanh(each["weight"]).sum(1)


def _nested(m: Foreign, x: Tensor) -> Tensor:
    rows, ones = torch.nested.as_nested_tensor([m.inner(x), x]), torch.ones(64, 64)
    return (rows + torch.nested.nested_tensor([ones, ones])).to_padded_tensor(0.0).sum(0)


BODIES: dict[str, Body] = {
    "torch.sparse.mm": lambda m, x: torch.sparse.mm(m.graph, m.inner(x)),
    "sparse with gradients": _sparse_weights,
    "sum with a sparse one": lambda m, x: torch.tanh(m.inner(x) + m.graph),
    "sum with a sparse one in rows": lambda m, x: torch.tanh(m.inner(x) + m.graph.to_sparse_csr()),
    "nested": _nested,
    "jagged": _jagged,
    "jvp": _jvp,
    "vjp": _vjp,
    "grad": lambda m, x: torch.func.grad(lambda y: m.inner(y).sum())(x),
    "vmap": lambda m, x: torch.vmap(m.inner)(x),
    "jacrev": lambda m, x: torch.vmap(torch.func.jacrev(lambda y: m.inner(y).sum()))(x),
    "hessian": lambda m, x: torch.func.hessian(lambda y: m.inner(y).sum())(x[0]) @ x,
    "per sample": _per_sample,
    "checkpointed": lambda m, x: checkpoint(m.inner, x, use_reentrant=False),
    "checkpointed, a view": lambda m, x: checkpoint(lambda y: m.inner(y).view(8, 8, 64), x, use_reentrant=False).view(
        64, 64
    ),
    "reentrant": lambda m, x: checkpoint(m.inner, x, use_reentrant=True),
}


def _train(module: nn.Module, x: Tensor) -> list[Tensor]:
    for _ in range(2):
        module.zero_grad()
        module(x).pow(2).sum().backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.01 * parameter.grad
    return [*(p.grad for p in module.parameters()), *(p.detach() for p in module.parameters())]


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage", "ignore:Sparse CSR tensor support")
def test_what_cannot_be_planned_is_kept_and_the_rest_is_planned(name: str) -> None:
    torch.manual_seed(0)
    module, x = Foreign(BODIES[name]), torch.randn(64, 64)
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, x, planner=DropsEverything())
    assert any(decision.module == "" and decision.action == "recompute" for decision in plan.decisions)
    dpx.apply_plan(module, plan)
    disable = torch.autograd.graph.disable_saved_tensors_hooks
    assert all(map(torch.equal, _train(module, x), _train(plain, x)))
    assert torch.autograd.graph.disable_saved_tensors_hooks is disable


def test_transforms_refuse_the_hooks_of_others_as_ever() -> None:
    torch.manual_seed(0)
    module, x = Foreign(BODIES["grad"]), torch.randn(64, 64)
    dpx.apply_plan(module, dpx.search_plan(module, x))
    with torch.autograd.graph.save_on_cpu(), pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        module(x)


def test_other_threads_see_what_torch_has_defined() -> None:
    """Also while the forward of a plan runs, and as many transforms of its own in it."""
    torchs_own, seen = graph.disable_saved_tensors_hooks, dict[str, object]()

    def elsewhere() -> None:
        seen["elsewhere"] = graph.disable_saved_tensors_hooks
        with graph.save_on_cpu(), pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
            torch.func.grad(torch.sum)(torch.ones(3))

    def body(module: Foreign, x: Tensor) -> Tensor:
        seen["here"] = graph.disable_saved_tensors_hooks
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        return torch.func.grad(lambda y: module.inner(y).sum())(x)

    torch.manual_seed(0)
    module, x = Foreign(body), torch.randn(64, 64)
    dpx.apply_plan(module, dpx.search_plan(module, x, planner=DropsEverything()))
    seen.clear()
    module(x).sum().backward()
    assert seen["here"] != torchs_own, "the forward has followed no plan"
    assert seen["elsewhere"] is torchs_own
    assert graph.disable_saved_tensors_hooks is torchs_own
    assert type(graph) is type(threading)


class Views(nn.Module):
    """Returns a view of what nothing can repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return Swing.apply(x * self.scale, 2.0).view(8, 8, 64)


@pytest.mark.parametrize("regions", [False, True])
def test_a_module_may_return_a_view_of_what_has_no_recipe(regions: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(64, 64), Views(), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = checkpoint(self.middle, x, use_reentrant=False) if regions else self.middle(x)
            return self.last(torch.exp(0.1 * (x + 1)))

    torch.manual_seed(0)
    module, x = Model(), torch.randn(64, 64)
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, x, planner=DropsEverything())
    assert not plan.keeps_all
    dpx.apply_plan(module, plan)
    assert all(map(torch.equal, _train(module, x), _train(plain, x)))
