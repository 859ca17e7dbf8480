"""A step on fake tensors has the sizes, the lifetimes and the recipes of the real one, and leaves nothing behind."""

import copy
import logging
import resource
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.activations import Inputs
from lightning_dpx.bench.staged import STAGED_MODELS, Chain
from lightning_dpx.memory import Profile, plan_profile, profile_module, summary
from lightning_dpx.memory.module_step import run_to_loss
from tests.conftest import SIMULATED
from tests.memory.execute.test_neighbors import Blocks
from tests.memory.models import AWKWARD, GPT, ORDINARY, Block, Case
from tests.memory.plan.test_planning import make, measured_peak, profiled
from tests.memory.steps import DropsEverything, train

NEED_NUMBERS = ("data-dependent", "hooks", "recurrent layers")  # see test_abstract.py


def small(name: str) -> Case:
    """A model of the bench, with few of its stages."""
    module, x = STAGED_MODELS[name].build(), STAGED_MODELS[name].make_input(2)
    if isinstance(module, Chain):
        module.chain = nn.ModuleList([*module.chain[:4], module.chain[-1]])
    return module, x[:12] if name == "lstm" else x


STAGED: dict[str, Callable[[], Case]] = {f"staged {name}": partial(small, name) for name in STAGED_MODELS}
MODELS = {name: build for name, build in (ORDINARY | AWKWARD | STAGED).items() if name not in NEED_NUMBERS}
pytestmark = pytest.mark.xdist_group("profiles")
sim_only = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)


def convolves(module: nn.Module) -> bool:
    """What convolutions take inside is known to fakes by rule only."""
    return any(isinstance(part, nn.Conv2d | nn.ConvTranspose2d) for part in module.modules())


def described(profile: Profile) -> list[Any]:
    """All but the times, and why something is refused."""
    return [
        (v.name, v.operator, v.num_bytes, v.storage, v.inputs, bool(v.refused), v.compact, v.offloaded)
        for v in profile.values
    ]


@cache
def faked(name: str) -> Profile:
    """On fake tensors; tests only read it."""
    module, _, x = make(MODELS[name])
    return profile_module(module, x, device="cpu")


@pytest.mark.parametrize("name", MODELS)
def test_the_profile_is_that_of_a_real_step(name: str) -> None:
    """To the byte, but for what convolutions take inside, which is known by rule only."""
    module, _, x = make(MODELS[name])
    real, fake = profiled(name) if name in ORDINARY | AWKWARD else profile_module(module, x), faked(name)
    assert fake.peak == pytest.approx(real.peak, rel=0.06 if convolves(module) else 2e-4)
    assert described(fake) == described(real)
    if name != "aliases and in-place":  # copies that come and go within an operator come a moment later
        assert fake.curve == pytest.approx(real.curve, abs=(0.12 if convolves(module) else 0.01) * real.peak)
        assert (fake.storages, fake.requests) == (real.storages, real.requests)
    assert 0 < fake.step_seconds < 10


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_takes_what_it_predicts_and_keeps_the_bits(name: str) -> None:
    module, plain, x = make(MODELS[name])
    profile = faked(name)
    try:
        plan = plan_profile(module, profile, round(0.7 * profile.peak))
    except dpx.BudgetError:
        plan = plan_profile(module, profile, None)
    applied = dpx.apply_plan(module, plan)
    assert measured_peak(module, x) == pytest.approx(plan.peak, rel=0.15 if convolves(module) else 0.02)
    assert not applied.not_found
    dpx.remove_plan(module)
    module.load_state_dict(plain.state_dict())
    dpx.apply_plan(module, plan)
    assert all(map(torch.equal, train(module, x, 1), train(plain, x, 1)))


@pytest.mark.parametrize("name", ["gpt", "unet", "unrolled lstm", "aliases and in-place"])
def test_dropping_all_that_fakes_allow_keeps_the_bits(name: str) -> None:
    module, plain, x = make(MODELS[name])
    dpx.apply_plan(module, plan_profile(module, faked(name), None, DropsEverything()))
    assert all(map(torch.equal, train(module, x, 1), train(plain, x, 1)))


@sim_only
@pytest.mark.parametrize("name", ["gpt", "unet", "unrolled lstm", "custom function", "recurrent layers"])
def test_a_device_that_is_there_gives_its_own_operators_and_no_memory(name: str) -> None:
    sim: Any = torch.get_device_module("sim")
    module, _, x = make((ORDINARY | AWKWARD)[name])
    x = x[:4] if name == "recurrent layers" else x  # which are hundreds of operators there
    module, x = module.to("sim:0"), x.to("sim:0")
    before = sim.memory_allocated(0)
    sim.reset_peak_memory_stats(0)
    fake = profile_module(module, x, device="sim:0")
    assert sim.max_memory_allocated(0) == before
    real = profile_module(module, x)
    inside = 0.25 if name == "custom function" else 0.01  # fakes of that device know nothing of its operators' insides
    assert fake.curve == pytest.approx(real.curve, abs=inside * real.peak)
    assert described(fake) == described(real)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ORDINARY)
def test_the_same_on_a_gpu(name: str) -> None:
    module, _, x = make(ORDINARY[name])
    module, x = module.to("cuda:0"), x.to("cuda:0")
    profile_module(module, x)  # what libraries keep for good
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    fake = profile_module(module, x, device="cuda:0")
    assert torch.cuda.max_memory_allocated(0) - before < 2**16
    real = profile_module(module, x)
    assert described(fake) == described(real)
    # What cuDNN and layer norms take inside is known on the device only, and these models are tiny.
    assert fake.peak == pytest.approx(real.peak, rel=0.2)


def test_a_step_of_hundreds_of_gibibytes_is_planned_without_memory() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(Block(8192, 64, 0.1) for _ in range(8)))
        x = torch.empty(32, 2048, 8192)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = dpx.search_plan(module, x, budget=0.5, device="cuda")
    assert plan.unplanned_peak > 200 * 2**30
    assert plan.peak is not None
    assert plan.peak <= 0.5 * plan.unplanned_peak
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB
    assert all(parameter.is_meta for parameter in module.parameters())


def test_on_the_meta_device_the_plan_is_the_same() -> None:
    module, _, x = make(ORDINARY["gpt"])
    with torch.device("meta"):
        absent = GPT()
    plans = [
        dpx.search_plan(module, x, budget=0.5, device="cuda"),
        dpx.search_plan(absent, x, budget=0.5, device="cuda"),
        dpx.search_plan(absent, x.to("meta"), budget=0.5, device="cuda"),
    ]
    with torch._subclasses.FakeTensorMode():
        plans.append(dpx.search_plan(GPT(), torch.empty(4, 32, dtype=torch.long), budget=0.5, device="cuda"))
    assert plans[0] == plans[1] == plans[2] == plans[3]
    dpx.apply_plan(module, plans[1])


def test_the_plan_says_what_it_rests_on(tmp_path: Any) -> None:
    module, _, x = make(ORDINARY["vit"])
    plan = dpx.search_plan(module, x, budget=0.6, device="cuda:3")
    assert "from fake tensors for cuda:3: times by FLOPs and bytes, what operators take inside by rule" in summary(plan)
    plan.save(tmp_path / "plan.yaml")
    assert dpx.MemoryPlan.load(tmp_path / "plan.yaml") == plan
    assert dpx.search_plan(module, x, budget=0.5).basis == ""
    text = (tmp_path / "plan.yaml").read_text()
    (tmp_path / "plan.yaml").write_text("\n".join(line for line in text.split("\n") if not line.startswith("basis")))
    assert dpx.MemoryPlan.load(tmp_path / "plan.yaml").dropped == plan.dropped, "a file of before"
    assert dpx.estimate_cost(module, plan, x, device="cuda:3")["peak"] == plan.peak


class Caches(LightningModule):
    """Keeps what it computes, in every way that modules do; ``training_step`` takes rows (B, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.two.weight = self.one.weight
        self.drop, self.rows, self.seen, self.sums = nn.Dropout(0.5), 0, [], {}
        self.scale = torch.ones(64)
        self.register_buffer("table", None)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 64, device=self.device)
            self.mask = torch.tril(torch.ones(64, 64, device=self.device))
        self.rows += len(x)
        torch.manual_seed(5)
        x = self.drop(self.norm(torch.tanh(self.one(x)))) * self.table @ self.mask * self.scale
        self.seen.append(x.detach())
        self.sums["x"] = x.sum()
        loss = self.two(x).sum()
        self.log("loss", loss)
        return loss


def test_nothing_is_changed() -> None:
    torch.manual_seed(0)
    module, x = Caches(), torch.randn(128, 64)
    run_to_loss(module, Inputs((x,), {}))().backward()
    module.table = None
    del module.mask
    module.seen.clear()
    module.sums.clear()
    attributes, state, random = dict(vars(module)), copy.deepcopy(module.state_dict()), torch.get_rng_state()
    tensors = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    gradients = [p.grad for p in module.parameters()]
    for device in ("cpu", "cuda"):
        dpx.search_plan(module, x, device=device)
    assert vars(module) == attributes
    assert (module.rows, module.seen, module.sums, module.table) == (128, [], {}, None)
    assert {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)} == tensors
    assert [p.grad for p in module.parameters()] == gradients
    assert all(torch.equal(state[key], value) for key, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    run_to_loss(module, Inputs((x,), {}))().backward()


@pytest.mark.parametrize("device", ["cpu", "cuda", *([] if SIMULATED else ["sim:1"])])
def test_a_module_knows_where_it_would_be(device: str) -> None:
    with torch.device("meta"):
        module = Caches()
        module.scale = torch.ones(64)
    before = module.device
    assert dpx.search_plan(module, torch.empty(128, 64), device=device).unplanned_peak > 128 * 64 * 4
    assert module.device == before


@sim_only
def test_a_device_beyond_those_that_are_there_is_planned_for() -> None:
    beyond = f"sim:{torch.get_device_module('sim').device_count()}"
    found = [dpx.search_plan(nn.Linear(64, 64), torch.ones(128, 64), device=name) for name in ("sim:0", beyond)]
    assert found[0].unplanned_peak == found[1].unplanned_peak


def test_what_stays_outside_of_the_module_is_told() -> None:
    class Leaks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            cache.append(x * 2)
            return super().forward(x)

    cache: list[Tensor] = []
    with pytest.warns(UserWarning, match="left 2 fake tensors in something outside of the module"):
        dpx.search_plan(Leaks(64, 64), torch.ones(64, 64), device="cpu")


def test_masks_are_known_from_who_draws_them() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            spoiled = torch.empty_like(x).bernoulli_(0.5).mul_(x)
            partly = x.clone()
            partly[:, :2].zero_()
            drawn = (torch.rand_like(x) > 0.5).float()
            return F.dropout(self.one(x), 0.3) * spoiled * partly * drawn * x.new_full((64, 64), 2.0)

    torch.manual_seed(0)
    module, x = Masks(), torch.randn(64, 64)
    real, fake = profile_module(module, x), profile_module(module, x, device="cpu")
    assert described(fake) == described(real)
    assert sum(value.compact > 0 for value in fake.values) == 3
    assert not any(value.compact for value in profile_module(module, x, device="cuda").values), "devices keep bytes"


def test_constants_that_are_no_attributes_have_their_names() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.constants = nn.Linear(64, 64), [torch.randn(64, 64) for _ in range(2)]

        def forward(self, x: Tensor) -> Tensor:
            for constant in self.constants:
                x = torch.tanh(self.one(x) * constant)
            return x

    module, x = Listed(), torch.randn(64, 64)
    real, fake = profile_module(module, x), profile_module(module, x, device="cpu")
    assert described(fake) == described(real)
    assert fake.curve == real.curve


class Attends(nn.Module):
    """Attention with dropout, inside of torch's layers or not, over (4, 64, 32)."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            return self.layer(x)
        heads = self.layer.linear1(x).view(4, 64, 4, 16).transpose(1, 2)
        out: Tensor = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)
        return out * heads


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is assumed of an absent device")
@pytest.mark.parametrize("inside", [True, False])
def test_attention_on_an_absent_gpu_keeps_no_scores_and_is_offloaded(inside: bool) -> None:
    profile = profile_module(Attends(inside), torch.randn(4, 64, 32), device="cuda")
    scores = 4 * 4 * 64 * 64 * 4
    assert all(value.num_bytes < scores for value in profile.values)
    attended = [value for value in profile.values if "Attention" in value.operator]
    assert attended
    assert all(value.offloaded for value in attended if value.storage >= 0)
    on_host = profile_module(Attends(inside), torch.randn(4, 64, 32), device="cpu")
    assert any(value.num_bytes == scores for value in on_host.values)


def test_dropout_on_an_absent_gpu_keeps_a_byte_per_element() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 64))
    sizes = {}
    for device in ("cpu", "cuda"):
        profile = profile_module(module, torch.randn(128, 64), device=device)
        sizes[device] = [value.num_bytes for value in profile.values if value.name == "1:1"]
    assert sizes == {"cpu": [128 * 64 * 4], "cuda": [128 * 64]}


def test_a_layer_norm_is_repeated_whatever_its_eps() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64, eps=0.123), nn.Linear(64, 64))
    profile = profile_module(module, torch.randn(64, 64), device="cpu")
    (norm,) = [value for value in profile.values if value.operator == "NativeLayerNormBackward0"]
    assert not norm.refused


def test_regions_of_torch_are_left_alone() -> None:
    torch.manual_seed(0)
    module, x = Blocks(regions=True), torch.randn(512, 256)
    real, fake = profile_module(module, x), profile_module(module, x, device="cpu")
    assert fake.curve == pytest.approx(real.curve, abs=0.1 * real.peak)


@pytest.mark.parametrize("device", ["meta", "gpu", "cuda:x", 1.5])
def test_a_bad_device_is_refused(device: Any) -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"is not allowed; give 'cuda', 'cuda:1' or 'cpu'"):
        dpx.search_plan(nn.Linear(64, 64), torch.ones(64, 64), device=device)


def test_the_meta_device_needs_to_know_what_for() -> None:
    with pytest.raises(dpx.PlanError, match='nothing can run; give device="cuda"'):
        dpx.search_plan(nn.Linear(64, 64, device="meta"), torch.ones(64, 64, device="meta"))


class Routed(nn.Module):
    """Rows (N, 8) to (N, 8), by two experts; on fakes their product wants numbers of fewer digits."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(
            rows, self.experts, offs=torch.tensor([len(rows) // 2, len(rows)], dtype=torch.int32)
        ).tanh()


def test_what_fakes_cannot_run_is_told_once_and_not_in_the_log_of_torch() -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    heard: list[str] = []
    hears = logging.Handler()
    hears.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(hears)
    try:
        with pytest.warns(UserWarning, match="rows"):
            profile_module(Routed(), torch.randn(96, 8), device="cpu")
    finally:
        log.removeHandler(hears)
    assert heard == []
    assert not log.filters
