"""Offloaded tensors come back ahead of use, change nothing, and leave nothing behind on the device."""

import copy
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.simulate import clear_traffic, traffic
from tests.conftest import SIMULATED, sim_device
from tests.shifting.test_shift import CASES, no_dropout, train

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
HOME, SPARE = sim_device(0), sim_device(1)
LAYERS, ROWS, WIDTH = 8, 256, 48
KEPT = ROWS * WIDTH * 4  # bytes: what one tanh of a tower keeps


class Mark(torch.autograd.Function):
    """Keeps nothing; notes when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, note: Any) -> torch.Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.note()
        return gradient, None


class Tower(nn.Module):
    """Every part keeps one tensor: the output of its tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Tanh() for _ in range(LAYERS)])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.notes: list[tuple[int, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale
        for index, part in enumerate(self.parts):
            x = Mark.apply(part(x), lambda index=index: self.notes.append((index, fetches())))
        return x


def fetches() -> int:
    if SIMULATED:
        return 0  # real devices count no copies
    return sum(t.num_copies for t in traffic() if t.target == HOME and t.maker.startswith("devices."))


def allocated(*devices: torch.device) -> list[int]:
    return [torch.get_device_module("sim").memory_allocated(device) for device in devices or (HOME, SPARE)]


def comes_to(expected: list[int]) -> bool:
    """The thread of a device's backward lets go of its last things a moment after the caller goes on."""
    for _ in range(12_000):  # a minute, for machines that are busy
        if allocated() == expected:
            return True
        time.sleep(0.005)
    return False


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """What is given back is given back at once, not when the garbage collector comes by."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tower(prefetch_depth: int) -> tuple[Tower, torch.Tensor]:
    model, rows = Tower().to(HOME), torch.randn(ROWS, WIDTH).to(HOME)
    dpx.offload_activations(model, "parts.*", SPARE, prefetch_depth)
    model(rows).sum().backward()  # gradients exist from now on
    model.notes.clear()
    clear_traffic()
    return model, rows


@pytest.mark.parametrize("prefetch_depth", [0, 1, 2, 3])
def test_fetches_come_ahead_of_use(prefetch_depth: int) -> None:
    model, rows = tower(prefetch_depth)
    model(rows).sum().backward()
    # the mark of part i comes just before its tanh asks: what part i + 1 asked for, and what was started for others
    used = [(index, LAYERS - 1 - index) for index in reversed(range(LAYERS))]
    expected = [(index, min(LAYERS, count + prefetch_depth) if count else 0) for index, count in used]
    assert model.notes == expected
    assert fetches() == LAYERS, "nothing was fetched twice"


def peak_of_backward(model: nn.Module, rows: torch.Tensor) -> tuple[int, int]:
    """Bytes on the device before backward, and at most while it runs."""
    sim = torch.get_device_module("sim")
    loss = model(rows).sum()
    held = allocated(HOME)[0]
    sim.reset_peak_memory_stats(HOME)
    loss.backward()
    return held, sim.max_memory_allocated(HOME)


@pytest.mark.parametrize("prefetch_depth", [0, 1, 2, 3])
def test_the_peak_is_that_of_offloading_and_at_most_the_look_ahead(prefetch_depth: int) -> None:
    model, rows = tower(0)
    held, waiting = peak_of_backward(model, rows)
    dpx.unoffload_activations(model)
    plain_held, plain = peak_of_backward(model, rows)
    dpx.offload_activations(model, "parts.*", SPARE, prefetch_depth)
    assert peak_of_backward(model, rows)[0] == held
    assert plain_held - held >= (LAYERS - 1) * KEPT
    ahead = peak_of_backward(model, rows)[1]
    assert waiting + (prefetch_depth - 1) * KEPT <= ahead <= waiting + prefetch_depth * KEPT
    assert ahead <= plain - (LAYERS - 2 - prefetch_depth) * KEPT


@pytest.mark.parametrize("place", [SPARE, torch.device("cpu")], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case != "recomputed"])
def test_offloaded_models_train_to_the_same_bits(case: str, place: torch.device) -> None:
    build, shape, chosen = CASES[case]
    torch.manual_seed(0)
    plain = no_dropout(build()).to(HOME)
    offloaded = copy.deepcopy(plain)
    dpx.offload_activations(offloaded, chosen, place)
    clear_traffic()
    expected, ours = train(plain, shape), train(offloaded, shape)
    assert any((t.source, t.target) == (place, HOME) and t.maker.startswith("devices.") for t in traffic())
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


def test_a_tensor_that_several_operators_keep_is_offloaded_and_fetched_once() -> None:
    class Several(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.tanh()
            return y.exp().mul(2) + y * y

    model, x = nn.Sequential(Several()).to(HOME), torch.randn(ROWS, WIDTH).to(HOME).requires_grad_()
    dpx.offload_activations(model, "0", SPARE)
    clear_traffic()
    output = model(x)
    assert sum(t.num_copies for t in traffic() if t.target == SPARE) == 2, "of tanh and exp"
    output.sum().backward()
    assert fetches() <= 3
    expected = x.detach().clone().requires_grad_()
    Several()(expected).sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_a_conjugate_is_offloaded_beside_its_original() -> None:
    class Conjugate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x.conj() * x).abs()

    x = torch.randn(2, dtype=torch.complex64).requires_grad_()
    expected = x.detach().clone().requires_grad_()
    model = nn.Sequential(Conjugate())
    dpx.offload_activations(model, "0", SPARE)
    model(x).sum().backward()
    Conjugate()(expected).sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_nothing_stays_when_backward_never_runs() -> None:
    model, rows = tower(2)
    before = allocated()
    loss = model(rows).sum()
    assert allocated(SPARE)[0] >= before[1] + LAYERS * KEPT
    del loss
    assert comes_to(before)


def test_backward_twice() -> None:
    model, rows = tower(2)
    before, expected = allocated(), model.scale.grad.clone()
    model.scale.grad.zero_()
    del expected
    loss = model(rows).sum()
    during = allocated()
    for count in (1, 2):
        clear_traffic()
        loss.backward(retain_graph=True)
        assert fetches() == LAYERS
        assert comes_to(during), "nothing of what was fetched is left on the device"
        if count == 1:
            once = model.scale.grad.cpu()
    assert torch.equal(model.scale.grad.cpu(), 2 * once)
    del loss
    assert comes_to(before)


def test_a_backward_of_a_part_leaves_nothing_on_the_device() -> None:
    model, rows = tower(2)
    before = allocated()
    inner: list[torch.Tensor] = []
    handle = model.parts[4].register_forward_hook(lambda _module, _inputs, output: inner.append(output))
    loss = model(rows).sum()
    during = allocated()
    clear_traffic()
    (gradient,) = torch.autograd.grad(loss, inner[0], retain_graph=True)
    assert fetches() == 3 + 2, "parts 7 to 5, and the two before them that were not needed"
    del gradient
    assert comes_to(during)
    handle.remove()
    inner.clear()
    del loss
    assert comes_to(before)


def fail_in_backward(model: Tower, rows: torch.Tensor) -> None:
    """A backward that ends in a hook of the user."""

    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("of the user")

    handle = model.parts[4].register_forward_hook(lambda _module, _inputs, output: output.register_hook(fail) and None)
    loss = model(rows).sum()
    with pytest.raises(ValueError, match="of the user"):
        loss.backward()
    handle.remove()


def test_a_backward_that_fails_leaves_nothing_once_its_graph_is_gone() -> None:
    model, rows = tower(2)
    before = allocated()
    fail_in_backward(model, rows)
    assert comes_to(before)
    model(rows).sum().backward()
    assert comes_to(before)


def test_graphs_may_go_backward_in_any_order() -> None:
    model, rows = tower(2)
    plain = Tower().to(HOME)
    before = allocated(SPARE)
    for order in ([0, 1, 2], [2, 0, 1]):
        for each in (plain, model):
            each.zero_grad()
            losses = [each(rows * (index + 1)).sum() for index in range(3)]
            for index in order:
                losses[index].backward()
            del losses
        assert torch.equal(model.scale.grad, plain.scale.grad)
        assert allocated(SPARE) == before


def test_a_copy_offloads_by_itself() -> None:
    model, rows = tower(2)
    twin = copy.deepcopy(model)
    before = allocated()
    clear_traffic()
    loss = twin(rows).sum()
    dpx.unoffload_activations(model)
    assert allocated(SPARE)[0] >= before[1] + LAYERS * KEPT
    loss.backward()
    assert fetches() == LAYERS
    assert torch.equal(twin.scale.grad, model.scale.grad)


def test_a_saved_tensor_may_be_looked_at_outside_of_backward() -> None:
    model, rows = tower(2)
    output = model.parts[0](rows.requires_grad_())
    before = allocated()
    assert torch.equal(output.grad_fn._saved_result, output)
    assert comes_to(before)


@pytest.mark.parametrize("prefetch_depth", [-1, 1.5, True, "2"])
def test_a_look_ahead_is_a_number_of_tensors(prefetch_depth: Any) -> None:
    with pytest.raises(dpx.ConfigurationError, match=f"prefetch_depth={prefetch_depth!r} is not allowed"):
        dpx.offload_activations(Tower(), "parts.*", SPARE, prefetch_depth)


@pytest.mark.parametrize(
    ("device", "message"), [("gpu", "'gpu' names no device here; give a type"), ("sim:99", "'sim:99' is not there")]
)
def test_a_device_that_is_not_there_is_refused(device: str, message: str) -> None:
    if SIMULATED and device == "sim:99":
        pytest.skip(SIMULATED)
    net = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(dpx.ConfigurationError, match=message):
        dpx.offload_activations(net, "0", device)
    dpx.offload_activations(net, "0")


def test_what_names_no_submodules_is_refused() -> None:
    with pytest.raises(dpx.ConfigurationError, match="activations=0 is not allowed; give names of submodules"):
        dpx.offload_activations(nn.Sequential(nn.Linear(2, 2)), 0)  # type: ignore[arg-type]
