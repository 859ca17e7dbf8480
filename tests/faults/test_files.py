"""Cases 63 to 67 of the table of faults: checkpoint files and plan files."""

import contextlib
import functools
import http.server
import pickle
import signal
import subprocess
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.simulate.build import load_library
from tests import programs
from tests.conftest import SIMULATED, Classifier, assert_equal, make_loader, make_trainer, seeded

on_sim = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
REPOSITORY = Path(__file__).parents[2]


def dpx_on(devices: int = 2, execution: Any = "inline", **options: Any) -> dict[str, Any]:
    """Trainer options for replicas that really run."""
    return {"strategy": dpx.DPXStrategy(execution=execution, **options), "devices": devices}


def fit(model: LightningModule, path: Path | str | None = None, **options: Any) -> Any:
    trainer = make_trainer(**options)
    trainer.fit(model, make_loader(), make_loader(), ckpt_path=path)
    return trainer


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def program(text: str, *arguments: object, **more: str) -> "subprocess.CompletedProcess[str]":
    return programs.run("-W", "ignore", "-c", text, *arguments, environment=more)


SAVES = """
import os, signal, sys, threading
from pathlib import Path
import torch
from tests.conftest import Classifier, make_loader, make_trainer
import lightning_dpx as dpx

class Large(Classifier):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.zeros(size))

path, how = Path(sys.argv[1]), sys.argv[2]
size = 2**23 if how == "kill" else 2**20  # a file that is long being written; one that is larger than the disk
trainer = make_trainer(strategy=dpx.DPXStrategy(execution="inline"), devices=2, max_epochs=1)
trainer.fit(Large(), make_loader(), make_loader())
trainer.save_checkpoint(path)
print("first saved", flush=True)
size, inode = path.stat().st_size, path.stat().st_ino

def kill_in_the_middle():
    while True:  # as soon as the file that has the name is not whole
        try:
            if path.stat().st_size < size:
                os.kill(os.getpid(), signal.SIGKILL)
        except FileNotFoundError:
            pass

if how == "kill":
    threading.Thread(target=kill_in_the_middle, daemon=True).start()
else:
    import resource
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    try:
        trainer.save_checkpoint(path)
    except OSError as error:
        print("refused:", error, flush=True)
    sys.exit()
trainer.save_checkpoint(path)
"""


@pytest.mark.parametrize("temporary", ["beside", "on another filesystem"])
def test_case_63_a_save_that_is_killed_leaves_a_file_that_loads(temporary: str, tmp_path: Path) -> None:
    """fsspec writes a file in TMPDIR and copies it, where that is another filesystem, over the old one."""
    elsewhere = Path("/dev/shm")
    if temporary != "beside" and (not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev):
        pytest.skip("there is no other filesystem")
    path = tmp_path / "last.ckpt"
    done = program(SAVES, path, "kill", TMPDIR=str(tmp_path if temporary == "beside" else elsewhere))
    assert "first saved" in done.stdout, done.stderr
    left = [file for file in elsewhere.glob("tmp*") if file.stat().st_size > 2**20] if elsewhere.is_dir() else []
    for file in left:
        file.unlink()
    assert torch.load(path, weights_only=True)["state_dict"].keys() >= Classifier().state_dict().keys()


def test_case_63_a_full_disk_is_an_error_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    done = program(SAVES, path, "full", TMPDIR=str(tmp_path))
    assert "refused: " in done.stdout, done.stderr
    assert torch.load(path, weights_only=True)["state_dict"].keys() >= Classifier().state_dict().keys()
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"], "no leftovers"


@contextlib.contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """A disk that is full beyond ``size`` bytes of a file."""
    resource = pytest.importorskip("resource")
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


class Heavy(Classifier):
    """Its checkpoint file takes 2 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(2**19))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_case_63_a_full_disk_is_told_with_names_and_sizes(asynchronous: bool, tmp_path: Path) -> None:
    plugins = [AsyncCheckpointIO()] if asynchronous else []
    trainer, path = fit(Heavy(), max_epochs=1, plugins=plugins, **dpx_on()), tmp_path / "last.ckpt"

    def save() -> None:
        trainer.save_checkpoint(path)
        trainer.strategy.checkpoint_io.teardown()  # waits for what saves beside training

    save()
    old = path.read_bytes()
    with files_no_larger_than(2**20), pytest.raises(OSError, match="File too large") as caught:
        save()
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    assert any(
        f"While saving {path}: it takes 2.0 MiB" in note and f"{path} is what it was" in note
        for note in caught.value.__notes__
    )


@pytest.mark.parametrize("asked", ["TORCH_EXTENSIONS_DIR", "HOME"])
def test_simulated_devices_with_nowhere_to_keep_their_backend(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(asked, str(tmp_path / "file"))
    with pytest.raises(dpx.UnsupportedError, match="set TORCH_EXTENSIONS_DIR to a folder that can"):
        load_library()


class Holding(TorchCheckpointIO):
    """Writes only once the next step is over."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        assert self.go_on.wait(60)
        super().save_checkpoint(*args, **kwargs)


class SavesInTheMiddle(Callback):
    def __init__(self, path: Path, io: Holding) -> None:
        self.path, self.io = path, io
        self.expected: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            self.expected = state(module)
            trainer.save_checkpoint(self.path)
        elif trainer.global_step == 5:
            self.io.go_on.set()


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("reducer", ["auto", "colocate"])
def test_case_64_an_asynchronous_save_holds_the_state_of_one_step(reducer: str, execution: str, tmp_path: Path) -> None:
    held = Holding()
    saver = SavesInTheMiddle(tmp_path / "model.ckpt", held)
    options = dpx_on(execution=execution, reducer=reducer)
    options["strategy"].checkpoint_io = AsyncCheckpointIO(held)
    fit(seeded(optimizer="adam"), callbacks=[saver], **options)
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert saved["global_step"] == 3
    assert_equal({k: v.cpu() for k, v in saved["state_dict"].items()}, saver.expected, bitwise=True)
    assert {float(value["step"]) for value in saved["optimizer_states"][0]["state"].values()} == {3.0}


@on_sim
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"devices": 4, "reducer": "colocate"}, {"devices": 2, "reducer": "hierarchical"}),
        ({"devices": 1}, {"devices": 3, "reducer": "naive"}),
        ({"devices": 2, "memory_budget": "1GiB"}, {"devices": 3}),
        ({"devices": 2}, {"devices": 1, "shifts": {"sim:0": "sim:5"}, "shift_activations": ["net.0"]}),
        ({"devices": 3, "workload": [3.0, 2.0, 1.0]}, {"devices": 2, "workload": "auto"}),
    ],
    ids=["fewer and other owners", "more", "without the plan", "with shifts", "other workload"],
)
def test_case_65_a_run_resumes_with_other_devices_reducers_plans_and_shifts(
    first: dict[str, Any], then: dict[str, Any], tmp_path: Path
) -> None:
    trainer = fit(seeded(optimizer="adam"), max_epochs=1, accelerator="sim", **dpx_on(**first))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, straight = seeded(optimizer="adam"), seeded(optimizer="adam")
    trainer = fit(resumed, tmp_path / "half.ckpt", accelerator="sim", max_epochs=3, **dpx_on(**then))
    fit(straight, max_epochs=3)
    assert (trainer.current_epoch, trainer.global_step) == (3, 12)
    assert_equal(state(resumed), state(straight))


def test_case_65_a_file_needs_nothing_of_this_package(tmp_path: Path) -> None:
    trainer = fit(seeded(optimizer="adam"), max_epochs=1, precision="bf16-mixed", **dpx_on(3))
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    done = program(
        "import sys, torch\n"
        "hidden = [name for name in sys.modules if name.partition('.')[0] in ('lightning_dpx', 'tests')]\n"
        "sys.modules.update(dict.fromkeys(['lightning_dpx', *hidden]))\n"
        "content = torch.load(sys.argv[1], weights_only=True)\n"
        "assert 'dpx' not in repr(content).lower(), content\n"
        "print(sorted(content['state_dict']))",
        tmp_path / "model.ckpt",
    )
    assert "net.0.weight" in done.stdout, done.stderr


class OwnPrecision(MixedPrecision):
    """A plugin of the user's own, under another class name."""


@on_sim
@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
@pytest.mark.parametrize(("first", "then"), [("16-mixed", OwnPrecision), (OwnPrecision, "16-mixed")])
def test_case_66_the_loss_scale_survives_a_subclass_of_the_precision(first: Any, then: Any, tmp_path: Path) -> None:
    def options(precision: Any) -> dict[str, Any]:
        own = (
            {}
            if isinstance(precision, str)
            else {"plugins": [precision("16-mixed", "sim", torch.amp.GradScaler("sim"))]}
        )
        return {"accelerator": "sim", "precision": precision, **dpx_on()} if not own else {
            "accelerator": "sim", **own, **dpx_on()}  # fmt: skip

    trainer = make_trainer(max_epochs=1, **options(first))
    trainer.fit(seeded(), make_loader(), make_loader())
    trainer.precision_plugin.scaler.update(512.0)
    trainer.save_checkpoint(tmp_path / "scaled.ckpt")
    scales = []

    class Notes(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            scales.append(trainer.precision_plugin.scaler.get_scale())

    fit(seeded(), tmp_path / "scaled.ckpt", max_epochs=2, callbacks=[Notes()], **options(then))
    assert scales == [512.0]


@pytest.mark.parametrize("prefix", ["module.", "net."])
def test_case_66_files_with_other_names_are_refused_by_key(prefix: str, tmp_path: Path) -> None:
    trainer = fit(seeded(), max_epochs=1, **dpx_on())
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    content = torch.load(tmp_path / "model.ckpt", weights_only=True)
    content["state_dict"] = {prefix + name: value for name, value in content["state_dict"].items()}
    torch.save(content, tmp_path / "other.ckpt")
    model = seeded()
    with pytest.raises(RuntimeError, match=rf"{prefix}net\.0\.weight"):
        fit(model, tmp_path / "other.ckpt", max_epochs=2, **dpx_on())
    fit(model, max_epochs=1, **dpx_on())


@on_sim
def test_case_66_files_of_plain_torch_load_into_a_spread_run(tmp_path: Path) -> None:
    plain = seeded(optimizer="adam")
    fit(plain, max_epochs=1)
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    model = Classifier(optimizer="adam")
    model.load_state_dict(torch.load(tmp_path / "plain.pt", weights_only=True))
    fit(model, max_epochs=1, accelerator="sim", **dpx_on(3, reducer="colocate"))
    fit(plain, max_epochs=1)
    assert_equal(state(model), state(plain))


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: Any) -> Iterator[str]:
    """The address of ``tmp_path`` on this machine."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("where", ["file", "address"])
def test_case_67_a_checkpoint_file_with_code_is_refused_and_runs_nothing(
    where: str, tmp_path: Path, served: str
) -> None:
    trainer = fit(seeded(), max_epochs=1, **dpx_on())
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    content = torch.load(tmp_path / "model.ckpt", weights_only=True)
    torch.save({**content, "extra": Bomb(tmp_path / "exploded")}, tmp_path / "bomb.ckpt")
    path = str(tmp_path / "bomb.ckpt") if where == "file" else f"{served}/bomb.ckpt"
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        fit(seeded(), path, max_epochs=2, **dpx_on())
    assert not (tmp_path / "exploded").exists()


DAMAGED = (RuntimeError, EOFError, OSError, pickle.UnpicklingError, ValueError)


def bytes_of_a_weight(module: LightningModule) -> bytes:
    """What a weight looks like in a file."""
    return module.get_parameter("net.0.weight").detach().cpu().numpy().tobytes()


@pytest.mark.parametrize("damage", ["truncated", "garbled", "empty", "text"])
def test_case_67_a_damaged_checkpoint_file_is_refused_and_the_model_stays(damage: str, tmp_path: Path) -> None:
    trainer = fit(seeded(), max_epochs=1, **dpx_on())
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    content = (tmp_path / "model.ckpt").read_bytes()
    weights = bytes_of_a_weight(trainer.lightning_module)
    assert weights in content
    damaged = {
        "truncated": content[: len(content) // 2],
        "garbled": content.replace(weights, b"\xff" * len(weights)),
        "empty": b"",
        "text": b"not a checkpoint",
    }[damage]
    (tmp_path / "damaged.ckpt").write_bytes(damaged)
    model = seeded()
    with pytest.raises(DAMAGED) as error:
        fit(model, tmp_path / "damaged.ckpt", max_epochs=2, **dpx_on())
    told = [str(error.value), *getattr(error.value, "__notes__", [])]
    assert any("damaged.ckpt" in text for text in told), told
    assert_equal(state(model), state(seeded()), bitwise=True)


@contextlib.contextmanager
def modest_memory() -> Iterator[None]:
    """What runs in here never holds more than 32 MiB of Python objects."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


HEAD = (
    "version: 1\nmodel: M\nfingerprint: f\nplanner: auto\nbudget: null\nunplanned_peak: 5\npeak: 4\nsaved_bytes: 3\n"
    "recompute_share: 0.5\nleast_share: null\nchecksum: x\n"
)
ROW = "{name: 'a:1', operator: o, num_bytes: 1, seconds: 0.5, action: keep}"


def lots(levels: int) -> str:
    """A few lines that stand for 10 ** levels items."""
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch {tmp}/exploded']",
        HEAD + "decisions: !!python/object/new:os.system ['touch {tmp}/exploded']",
        HEAD + "decisions:\n  - " + ROW.replace("action", "__class__: os.system, action"),
        HEAD + "decisions:\n  - " + ROW.replace("num_bytes: 1", "num_bytes: -1"),
        HEAD + "decisions:\n  - " + ROW.replace("num_bytes: 1", "num_bytes: true"),
        HEAD + "decisions:\n  - " + ROW.replace("seconds: 0.5", "seconds: .nan"),
        HEAD + "decisions:\n  - " + ROW.replace("seconds: 0.5", "seconds: -.inf"),
        HEAD + "decisions:\n  - " + ROW.replace("'a:1'", "[a]"),
        HEAD.replace("peak: 5", "peak: -5") + "decisions: []",
        HEAD.replace("share: 0.5", "share: .nan") + "decisions: []",
        HEAD + "decisions:\n  - " + ROW + "\ndecisions: []",
        HEAD + "model: Other\ndecisions: []",
        HEAD + "decisions:\n  - " + ROW.replace("action: keep", "action: recompute, action: keep"),
        lots(7),
        "version: 1\n" + lots(7) + "\ndecisions: [*l6]",
        HEAD + lots(7) + "\ndecisions: [*l6]",
        "[" * 500 + "]" * 500,
        "version: " + "9" * 5000,
        "\x00",
        "",
        "- just\n- a list",
    ],
    ids=[
        "code", "nested code", "class", "negative bytes", "true bytes", "nan", "infinity", "name", "negative peak",
        "nan share", "decisions twice", "key twice", "action twice", "laughs", "laughs in a version", "laughs as a row",
        "deep", "long number", "zero byte", "empty", "list",
    ],
)  # fmt: skip
def test_case_67_a_plan_file_that_is_none_is_refused_by_its_path(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text.replace("{tmp}", str(tmp_path)))
    with modest_memory(), pytest.raises(dpx.PlanError, match=r"plan\.yaml") as error:
        dpx.MemoryPlan.load(path)
    assert len(str(error.value)) < 2000
    assert not (tmp_path / "exploded").exists()


def test_case_67_a_plan_file_of_many_megabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    with path.open("wb") as file:
        file.truncate(2**28)
    with modest_memory(), pytest.raises(dpx.PlanError, match=r"plan\.yaml"):
        dpx.MemoryPlan.load(path)


def test_case_67_a_plan_whose_names_lead_elsewhere_is_refused(tmp_path: Path) -> None:
    module, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(64, 64)
    dpx.search_plan(module, x).save(tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    for name in ("../../etc:1", "__class__:1", "1.forward:1"):
        (tmp_path / "other.yaml").write_text(text.replace("'1:1'", f"'{name}'"))
        with pytest.raises(dpx.PlanError, match="has no module"):
            dpx.apply_plan(module, dpx.MemoryPlan.load(tmp_path / "other.yaml"))


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from lightning_dpx.lightning.checkpoint_io import AtomicCheckpointIO

path, chance, files = Path(sys.argv[1]), random.Random(11), AtomicCheckpointIO()
files.save_checkpoint({"number": 0, "weight": torch.zeros(2**20)}, path)
loaded = 0
for turn in range(40):
    child = os.fork()
    if child == 0:
        while True:
            loaded += 1
            files.save_checkpoint({"number": loaded, "weight": torch.full((2**20,), float(loaded))}, path)
    time.sleep(chance.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = files.load_checkpoint(path)
    assert found["number"] >= loaded, "an old file came back"
    assert (found["weight"] == found["number"]).all(), "half a file"
    loaded = found["number"]
files.save_checkpoint({"number": 0}, path)
print("loaded 40 of 40, the last had number", loaded, "left over", [p.name for p in path.parent.iterdir() if p != path])
"""


def test_case_63_forty_kills_at_random_moments_leave_forty_files_that_load(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    done = program(KILLS, folder / "last.ckpt", TMPDIR="/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path))
    assert "loaded 40 of 40" in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith("left over []"), done.stdout
