"""Simulated devices compute what the CPU computes, where they are told to."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.conftest import SIMULATED

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)

ROWS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
MODULES = {
    "linear": (nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)), ROWS),
    "convolution": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 8)),
        torch.randn(5, 3, 9, 9),
    ),
    "embedding": (nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2)), torch.randint(10, (5, 3))),
    "lstm": (nn.LSTM(4, 6, 2, batch_first=True), torch.randn(5, 3, 4)),
    "gru": (nn.GRU(4, 6, 2, batch_first=True), torch.randn(5, 3, 4)),
    "transformer": (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), torch.randn(5, 3, 8)),
}


def train(name: str, device: str, make_optimizer) -> dict[str, torch.Tensor]:
    net, rows = copy.deepcopy(MODULES[name][0]).to(device), MODULES[name][1].to(device)
    optimizer = make_optimizer(net.parameters())
    for _ in range(3):
        output = net(rows)
        loss = (output[0] if isinstance(output, tuple) else output).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    assert all(str(parameter.grad.device) == str(torch.device(device)) for parameter in net.parameters())
    return {key: value.cpu() for key, value in net.state_dict().items()}


@pytest.mark.parametrize("name", MODULES)
def test_modules_train_to_the_weights_of_the_cpu(name) -> None:
    def sgd(parameters):
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    torch.testing.assert_close(train(name, "sim:2", sgd), train(name, "cpu", sgd), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_in_all_their_forms(kind, options) -> None:
    def make(parameters):
        return kind(parameters, 0.01, eps=1e-4, **options)

    torch.testing.assert_close(train("linear", "sim:3", make), train("linear", "cpu", make), rtol=1e-5, atol=1e-6)


OPERATORS = {
    "views": lambda x: x.t()[1:].reshape(-1).view(3, 3).unsqueeze(0).expand(2, 3, 3).contiguous(),
    "writes through a view": lambda x: (y := x.clone(), y[1].mul_(2))[0],
    "sort": lambda x: x.sort()[1],
    "cumsum": lambda x: x.cumsum(0),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "mask": lambda x: x[x > 0],
    "index on the host": lambda x: x[torch.tensor([2, 0])],
    "inverse": lambda x: torch.linalg.inv(x[:, :3]),
    "complex": lambda x: torch.fft.fft(x).conj() * 2,
    "softmax": lambda x: F.softmax(x, -1),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "nan_to_num": lambda x: (x / 0).nan_to_num(),
    "to double": lambda x: x.double(),
    "arange": lambda x: torch.arange(7, device=x.device),
    "eye": lambda x: torch.eye(3, device=x.device),
    "out": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    "vmap": lambda x: torch.func.vmap(lambda row: row * row.sum())(x),
    "derivative forwards": lambda x: torch.func.jvp(lambda y: F.linear(y, x, x[:, 0]), (x,), (torch.ones_like(x),))[1],
    "loss": lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.long, device=x.device)),
    "foreach": lambda x: torch._foreach_add([x, x], 1.0)[1],
    "pad": lambda x: F.pad(x, (1, 1)),
    "scatter": lambda x: torch.zeros_like(x).scatter_add(1, torch.zeros(3, 4, dtype=torch.long, device=x.device), x),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2.0),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "norm": lambda x: x.norm(),
    "einops of the host": lambda x: x * torch.tensor(2.0),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, for derivatives forwards
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_give_the_numbers_of_the_cpu(name) -> None:
    result = OPERATORS[name](ROWS.to("sim:1"))
    assert str(result.device) == "sim:1"
    torch.testing.assert_close(result.cpu(), OPERATORS[name](ROWS))


@pytest.mark.parametrize("other", ["sim:2", "cpu"])
def test_devices_do_not_mix(other) -> None:
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*sim:1"):
        torch.ones(2, device="sim:1") + torch.ones(2, device=other)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        nn.Linear(2, 2).to("sim:1")(torch.ones(1, 2, device=other))


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="There is no sim:9: 8 devices are simulated"):
        torch.ones(2, device="sim:9")


def test_the_device_context_and_the_current_device() -> None:
    before = torch.get_device_module("sim").current_device()
    with torch.device("sim:3"):
        assert str(nn.Linear(2, 2).weight.device) == "sim:3"
    with torch.get_device_module("sim").device(2):
        assert str(torch.zeros(1, device="sim").device) == "sim:2"
    assert torch.get_device_module("sim").current_device() == before


def test_moving_a_module_keeps_its_parameters_and_ties() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    weight = net[0].weight
    for device in ("sim:1", "sim:2", "cpu"):
        net.to(device)
        assert net[0].weight is weight is net[1].weight
        assert isinstance(weight, nn.Parameter)
        assert str(weight.device) == device


def test_copies_files_and_text() -> None:
    value = torch.arange(3.0, device="sim:1")
    assert str(copy.deepcopy(value).device) == "sim:1"
    file = io.BytesIO()
    torch.save({"value": value}, file)
    file.seek(0)
    assert str(torch.load(file)["value"].device) == "sim:1"
    file.seek(0)
    assert torch.load(file, map_location="cpu")["value"].tolist() == [0, 1, 2]
    assert repr(value) == "tensor([0., 1., 2.], device='sim:1')"
    assert torch.ones(2).pin_memory().is_pinned()
    assert torch.ones(2).to("sim:1", non_blocking=True).sum().item() == 2
    with pytest.raises(TypeError, match="can't convert sim:1"):
        value.numpy()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_has_the_lists_of_cuda(dtype) -> None:
    rows = ROWS.to("sim:1")
    with torch.autocast("sim", dtype):
        product = rows @ rows.t()
        assert product.dtype == dtype
        assert product.exp().dtype == torch.float32
    assert (rows @ rows.t()).dtype == torch.float32


def test_the_gradient_scaler_skips_a_step_that_overflows() -> None:
    net, scaler = nn.Linear(4, 1).to("sim:1"), torch.amp.GradScaler("sim", init_scale=8.0)
    optimizer, before = torch.optim.SGD(net.parameters(), 0.1), net.weight.detach().clone()
    scaler.scale(net(ROWS.to("sim:1") * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4
    assert torch.equal(net.weight, before)


def test_every_device_has_a_generator() -> None:
    def draw() -> list[list[float]]:
        torch.manual_seed(1)
        return [F.dropout(torch.ones(20, device=f"sim:{index}")).tolist() for index in (0, 1, 1)]

    first = draw()
    assert first == draw()
    assert first[0] == first[1], "same seed, same stream"
    assert first[1] != first[2], "the stream goes on"
    state = torch.get_device_module("sim").get_rng_state(1)
    ahead = torch.rand(3, device="sim:1")
    torch.get_device_module("sim").set_rng_state(state, 1)
    assert torch.equal(torch.rand(3, device="sim:1"), ahead)
    before = torch.get_rng_state()
    torch.rand(3, device="sim:1")
    assert torch.equal(torch.get_rng_state(), before), "the host's generator is left alone"


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_draws_the_same_mask_again(reentrant) -> None:
    net = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1)).to("sim:2")
    grads = []
    for forward in (net, lambda rows: checkpoint(net, rows, use_reentrant=reentrant)):
        torch.manual_seed(0)
        rows = ROWS.to("sim:2").requires_grad_()
        forward(rows).sum().backward()
        grads.append(rows.grad)
    assert torch.equal(*grads)
