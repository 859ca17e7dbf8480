"""Shifts to the host and offloading there: on a GPU where there is one, on a simulated device everywhere."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lightning_dpx as dpx
from tests.conftest import SIMULATED
from tests.shifting.test_shift import CASES, no_dropout

HOST = torch.device("cpu")
LAYERS, WIDTH = 48, 128
ROWS = {"cuda": 2048, "sim": 256}  # on CUDA, so that what a layer keeps fills the blocks of its allocator
MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(
    params=[
        pytest.param("cuda:0", marks=MARKS),
        pytest.param("sim:0", marks=pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)),
    ]
)
def home(request: pytest.FixtureRequest) -> torch.device:
    """Where the model lives."""
    return torch.device(request.param)


def gradients(model: nn.Module, shape: tuple[int, ...], home: torch.device, steps: int = 2) -> list[torch.Tensor]:
    """Of several steps, of which the later ones depend on the earlier ones."""
    torch.manual_seed(1)
    found: list[torch.Tensor] = []
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        rows = torch.randn(shape, dtype=dtype).to(home)
        labels = torch.randint(3, (shape[0],)).to(home)
        model.zero_grad()
        F.cross_entropy(model(rows), labels).backward()
        found += [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return found


@pytest.mark.parametrize("case", [case for case in CASES if case != "lstm"])  # its states are single
def test_a_shift_to_the_host_gives_the_same_gradients(case: str, home: torch.device) -> None:
    """In double precision, where what two kinds of devices compute agrees to much more than 1e-6."""
    build, shape, chosen = CASES[case]
    torch.manual_seed(0)
    plain = no_dropout(build()).double().to(home)
    shifted = copy.deepcopy(plain)
    dpx.shift_activations(shifted, chosen, {home: HOST})
    assert {parameter.device for parameter in shifted.parameters()} == {home, HOST}
    for ours, expected in zip(gradients(shifted, shape, home), gradients(plain, shape, home), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9)
    dpx.unshift_activations(shifted)
    assert {parameter.device for parameter in shifted.parameters()} == {home}


class Tower(nn.Module):
    """Keeps one tensor per layer, nearly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


CHOSEN = [f"layers.{index}" for index in range(4, LAYERS - 4)]


def tower(home: torch.device) -> tuple[Tower, torch.Tensor]:
    torch.manual_seed(0)
    return Tower().double().to(home), torch.randn(ROWS[home.type], WIDTH, dtype=torch.float64).to(home)


def peak(model: nn.Module, rows: torch.Tensor) -> int:
    """Bytes of a step at their most, above what lives anyway."""
    device = torch.get_device_module(rows.device)
    model(rows).sum().backward()  # gradients and the workspaces of libraries exist from now on
    device.synchronize()
    before = device.memory_allocated(rows.device)
    device.reset_peak_memory_stats(rows.device)
    model(rows).sum().backward()
    device.synchronize()
    return int(device.max_memory_allocated(rows.device)) - before


def kept(model: nn.Module, rows: torch.Tensor) -> int:
    """What the trace says about the device of ``rows``."""
    return sum(a.num_bytes for a in dpx.trace_activations(model, rows) if a.device == rows.device)


def test_a_shift_to_the_host_frees_what_the_trace_promised(home: torch.device) -> None:
    model, rows = tower(home)
    before, plain = kept(model, rows), peak(model, rows)
    dpx.shift_activations(model, CHOSEN, {home: HOST})
    promised = before - kept(model, rows)
    assert promised > 0.7 * before
    assert plain - peak(model, rows) == pytest.approx(promised, rel=0.05)


@pytest.mark.parametrize("prefetch_depth", [0, 2])
def test_offloading_on_the_host_frees_what_the_trace_promised_but_for_the_look_ahead(
    prefetch_depth: int, home: torch.device
) -> None:
    model, rows = tower(home)
    plain = peak(model, rows)
    parts = {f"{name}.{child}" for name in CHOSEN for child in (0, 1)}
    promised = sum(a.num_bytes for a in dpx.trace_activations(model, rows) if a.module in parts)
    assert promised == len(CHOSEN) * rows.nbytes
    dpx.offload_activations(model, CHOSEN, HOST, prefetch_depth)
    assert plain - peak(model, rows) == pytest.approx(promised - prefetch_depth * rows.nbytes, rel=0.05)


@pytest.mark.parametrize("case", CASES)
def test_offloading_on_the_host_gives_the_same_bits(case: str, home: torch.device) -> None:
    build, shape, chosen = CASES[case]
    torch.manual_seed(0)
    plain = no_dropout(build()).to(home)
    if case != "lstm":  # its states are single
        plain = plain.double()  # CUDA's fused attention, which has none, adds in any order
    offloaded = copy.deepcopy(plain)
    dpx.offload_activations(offloaded, chosen, HOST)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        ours, expected = gradients(offloaded, shape, home), gradients(plain, shape, home)
    assert all(map(torch.equal, ours, expected))


def test_offloaded_values_hold_while_the_device_lags_far_behind_the_host(home: torch.device) -> None:
    """Whatever is read before it has arrived, or overwritten before it was read, shows here."""
    expected = gradients(tower(home)[0], (ROWS[home.type], WIDTH), home, 1)

    def lag(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        def delay(gradient: torch.Tensor) -> None:
            if home.type == "cuda":
                torch.cuda._sleep(2_000_000)
            torch.full_like(gradient, float("nan"))  # takes any memory that was given back too early

        output.register_hook(delay)

    for _ in range(3):
        model, _rows = tower(home)
        dpx.offload_activations(model, CHOSEN, HOST)
        for layer in model.layers:
            layer.register_forward_hook(lag)
        assert all(map(torch.equal, gradients(model, (ROWS[home.type], WIDTH), home, 1), expected))


class PackedAttention(nn.Module):
    """Its queries, keys and values lie in one tensor, with gaps between their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(256, 768)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in self.packed(x).chunk(3, -1))
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        pytest.param("sim:0", SDPBackend.MATH, marks=pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)),
        pytest.param("cuda:0", SDPBackend.FLASH_ATTENTION, marks=MARKS),
        pytest.param("cuda:0", SDPBackend.EFFICIENT_ATTENTION, marks=MARKS),
    ],
)
def test_fused_attention_takes_what_comes_back(kind: str, backend: SDPBackend) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 256), PackedAttention(), nn.Linear(256, 3)).bfloat16().to(kind)
    offloaded = copy.deepcopy(plain)
    dpx.offload_activations(offloaded, ["1"], HOST)
    rows = torch.randn(2, 128, 256, dtype=torch.bfloat16).to(kind)
    with sdpa_kernel(backend):
        for model in (plain, offloaded):
            model(rows).float().square().sum().backward()
    for ours, expected in zip(offloaded.parameters(), plain.parameters(), strict=True):
        # Fused attention adds up in any order.
        assert (ours.grad - expected.grad).norm() <= 0.05 * expected.grad.norm()
