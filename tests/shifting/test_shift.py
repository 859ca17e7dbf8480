"""Shifted models compute the same bits, free the memory that the trace promised, and copy every cut tensor once."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lightning_dpx as dpx
from lightning_dpx.shifting import offload_activations, unoffload_activations
from lightning_dpx.simulate import clear_traffic, traffic
from tests.conftest import SIMULATED, sim_device, simulate_room

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
HOME, SPARE = sim_device(0), sim_device(1)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3 if i == 0 else width, width, 3, padding=1) for i in range(3)])
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(2 * width, width, 3, padding=1) for _ in range(3)])
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = F.gelu(layer(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = F.gelu(self.middle(x))
        for layer, skip in zip(self.up, reversed(skips), strict=True):
            x = F.gelu(layer(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1)))
        return self.head(x).mean((2, 3))


class Unrolled(nn.Module):
    """One cell, called once per time step, and a second one on top."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper, self.head = nn.LSTMCell(4, 8), nn.LSTMCell(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(len(x), 8, device=x.device)
        low, high = (zeros, zeros), (zeros, zeros)
        for step in x.view(len(x), -1, 4).unbind(1):
            low = self.lower(step, low)
            high = self.upper(low[0], high)
        return self.head(high[0])


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 16, bias=False)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), 3, enable_nested_tensor=False
        )
        self.decode = nn.Linear(16, 12, bias=False)
        self.decode.weight = nn.Parameter(self.embed.weight.detach().t().contiguous())
        self.again = nn.Linear(12, 16, bias=False)
        self.again.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.embed(x.view(len(x), -1, 12)))
        return self.decode(hidden + self.again(self.decode(hidden)))[:, 0, :3]


class Functional(nn.Module):
    """Operators between the modules use tensors of both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(48, 16), nn.Linear(16, 16), nn.Linear(32, 3)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        b = F.relu(self.b(a)) * self.scale
        mixed = torch.cat([a * b, torch.where(a > b, a, b)], dim=1)
        return self.c(mixed) + mixed[:, :3].softmax(1)


class Recomputed(nn.Module):
    """Activation checkpointing of regions on either side of the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(48, 48), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)])

    def pair(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.blocks[1](x)) + self.blocks[2](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        x = checkpoint(self.pair, self.blocks[3](x) * 1.0, use_reentrant=False)
        return x[:, :3]


IMAGES, ROWS = (4, 3, 16, 16), (6, 48)


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 3))


def resnet() -> nn.Module:
    blocks = [Residual(8) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "chain": (chain, ROWS, ["1", "2"]),
    "resnet": (resnet, IMAGES, ["1", "3.conv*"]),
    "unet": (UNet, IMAGES, ["down.1", "up.*"]),
    "transformer": (TiedModel, ROWS, ["encoder.layers.1", "encoder.layers.2"]),
    "tied": (TiedModel, ROWS, ["again", "encoder.layers.0.self_attn"]),
    "lstm": (Unrolled, ROWS, ["upper"]),
    "functional": (Functional, ROWS, ["b"]),
    "recomputed": (Recomputed, ROWS, ["blocks.0", "blocks.3"]),
}


def train(model: nn.Module, shape: tuple[int, ...], steps: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    seen: dict[str, torch.Tensor] = {}
    for step in range(steps):
        rows = torch.randn(shape).to(HOME)
        labels = torch.randint(3, (shape[0],)).to(HOME)
        torch.get_device_module("sim").manual_seed_all(step)  # dropout draws on another device now
        loss = F.cross_entropy(model(rows), labels)
        assert loss.device == HOME
        loss.backward()
        if step == 0:
            seen = {f"{name}.grad": p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return {**seen, **{name: value.detach().cpu() for name, value in model.state_dict().items()}}


def no_dropout(model: nn.Module) -> nn.Module:
    """Generators of two devices draw other masks; everything else must be equal bit for bit."""
    for child in model.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        if isinstance(child, nn.MultiheadAttention):
            child.dropout = 0.0
    return model


@pytest.mark.parametrize("case", CASES)
def test_shifted_models_train_to_the_same_bits(case: str) -> None:
    build, shape, chosen = CASES[case]
    torch.manual_seed(0)
    plain = no_dropout(build()).to(HOME)
    shifted = copy.deepcopy(plain)
    kind, names = type(shifted), [name for name, _ in shifted.named_parameters()]
    dpx.shift_activations(shifted, chosen, {"sim:0": "sim:1"})
    assert {p.device for p in shifted.parameters()} <= {HOME, SPARE}
    clear_traffic()
    expected, ours = train(plain, shape), train(shifted, shape)
    assert any(SPARE in (t.source, t.target) for t in traffic()), "something must have run there"
    assert expected.keys() == ours.keys()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name
    assert type(shifted) is kind
    assert [name for name, _ in shifted.named_parameters()] == names
    dpx.unshift_activations(shifted)
    assert {tensor.device for tensor in shifted.state_dict().values()} == {HOME}
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in shifted.modules())


def peaks(model: nn.Module, shape: tuple[int, ...]) -> tuple[int, int]:
    sim = torch.get_device_module("sim")
    rows = torch.randn(shape).to(HOME)
    model(rows).sum().backward()  # gradients exist from now on
    before = [sim.memory_allocated(device) for device in (HOME, SPARE)]
    for device in (HOME, SPARE):
        sim.reset_peak_memory_stats(device)
    output = model(rows).sum()
    held = [sim.memory_allocated(device) - used for device, used in zip((HOME, SPARE), before, strict=True)]
    output.backward()
    return held[0], held[1]


@pytest.mark.parametrize(
    ("build", "shape", "chosen"),
    [
        (lambda: UNet(16), (8, 3, 64, 64), ["up.*", "head"]),
        (TiedModel, (64, 480), ["encoder.layers.1", "encoder.layers.2"]),
    ],
    ids=["unet", "transformer"],
)
def test_the_source_frees_what_the_trace_promised(build: Any, shape: tuple[int, ...], chosen: list[str]) -> None:
    torch.manual_seed(0)
    model = no_dropout(build()).to(HOME)
    trace = dpx.trace_activations(model, torch.randn(shape).to(HOME))
    plain, _ = peaks(model, shape)
    dpx.shift_activations(model, chosen, {HOME: SPARE})
    after = dpx.trace_activations(model, torch.randn(shape).to(HOME))
    left, moved = peaks(model, shape)
    assert sum(a.num_bytes for a in trace) == pytest.approx(plain, rel=0.05)
    on = {device: sum(a.num_bytes for a in after if a.device == device) for device in (HOME, SPARE)}
    assert left == pytest.approx(on[HOME], rel=0.05)
    assert moved == pytest.approx(on[SPARE], rel=0.05)
    assert left < 0.75 * plain


def num_copies(model: nn.Module, shape: tuple[int, ...]) -> tuple[int, int]:
    rows = torch.randn(shape).to(HOME)
    clear_traffic()
    loss = model(rows).sum()
    forward = sum(t.num_copies for t in traffic() if t.source.type == t.target.type == "sim")
    loss.backward()
    return forward, sum(t.num_copies for t in traffic() if t.source.type == t.target.type == "sim") - forward


def test_a_cut_tensor_is_copied_once_each_way() -> None:
    chain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).to(HOME)
    dpx.shift_activations(chain, ["2", "3"], {HOME: SPARE})
    assert num_copies(chain, (4, 8)) == (2, 2), "in and out; none between the two"
    several = Functional().to(HOME)
    dpx.shift_activations(several, "b", {HOME: SPARE})
    assert num_copies(several, ROWS) == (2, 2), "b's output is used three times"
    tied = no_dropout(TiedModel()).to(HOME)
    dpx.shift_activations(tied, "again", {HOME: SPARE})
    assert num_copies(tied, ROWS) == (3, 3), "its input, its output and the tied weight"


def test_a_lightning_like_step_is_traced_without_touching_anything() -> None:
    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(48, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]) + self.net(batch[0]), batch[1])

    model = Stepping()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = torch.randn(6, 48), torch.randint(3, (6,))
    state = torch.get_rng_state()
    trace = dpx.trace_activations(model, batch)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())
    names = [activation.name for activation in trace]
    assert "net.1" in names
    assert "net.1#2" in names
    assert trace[-1].module == "", "the loss is the step's own"
    norm = next(activation for activation in trace if activation.name == "net.1")
    assert norm.shape == (6, 8)
    assert norm.num_bytes == 6 * 8 * 4


def test_offloaded_activations_rest_elsewhere_and_change_nothing() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(6)), nn.Linear(48, 3)).to(HOME)
    offloaded = copy.deepcopy(plain)
    kept, _ = peaks(plain, (256, 48))
    offload_activations(offloaded, ["[0-4]"], SPARE)
    left, moved = peaks(offloaded, (256, 48))
    assert left < 0.5 * kept
    assert moved > 0.5 * kept
    plain.zero_grad()
    offloaded.zero_grad()
    expected, ours = train(plain, ROWS), train(offloaded, ROWS)
    assert all(torch.equal(ours[name], value) for name, value in expected.items())
    unoffload_activations(offloaded)
    with pytest.raises(dpx.ConfigurationError, match="not offloaded"):
        unoffload_activations(offloaded)


def test_a_full_target_is_refused_before_anything_moves() -> None:
    simulate_room(2**30, 2**10, *[2**30] * 6)
    try:
        model = Functional().to(HOME)
        with pytest.raises(dpx.ConfigurationError, match=r"parameters of b need 1088 bytes, and sim:1 has \d+ free"):
            dpx.shift_activations(model, "b", {HOME: SPARE})
        assert {parameter.device for parameter in model.parameters()} == {HOME}
    finally:
        dpx.simulate(8)


def test_a_trace_leaves_nothing_behind() -> None:
    sim = torch.get_device_module("sim")
    gc.collect()
    before = sim.memory_allocated(3)
    model = TiedModel().to("sim:3")
    dpx.trace_activations(model, torch.randn(ROWS).to("sim:3"))
    del model
    gc.collect()
    assert sim.memory_allocated(3) == before


def test_a_copy_of_a_shifted_module_is_shifted_by_itself() -> None:
    torch.manual_seed(0)
    plain = chain().to(HOME)
    shifted = copy.deepcopy(plain)
    dpx.shift_activations(shifted, ["1", "2"], {HOME: SPARE})
    twin = copy.deepcopy(shifted)
    assert [p.device for p in twin.parameters()] == [p.device for p in shifted.parameters()]
    dpx.unshift_activations(shifted)
    expected = train(copy.deepcopy(plain), ROWS)
    for each in (shifted, copy.deepcopy(twin)):
        assert all(torch.equal(value, expected[name]) for name, value in train(each, ROWS).items())
    dpx.unshift_activations(twin)
    assert {p.device for p in twin.parameters()} == {HOME}
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in twin.modules())


def test_a_copy_of_a_part_is_shifted_by_itself() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())).to(HOME)
    rows = torch.randn(4, 8).to(HOME)
    expected = model[1](rows)
    dpx.shift_activations(model, "1.0", {HOME: SPARE})
    part = copy.deepcopy(model[1])
    assert part[0].weight.device == SPARE
    assert torch.equal(part(rows), expected)
    dpx.unshift_activations(part)
    assert part[0].weight.device == HOME
    assert torch.equal(part(rows), expected)
    assert torch.equal(model[1](rows), expected)


def test_pickling_is_refused_by_name() -> None:
    model = chain().to(HOME)
    dpx.shift_activations(model, "2", {HOME: SPARE})
    with pytest.raises(dpx.UnsupportedError, match=r"cannot be pickled: call unshift_activations\(module\) first"):
        pickle.dumps(model)
    dpx.unshift_activations(model)
    offload_activations(model, "2", SPARE)
    with pytest.raises(dpx.UnsupportedError, match=r"cannot be pickled: call unoffload_activations\(module\) first"):
        pickle.dumps(model)
    unoffload_activations(model)
    pickle.dumps(model.cpu())
