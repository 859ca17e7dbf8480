"""Shared models, data and checks. Every test must leave the process as it found it."""

import gc
import hashlib
import importlib.metadata
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # several workers share the cores; before torch looks
    os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.setdefault("LIGHTNING_DPX_TIMING", "quick")  # plans of many small models; what is timed long says so

# Beside simulated devices, real ones are hidden, or accelerator="auto" would mean other hardware on every machine.
if os.environ.get("DPX_TESTS_SIMULATE") != "0":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # What torch for AMD's reads first, where a job on a cluster has set it.
    os.environ["HIP_VISIBLE_DEVICES"] = ""

if os.environ.get("LIGHTNING_DPX_PACKAGE") == "pytorch_lightning":
    from tests import lightning_alias

    lightning_alias.install()

import pytest
import torch
from lightning.fabric.utilities import registry
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.devices import num_usable_cpus
from lightning_dpx.memory.execute.recipes import OWN_RECIPES, RECIPES
from lightning_dpx.memory.plan.problem import PLANNERS
from lightning_dpx.reducers import REDUCERS
from lightning_dpx.simulate.build import cached_library
from tests.pairs import keep_every_pair

# Every Trainer asks all installed packages for callbacks, which reads a hundred files.
registry.entry_points = cache(importlib.metadata.entry_points)


NUM_SIMULATED = 8  # devices
_ON_REAL_DEVICES = os.environ.get("DPX_TESTS_SIMULATE") == "0"


def _simulate() -> str:
    """Makes simulated devices, before the first backward of the process; says what is missing, if anything is."""
    if _ON_REAL_DEVICES:
        return "DPX_TESTS_SIMULATE=0"  # beside a real device torch would take simulated ones for the accelerator
    try:
        dpx.simulate(NUM_SIMULATED)
    except dpx.UnsupportedError as missing:
        return str(missing)
    return ""


SIMULATED = _simulate()
_COMPILED = cached_library().parent


def sim_device(index: int) -> torch.device:
    """A simulated device by number; without any, a name for tests that are skipped."""
    return torch.device("meta") if SIMULATED else torch.device("sim", index)


_UNNOTICED = 2**15  # bytes that a test may leave behind: the traceback of an expected error, say
_ENDS_WITHIN = 60.0  # seconds: a worker that was told to end, however busy the machine is
_MANY_MODULES = 200
_MANY_OBJECTS = 10_000
_num_modules = 0  # when objects were last left out of collections
_hardware = "cpu"  # what the replicas of the running test live on


def pytest_report_header() -> str:
    """What the tests run on."""
    if _ON_REAL_DEVICES:
        return "devices: real ones, none simulated"
    return "devices: simulated; GPUs are hidden, DPX_TESTS_SIMULATE=0 pytest -m gpu runs what needs one"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of what only the host does are not run on simulated devices; some never run beside each other."""
    kept: list[pytest.Item] = []
    for item in items:
        for alone in ("gpu", "processes"):
            if item.get_closest_marker(alone) and config.pluginmanager.hasplugin("xdist"):
                item.add_marker(pytest.mark.xdist_group(alone))
        hardware = getattr(item, "callspec", None) and item.callspec.params.get("hardware")
        if not (hardware == "sim" and item.get_closest_marker("host")):
            kept.append(item)
    keep_every_pair(kept)
    items[:] = kept


@pytest.hookimpl(optionalhook=True)  # xdist may be turned off
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: one of them waits most of the time for processes that its tests have started."""
    return num_usable_cpus() + 1


def pytest_collection_finish(session: pytest.Session) -> None:
    """The half million objects that imports and collection have made are left out of every collection of garbage.

    Tests and the package ask for hundreds of those, and each took a third of a second.
    """
    _leave_out_of_collections()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What earlier tests have imported or cached is left out, too: transformers alone makes 200,000 objects."""
    if len(sys.modules) > _num_modules + _MANY_MODULES:
        _leave_out_of_collections()
    elif len(gc.get_objects()) > _MANY_OBJECTS:
        gc.collect()
        gc.freeze()  # what is alive between tests is alive for long
    return (yield)


def _leave_out_of_collections() -> None:
    """Objects that are alive now are not looked at again; what earlier ones have become garbage meanwhile goes."""
    global _num_modules
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    _num_modules = len(sys.modules)


@pytest.fixture(params=["cpu", "sim"])
def hardware(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with replicas on the host and on simulated devices; the single device is the host's."""
    global _hardware
    if request.param == "sim" and SIMULATED:
        pytest.skip(SIMULATED)
    _hardware = request.param
    yield request.param
    _hardware = "cpu"


class MakesParametersAnew(nn.Linear):
    """As containers of parameters that clone what they hold: the memo of a copy is passed by."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "MakesParametersAnew":
        copied = MakesParametersAnew(self.in_features, self.out_features)
        copied.load_state_dict(self.state_dict())
        return copied


class StepsByHand(LightningModule):
    """Put before a class, it optimizes by hand what that class's steps return."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        outputs = super().training_step(batch, batch_idx)
        self.manual_backward(outputs["loss"] if isinstance(outputs, dict) else outputs)
        optimizer.step()


def places(num_replicas: int) -> list[str]:
    """A device for every replica."""
    return [_hardware if _hardware == "cpu" else f"{_hardware}:{index}" for index in range(num_replicas)]


@pytest.fixture(autouse=True)
def _eight_simulated_devices() -> None:
    """Commands that another test has run in this process may have simulated more of them."""
    if not SIMULATED and torch.get_device_module("sim").device_count() != NUM_SIMULATED:
        dpx.simulate(NUM_SIMULATED)


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this session's tests keep what a user's run keeps in the user's own folder."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(_cache_folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins with an empty cache, as the first run of a user does; or with that of its file.

    Tests marked ``shares_plans`` are about what comes after planning: the same step is planned once for all of them.
    """
    is_shared = request.node.get_closest_marker("shares_plans") is not None
    owner = request.node.nodeid.partition("::")[0] if is_shared else request.node.nodeid
    name = hashlib.sha256(owner.encode()).hexdigest()[:16]
    monkeypatch.setenv("XDG_CACHE_HOME", str(_cache_folder / name))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(_COMPILED))  # programs need not compile the simulated devices anew


def _new_workers(known: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in known and thread.name.startswith("dpx")]


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    threads, intra_op, held = set(threading.enumerate()), torch.get_num_threads(), simulated_bytes()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)  # Trainer(deterministic=True) leaves them on
    assert torch.get_default_dtype() == torch.float32
    assert not runs_eagerly(), "torch.compile is turned off for every test that follows"
    left = _new_workers(threads)
    if left:
        gc.collect()  # a group that was not closed ends its workers when it goes, and it may be in a reference cycle
        for thread in left:
            thread.join(_ENDS_WITHIN)
    assert not _new_workers(threads), f"worker threads left running: {[thread.name for thread in left]}"
    assert torch.get_num_threads() == intra_op
    if simulated_bytes() - held > _UNNOTICED:
        gc.collect()  # a trainer is in reference cycles; this takes too long to do it every time
        deadline = time.monotonic() + _ENDS_WITHIN
        while simulated_bytes() - held > _UNNOTICED and time.monotonic() < deadline:
            time.sleep(0.05)  # a thread of autograd's lets go of its last gradients when it is its turn again
            gc.collect()
        left_bytes = simulated_bytes() - held
        assert left_bytes <= _UNNOTICED, (
            f"{left_bytes} bytes left on simulated devices: does a hook hold its own graph? {_holders()}"
        )


def _holders() -> list[str]:
    """What still refers to large tensors on simulated devices."""
    found = []
    for tensor in gc.get_objects():
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "sim" and tensor.nbytes > 1000:
            kinds = [type(holder).__name__ for holder in gc.get_referrers(tensor)]
            found.append(f"{list(tensor.shape)} on {tensor.device} held by {kinds}")
    return found[:10]


def runs_eagerly() -> bool:
    """Whether compiled code runs as it was written from here on."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and dynamo._stance.stance != "default"


def simulated_bytes() -> int:
    """What is allocated on all simulated devices."""
    if SIMULATED:
        return 0
    module = torch.get_device_module("sim")
    return sum(module.memory_allocated(index) for index in range(module.device_count()))


@pytest.fixture
def sim() -> Iterator[Any]:
    """``torch.sim`` with eight devices without limits, also afterwards; as empty as other tests have left them."""
    if SIMULATED:
        pytest.skip(SIMULATED)
    gc.collect()
    dpx.simulate(8)
    module = torch.get_device_module("sim")
    for device in range(8):
        module.reset_peak_memory_stats(device)
    yield module
    dpx.simulate(8)


def simulate_room(*room: int) -> None:
    """Simulated devices with so many bytes each beyond what other tests have left there."""
    gc.collect()
    dpx.simulate(8)
    module = torch.get_device_module("sim")
    dpx.simulate(len(room), memory=[size + module.memory_allocated(index) for index, size in enumerate(room)])


class Classifier(LightningModule):
    """Rows (B, 8) to logits (B, 3)."""

    def __init__(self, optimizer: str = "sgd", norm: bool = False) -> None:
        super().__init__()
        middle = [nn.BatchNorm1d(16)] if norm else []
        self.net = nn.Sequential(nn.Linear(8, 16), *middle, nn.Tanh(), nn.Linear(16, 3))
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows, labels = batch
        loss = F.cross_entropy(self.net(rows), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"rows": float(len(rows)), "largest": rows.max()}, reduce_fx="max", on_step=False, on_epoch=True)
        return {"loss": loss, "logits": self.net(rows).detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            # eps large enough that rounding in a tiny gradient is not blown up to a step of full size
            return torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-4)
        if self.optimizer == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def strategy_in(execution: str, **options: Any) -> dpx.DPXStrategy:
    """For tests that are not about ``verify``: steps are checked in line, and not once more in threads.

    A check takes as long as all the rest of a short run.
    """
    verify = "off" if execution == "threads" else "warn"
    return dpx.DPXStrategy(**{"verify": verify, "execution": execution, **options})


def make_loader(num_rows: int = 53, batch_size: int = 16) -> DataLoader[Any]:
    """53 rows in batches of 16: the last batch holds 5."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(num_rows, 8, generator=generator)
    return DataLoader(TensorDataset(rows, torch.randint(3, (num_rows,), generator=generator)), batch_size)


def make_trainer(**options: Any) -> Trainer:
    """A quiet trainer for two epochs, on the CPU without a strategy."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    accelerator = _hardware if "strategy" in options else "cpu"
    defaults = {"accelerator": accelerator, "devices": 1, "max_epochs": 2, "enable_model_summary": False, **quiet}
    return Trainer(**{**defaults, **options})


def run(model: LightningModule, loader: DataLoader[Any] | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """Everything a user can see of a run: weights, buffers, logged values and predictions, by name."""
    loader, trainer = loader or make_loader(), make_trainer(**options)
    trainer.fit(model, loader, loader)
    seen = {**model.state_dict(), **{f"logged/{k}": torch.as_tensor(v) for k, v in trainer.callback_metrics.items()}}
    seen["predictions"] = torch.cat(trainer.predict(model, loader))
    return {name: value.detach().cpu().clone() for name, value in seen.items()}


def seeded(**options: Any) -> Classifier:
    """The same initial weights every time."""
    torch.manual_seed(0)
    return Classifier(**options)


ADDITIONS = 2 * 53 * 16  # behind a weight of Classifier: two epochs of 53 rows through a layer of width 16
SMALLEST_SCALE = 0.1  # what is added: gradients of about 1 at a learning rate of 0.1, even where the sum is next to 0


def rounding(values: torch.Tensor, additions: int = ADDITIONS) -> float:
    """How far ``values`` may be from the same sums in another order, which another processor adds up in.

    Every addition rounds by up to half a unit in the last place of what is added. The errors of n additions grow as a
    random walk does, with the root of n; four standard deviations are left to the worst of many values.

    Args:
        values: Of a floating dtype; the largest one says how large what was added is.
        additions: How many lie behind each value.
    """
    finite = values[values.isfinite()]
    largest = max(SMALLEST_SCALE, float(finite.abs().max()) if finite.numel() else 0.0)
    return 4 * math.sqrt(additions) * torch.finfo(values.dtype).eps * largest


def assert_equal(
    ours: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
    *,
    bitwise: bool = False,
    additions: int = ADDITIONS,
) -> None:
    """Same names, dtypes and values, but for the order of ``additions`` (see :func:`rounding`), or bit by bit.

    A difference of meaning (a row too many, a weight of 1/3 instead of 5/16) is thousands of times as large. Float64
    (``precision="64-true"``) is the stricter test, by nine digits, where nothing speaks for float32.
    """
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        rounded = value.dtype in (torch.float32, torch.float64) and not bitwise
        tolerance = rounding(value, additions) if rounded else 0.0
        torch.testing.assert_close(
            ours[name], value, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture
def own_registries() -> Iterator[None]:
    """What the test registers, under names that other tests may use as well, is gone afterwards."""
    before = [set(kind) for kind in (REDUCERS, PLANNERS)]
    recipes, own = dict(RECIPES), dict(OWN_RECIPES)
    yield
    for kind, names in zip((REDUCERS, PLANNERS), before, strict=True):
        for name in set(kind) - names:
            kind.unregister(name)
    for kept, those in ((RECIPES, recipes), (OWN_RECIPES, own)):
        kept.clear()
        kept.update(those)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Python's collector of garbage rests: what goes in a test goes at its moment, and is the test's own."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """Nothing is compiled before the test, and nothing after it."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# Of tests that compile.
COMPILES = [
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo looks at it
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]


@pytest.fixture(params=["inline", "threads"])
def execution(request: pytest.FixtureRequest) -> str:
    return request.param


__all__ = ["SIMULATED", "Classifier", "assert_equal", "dpx", "make_loader", "make_trainer", "places", "run", "seeded"]
