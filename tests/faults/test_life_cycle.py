"""Cases 68 to 71 of the table of faults: runs after, beside and inside of other things."""

import asyncio
import copy
import gc
import pickle
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from lightning_dpx.replicas import ReplicaSet
from tests import programs
from tests.conftest import SIMULATED, Classifier, assert_equal, make_loader, make_trainer, run, seeded, strategy_in
from tests.test_parity import strip_rows

on_sim = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
REPOSITORY = Path(__file__).parents[2]


def dpx_on(devices: int = 2, execution: Any = "inline", **options: Any) -> dict[str, Any]:
    """Trainer options for replicas that really run."""
    return {"strategy": strategy_in(execution, **options), "devices": devices}


def fit(model: LightningModule, **options: Any) -> Any:
    trainer = make_trainer(**{"max_epochs": 1, **options})
    trainer.fit(model, make_loader(), make_loader())
    return trainer


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def program(text: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return programs.run("-W", "ignore", "-c", text, *arguments)


# ---- 68: one run after the other ----


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("reducer", ["auto", "colocate"])
def test_case_68_fit_twice_with_the_same_trainer_and_model_goes_on(reducer: str, execution: str) -> None:
    results = []
    for options in (dpx_on(3, execution, reducer=reducer), {}):
        model, trainer = seeded(optimizer="adam"), make_trainer(max_epochs=1, **options)
        for epochs in (1, 3):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(model, make_loader(), make_loader())
        results.append(state(model))
    assert_equal(*results)


class Fails(Classifier):
    """Once, where it is told to."""

    where = ""

    def fail(self, where: str) -> None:
        if where == Fails.where:
            Fails.where = ""
            raise LookupError("on purpose")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.global_rank == 1:
            self.fail("step")
        output = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 1:
            output["loss"].register_hook(lambda _: self.fail("backward"))
        return output

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1:
            self.fail("validation")
        return super().validation_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        self.fail("optimizer")
        super().optimizer_step(*args, **options)

    def on_train_epoch_end(self) -> None:
        self.fail("epoch end")


@pytest.mark.usefixtures("hardware")
@pytest.mark.filterwarnings("ignore:Found 5 module.s. in eval mode")
@pytest.mark.parametrize("where", ["step", "backward", "validation", "optimizer", "epoch end"])
@pytest.mark.parametrize("reducer", ["auto", "colocate"])
def test_case_68_the_same_trainer_fits_again_after_an_error(where: str, reducer: str, execution: str) -> None:
    results = []
    for options in (dpx_on(2, execution, reducer=reducer, verify="off"), {}):  # a rehearsal would fail in its place
        torch.manual_seed(0)
        model = Fails()
        trainer = make_trainer(max_epochs=1, **options)
        if options:
            Fails.where = where
            with pytest.raises(LookupError, match="on purpose"):
                trainer.fit(model, make_loader(), make_loader())
            assert Fails.where == ""
            left = [t.name for t in threading.enumerate() if t.name.startswith("dpx")]
            assert not left, "ended by the error"
            model.load_state_dict(seeded().state_dict())
            model.zero_grad()
        trainer.fit(model, make_loader(), make_loader())
        results.append(state(model))
    if where not in ("step", "backward", "optimizer"):
        return  # the epoch had ended, and the second fit had nothing left to do
    first, second = results
    assert first.keys() == second.keys()
    assert all(value.isfinite().all() for value in first.values())


@pytest.mark.usefixtures("hardware")
def test_case_68_evaluations_before_between_and_after_fits_are_those_of_one_device(execution: str) -> None:
    def seen(**options: Any) -> list[Any]:
        model, loader = seeded(norm=True), make_loader()
        trainer, results = make_trainer(max_epochs=1, **options), []
        for epochs in (0, 1, 2):
            trainer.fit_loop.max_epochs = epochs
            if epochs:
                trainer.fit(model, loader, loader)
            results += [trainer.validate(model, loader, verbose=False)[0]["val_loss"]]
            results += [trainer.test(model, loader, verbose=False)[0]["test_loss"]]
            results += [torch.cat(trainer.predict(model, loader)).cpu()]
        return results

    ours, theirs = seen(**dpx_on(1, execution)), seen()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(other))
    assert len(seen(**dpx_on(3, execution))) == 9


@pytest.mark.usefixtures("hardware")
def test_case_68_two_trainers_and_two_models_do_not_disturb_each_other(execution: str) -> None:
    """The steps of the second run happen within those of the first."""

    class Nested(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                fit(inner, **dpx_on(2, execution))
                module.inner_world = trainer.world_size

    inner, outer, plain = seeded(), seeded(), seeded()
    fit(outer, callbacks=[Nested()], **dpx_on(3, execution))
    fit(plain)
    assert_equal(state(inner), state(plain))
    assert_equal(state(outer), state(plain))
    assert outer.inner_world == 1


@pytest.mark.usefixtures("hardware")
@pytest.mark.filterwarnings("ignore:.*draws random numbers from a generator")
def test_case_68_two_fits_at_the_same_time_in_two_threads(execution: str) -> None:
    models, errors = [seeded(), seeded()], []
    begun = [threading.Event(), threading.Event()]

    class Waits(Callback):
        """While Lightning asks for loaders, it has its own ``DataLoader.__init__`` in place, for all threads."""

        def __init__(self, mine: int) -> None:
            self.mine = mine

        def on_train_start(self, *_: Any) -> None:
            begun[self.mine].set()
            assert begun[1 - self.mine].wait(60)

    def train(model: Classifier) -> None:
        try:
            mine = models.index(model)
            assert mine == 0 or begun[0].wait(60)
            fit(model, callbacks=[Waits(mine)], **dpx_on(2, execution))
        except BaseException as error:  # noqa: BLE001  told by the assertion
            errors.append(error)

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    plain = seeded()
    fit(plain)
    for model in models:
        assert_equal(state(model), state(plain))


class Breaks(Callback):
    """Fails where Lightning skips the teardown then; a batch ended just before."""

    def on_train_batch_end(self, *_: Any) -> None:
        raise LookupError("on purpose")

    def on_exception(self, *_: Any) -> None:
        raise OSError("no teardown")


@pytest.mark.parametrize("where", ["", "step", "optimizer", "epoch end"])
def test_case_68_a_fit_leaves_the_process_as_it_was(where: str, execution: str) -> None:
    """Also one that fails; ``rank_zero_only`` is one for the process."""

    def process() -> list[Any]:
        modes = torch.overrides._get_current_function_mode_stack()
        return [type(rank_zero_only.rank), rank_zero_only.rank, modes, gc.isenabled(), torch.get_num_threads()]

    before = process()
    torch.manual_seed(0)
    model = Fails()
    Fails.where = where
    # A step that was checked would run again on the whole batch, where this one does not fail.
    checks: dict[str, Any] = {"verify": "off"} if where == "step" else {}
    with pytest.raises(LookupError) if where else nullcontext():
        fit(model, **dpx_on(2, execution, **checks))
    assert process() == before


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "threads": ({"execution": "threads"}, {}),
    "shifts": ({"shifts": {"sim:0": "sim:4", "sim:1": "sim:5"}, "shift_activations": ["net.2"]}, {}),
    "batch norm": ({}, {"sync_batchnorm": True}),
    "plan": ({"memory_budget": "1GiB"}, {}),
    "colocate": ({"reducer": "colocate"}, {}),
}


def broken_off(kind: str) -> tuple[Classifier, Trainer]:
    """After a fit on two simulated devices that never reached its teardown; the weights are fresh again."""
    options, more = OPTIONS[kind]
    model = seeded(norm=True)
    trainer = make_trainer(
        strategy=dpx.DPXStrategy(**options), accelerator="sim", devices=2, max_epochs=1, callbacks=[Breaks()], **more
    )
    with pytest.raises(OSError, match="no teardown"):
        trainer.fit(model, make_loader(48), make_loader(48))
    del trainer.callbacks[[type(one) for one in trainer.callbacks].index(Breaks)]
    with torch.no_grad():
        for name, value in seeded(norm=True).state_dict().items():
            model.state_dict()[name].copy_(value)
    return model, trainer


@on_sim
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("how", ["the same trainer", "another strategy", "one device"])
def test_case_68_a_run_that_never_reached_its_teardown_leaves_nothing_that_the_next_one_minds(
    kind: str, how: str
) -> None:
    model, trainer = broken_off(kind)
    if how == "another strategy":
        trainer = make_trainer(strategy=dpx.DPXStrategy(), accelerator="sim", devices=3, max_epochs=1)
    elif how == "one device":
        trainer = make_trainer(max_epochs=1)
    trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_progress.current.ready + 1
    trainer.fit(model, make_loader(48), make_loader(48))
    if how == "one device":
        return  # nothing of ours has run that could clear away; it trained
    assert all(type(child).__module__.startswith(("torch", "tests")) for child in model.modules())
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in model.modules())
    assert "log" not in vars(model)
    copied = pickle.loads(pickle.dumps(model))
    assert_equal(state(copied), state(model))


@on_sim
@pytest.mark.parametrize("kind", ["shifts", "plan", "batch norm"])
def test_case_68_what_such_a_run_left_can_be_taken_off_by_hand(kind: str) -> None:
    model, _ = broken_off(kind)
    if kind == "shifts":
        dpx.unshift_activations(model)
    elif kind == "plan":
        dpx.remove_plan(model)
    plain = seeded(norm=True)
    copied = pickle.loads(pickle.dumps(model)).cpu()
    rows = torch.randn(4, 8)
    torch.testing.assert_close(copied.train().net(rows), plain.net(rows))


def leftovers() -> tuple[int, int, int, int]:
    gc.collect()
    everything = gc.get_objects()
    kinds = [sum(issubclass(type(one), kind) for one in everything) for kind in (ReplicaSet, Classifier, nn.Parameter)]
    return threading.active_count(), *kinds  # type: ignore[return-value]


@pytest.mark.usefixtures("hardware")
def test_case_68_a_dozen_fits_leave_no_threads_memory_or_hooks(execution: str, hardware: str) -> None:
    model = seeded()
    gc.collect()
    options: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 1}
    counts, sim = [], torch.get_device_module("sim") if hardware == "sim" else None
    for number in range(12):
        reducer = ("auto", "colocate")[number % 2]
        fit(model, **options, **dpx_on(3, execution, reducer=reducer))
        if number in (1, 11):
            counts.append((leftovers(), [sim.memory_allocated(index) for index in range(3)] if sim else []))
    assert counts[0] == counts[1]
    for child in model.modules():
        assert not child._forward_hooks
        assert not child._forward_pre_hooks
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert copy.deepcopy(model).state_dict().keys() == pickle.loads(pickle.dumps(model)).state_dict().keys()


# ---- 69: where fit is called ----


@pytest.mark.usefixtures("hardware")
def test_case_69_fit_in_another_thread_and_in_a_running_event_loop(execution: str) -> None:
    async def within() -> Classifier:
        model = seeded()
        fit(model, **dpx_on(2, execution))
        return model

    async def beside() -> Classifier:
        model = seeded()
        await asyncio.to_thread(fit, model, **dpx_on(2, execution))
        return model

    plain = seeded()
    fit(plain)
    for how in (within, beside):
        assert_equal(state(asyncio.run(how())), state(plain))


BEGIN = """
import os, sys, threading, time
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
import lightning_dpx as dpx

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(execution, kind=Module):
    torch.manual_seed(0)
    model, rows = kind(), torch.randn(53, 8)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 2}
    strategy = dpx.DPXStrategy(execution=execution)
    Trainer(strategy=strategy, devices=2, accelerator="cpu", **quiet).fit(model, DataLoader(rows, 16))
    return model
"""


def test_case_69_fit_in_a_child_that_was_forked_after_a_fit(execution: str) -> None:
    done = program(
        BEGIN + f"first = fit({execution!r})\n"
        "me = os.getpid()\n"
        "child = os.fork()\n"
        f"again = fit({execution!r})\n"
        "same = all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters()))\n"
        "os.write(1, f'{os.getpid() == me} {same};'.encode())\n"
        "if child: print('status', os.waitpid(child, 0)[1])\n"
    )
    assert "False True;" in done.stdout, done.stdout + done.stderr
    assert "True True;" in done.stdout, done.stdout + done.stderr
    assert "status 0" in done.stdout


def test_case_69_fit_in_a_child_that_was_forked_inside_a_step() -> None:
    """The child has none of its parent's worker threads; what it runs in the old trainer must not wait for them."""
    done = program(
        BEGIN + "class Forks(Module):\n"
        "    def on_train_batch_end(self, outputs, batch, batch_idx):\n"
        "        if batch_idx == 1 and self.trainer.current_epoch == 0 and (child := os.fork()):\n"
        "            print('status', os.waitpid(child, 0)[1], flush=True)\n"
        "me = os.getpid()\n"
        "fit('threads', Forks)\n"
        "print('parent ended' if os.getpid() == me else 'child ended', flush=True)\n"
    )
    assert "parent ended" in done.stdout, done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore:.*This process .* is multi-threaded, use of fork.*:DeprecationWarning")
def test_case_69_loaders_with_workers_feed_replicas_in_threads(execution: str) -> None:
    data = make_loader().dataset
    model, plain = seeded(), seeded()
    for each, options in ((model, dpx_on(2, execution)), (plain, {})):
        loader: DataLoader[Any] = DataLoader(data, 16, num_workers=1, persistent_workers=True)
        make_trainer(**options).fit(each, loader, make_loader())
    assert_equal(state(model), state(plain))


ENDS = {
    "a fit in a daemon thread": "threading.Thread(target=fit, args=(sys.argv[1], Slow), daemon=True).start()\n"
    "begun.wait()\nprint('main ends', flush=True)\n",
    "exit in a hook": "class Exits(Slow):\n"
    "    def on_train_batch_end(self, *_):\n        sys.exit(7)\n"
    "fit(sys.argv[1], Exits)\n",
    "exit in a step": "class Exits(Slow):\n"
    "    def training_step(self, *_):\n        sys.exit(7)\n"
    "fit(sys.argv[1], Exits)\n",
}


@pytest.mark.parametrize("how", ENDS)
def test_case_69_the_interpreter_ends_with_a_fit_running(how: str) -> None:
    execution = "threads"
    done = program(
        BEGIN + "begun = threading.Event()\n"
        "class Slow(Module):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        begun.set()\n"
        "        time.sleep(0.01)\n"
        "        return super().training_step(batch, batch_idx)\n" + ENDS[how],
        execution,
    )
    # CPython ends its daemon threads from within; one that is in torch at that moment takes the process with it.
    allowed = (0, -signal.SIGABRT) if "thread" in how else (7,)
    assert done.returncode in allowed, done.stdout + done.stderr


# ---- 70: options of the Trainer ----


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize(
    "options",
    [
        {"num_sanity_val_steps": 2},
        {"num_sanity_val_steps": -1},
        {"limit_train_batches": 0},
        {"limit_val_batches": 0},
        {"limit_train_batches": 2, "limit_val_batches": 1, "limit_predict_batches": 1},
        {"fast_dev_run": True},
        {"overfit_batches": 2},
        {"inference_mode": False},
        {"inference_mode": True, "num_sanity_val_steps": 1},
        {"max_time": {"days": 2}},
        {"max_steps": 3},
        {"max_steps": 0},
        {"val_check_interval": 2},
        {"check_val_every_n_epoch": 2},
        {"detect_anomaly": True},
        {"deterministic": True},
        {"reload_dataloaders_every_n_epochs": 1},
        {"profiler": "simple"},
        {"min_epochs": 2, "max_epochs": 3, "log_every_n_steps": 1},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
@pytest.mark.filterwarnings("ignore:.*You requested to overfit.*", "ignore:.*Trainer.overfit.*", "ignore:.*max_steps.*")
@pytest.mark.filterwarnings("ignore:.*is highly discouraged.*", "ignore:.*limit_train_batches.*")
def test_case_70_options_of_the_trainer_do_what_they_do_on_one_device(options: dict[str, Any], execution: str) -> None:
    ours = run(seeded(norm=False), **options, **dpx_on(3, execution))
    assert_equal(strip_rows(ours), strip_rows(run(seeded(norm=False), **options)))


@pytest.mark.usefixtures("hardware")
@pytest.mark.filterwarnings("ignore:.*barebones.*")
def test_case_70_barebones(execution: str) -> None:
    def trained(**options: Any) -> dict[str, torch.Tensor]:
        model = seeded()
        accelerator = "cpu" if "strategy" not in options else places()
        Trainer(barebones=True, max_epochs=1, accelerator=accelerator, **{"devices": 1, **options}).fit(
            model, make_loader(), make_loader()
        )
        return state(model)

    assert_equal(trained(**dpx_on(3, execution)), trained())


def places() -> str:
    from tests.conftest import places as of

    return of(1)[0].partition(":")[0]


@pytest.mark.usefixtures("hardware")
def test_case_70_max_time_stops_the_run(execution: str) -> None:
    trainer = fit(seeded(), max_epochs=10_000, max_time=timedelta(milliseconds=50), **dpx_on(2, execution))
    assert trainer.state.finished
    assert 0 < trainer.global_step < 10_000 * 4


# ---- 71: finders ----


class Tunable(Classifier):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.batch_size, self.lr = 2, 1e-3

    def train_dataloader(self) -> DataLoader[Any]:
        return make_loader(53, self.batch_size)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize(
    "finder",
    [
        lambda: BatchSizeFinder(mode="binsearch", max_trials=3, steps_per_trial=1),
        lambda: BatchSizeFinder(max_trials=2, steps_per_trial=2),
        lambda: LearningRateFinder(num_training_steps=15),
    ],
    ids=["binsearch", "power", "learning rate"],
)
@pytest.mark.parametrize("reducer", ["colocate"])
@pytest.mark.filterwarnings("ignore:.*epochs without.*")
def test_case_71_a_finder_leads_to_the_run_of_one_device(
    finder: Callable[[], Callback], reducer: str, tmp_path: Path
) -> None:
    execution = "threads"

    def trained(**options: Any) -> tuple[dict[str, torch.Tensor], int, float]:
        model = Tunable()
        trainer = make_trainer(max_epochs=1, callbacks=[finder()], default_root_dir=tmp_path, **options)
        trainer.fit(model)
        return state(model), model.batch_size, model.lr

    ours, theirs = trained(**dpx_on(2, execution, reducer=reducer)), trained()
    assert ours[1] == theirs[1]
    assert ours[2] == pytest.approx(theirs[2], rel=1e-3)
    assert_equal(ours[0], theirs[0])


@on_sim
@pytest.mark.filterwarnings("ignore:dpx. the activations on")  # the packs of gradients are larger than they
def test_case_71_a_batch_size_is_found_within_a_memory_budget(tmp_path: Path) -> None:
    """The trials go beyond the budget at some point, which is one of memory to the finder as well."""

    class Wide(Tunable):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 2048), nn.Tanh(), nn.Linear(2048, 3))

        def train_dataloader(self) -> DataLoader[Any]:
            return make_loader(8 * self.batch_size, self.batch_size)

        val_dataloader = train_dataloader

    gc.collect()
    dpx.simulate(2, memory="4MiB")
    try:
        strategy = dpx.DPXStrategy(memory_budget="2MiB", micro_batches=1)
        trainer = make_trainer(strategy=strategy, accelerator="sim", devices=2, default_root_dir=tmp_path)
        model = Wide()
        size = Tuner(trainer).scale_batch_size(model, max_trials=12, steps_per_trial=2, init_val=4)
        assert 4 < size < 4 * 2**12
    finally:
        del trainer, strategy, model
        gc.collect()
        dpx.simulate(8)
