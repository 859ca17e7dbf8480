"""Cases 1 to 18 of the fault table: what goes wrong while a step runs."""

import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from lightning_dpx.reducers.naive import NaiveReducer
from lightning_dpx.simulate import simulate
from tests import programs
from tests.conftest import SIMULATED, Classifier, assert_equal, make_loader, make_trainer, places
from tests.lightning.processes.test_processes import finish
from tests.programs import free_port

Fault = Callable[[], None]


class OddError(Exception):
    """Cannot be rebuilt from a message."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(code)
        self.why = why


class Falsy(Exception):  # noqa: N818
    """Counts as false."""

    def __len__(self) -> int:
        return 0


class Stop(BaseException):
    """No Exception."""


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, fault: Fault) -> torch.Tensor:
        ctx.fault = fault
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.fault()
        return grads[0], None


class Part(nn.Module):
    """A layer with running statistics, which calls ``hook`` in one phase of a pass."""

    def __init__(self, phase: str = "") -> None:
        super().__init__()
        self.linear, self.norm, self.phase = nn.Linear(8, 8), nn.BatchNorm1d(8), phase
        self.fault: Fault | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.linear(rows))
        if self.fault is None or self.phase.endswith("hook"):
            return hidden
        if self.phase == "forward":
            self.fault()
        return _FailsInBackward.apply(hidden, self.fault) if self.phase == "backward" else hidden


class Faulty(LightningModule):
    """Replicas ``which`` raise ``error`` in step 1, in the middle of the net, in one phase of it.

    Args:
        error: Makes what is raised, of a text.
        which: Replicas.
        phase: "forward", "backward", "forward hook", "backward hook" or "parameter hook".
    """

    def __init__(
        self, error: Callable[[str], BaseException] = LookupError, which: tuple[int, ...] = (), phase: str = "forward"
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Sequential(Part(phase), nn.ReLU()), nn.Linear(8, 3))
        self.error, self.which, self.phase = error, which, phase
        self.before: dict[str, torch.Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        part, rank = self.net[2][0], self.global_rank
        handle = None
        part.fault = None
        if batch_idx == 1 and rank in self.which:
            part.fault = lambda: self.fail(rank)
            if self.phase == "forward hook":
                handle = part.norm.register_forward_hook(lambda *_: self.fail(rank))
            elif self.phase == "backward hook":
                part.norm.register_full_backward_hook(lambda *_: self.fail(rank))
            elif self.phase == "parameter hook":
                part.norm.weight.register_hook(lambda _: self.fail(rank))
        try:
            return F.cross_entropy(self.net(batch[0]), batch[1])
        finally:
            part.fault = None
            if handle is not None:
                handle.remove()

    def fail(self, rank: int) -> None:
        raise self.error(f"of replica {rank}")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.before = {name: value.detach().clone() for name, value in self.state_dict().items()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Aftermath(Callback):
    """What the callbacks of a run see of its end."""

    def __init__(self) -> None:
        self.seen: list[int] = []  # ids: an error leads to frames and graphs, and a cycle through those stays for good
        self.kinds: list[type] = []
        self.gradients: list[torch.Tensor] = []

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.seen.append(id(exception))
        self.kinds.append(type(exception))
        self.gradients = [p.grad for part in trainer.strategy.replica_modules for p in part.parameters()]


def fail(model: LightningModule, execution: str, expected: Any, devices: int = 3, **options: Any) -> Any:
    """The error of a fit, and what its callbacks saw."""
    after = Aftermath()
    strategy = options.pop("strategy", None) or dpx.DPXStrategy(verify="off", execution=execution)
    trainer = make_trainer(strategy=strategy, devices=devices, max_epochs=1, callbacks=[after], **options)
    with pytest.raises(expected) as caught:
        trainer.fit(model, make_loader())
    assert after.seen == [id(caught.value)]
    return caught.value, after


def note_of(error: BaseException, replica: int, stage: str) -> None:
    note = f"In replica {replica} on {places(3)[replica]}, during {stage}"
    assert any(text.startswith(note) for text in error.__notes__), error.__notes__


def unchanged(model: Faulty, *, buffers: bool = True) -> None:
    """As it was before the step that failed."""
    for name, value in model.before.items():
        if buffers or not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            assert torch.equal(model.state_dict()[name].cpu(), value.cpu()), name


def trains_again(model: LightningModule, execution: str) -> None:
    trainer = make_trainer(strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=3, max_epochs=1)
    trainer.fit(model, make_loader())
    assert trainer.global_step == 4


@pytest.mark.parametrize("which", [(0,), (2,), (0, 1, 2), (1, 2)])
def test_case_01_an_error_in_forward(which: tuple[int, ...], execution: str, hardware: str) -> None:
    model = Faulty(LookupError, which)
    error, _ = fail(model, execution, LookupError)
    note_of(error, which[0], "training_step")
    assert str(error) == f"of replica {which[0]}"
    if execution == "threads":
        for other in which[1:]:
            assert any(f"Replica {other} on {places(3)[other]} failed too" in note for note in error.__notes__)
    unchanged(model, buffers=False)
    model.which = ()
    trains_again(model, execution)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_case_01_buffers_are_those_before_the_step(phase: str, execution: str, hardware: str) -> None:
    model = Faulty(LookupError, (2,), phase)
    fail(model, execution, LookupError)
    unchanged(model)


def test_case_01_the_note_names_the_module(execution: str) -> None:
    error, _ = fail(Faulty(LookupError, (1,)), execution, LookupError)
    assert any("net.2.0" in note for note in error.__notes__), error.__notes__


@pytest.mark.parametrize("reducer", ["auto", "colocate"])
@pytest.mark.parametrize("which", [(0,), (2,), (0, 1, 2)])
def test_case_02_an_error_in_backward(which: tuple[int, ...], reducer: str, execution: str, hardware: str) -> None:
    model = Faulty(LookupError, which, "backward")
    strategy = dpx.DPXStrategy(verify="off", execution=execution, reducer=reducer)
    error, after = fail(model, execution, LookupError, strategy=strategy)
    in_reverse = execution == "inline" and hardware == "cpu"  # one backward for all: it walks the last replica first
    first = which[-1] if in_reverse else which[0]
    note_of(error, first, "backward")
    assert str(error) == f"of replica {first}"
    unchanged(model, buffers=False)
    left = [gradient for gradient in after.gradients if gradient is not None and gradient.any()]
    assert not left, "gradients of some replicas are no gradients of the batch"
    model.which = ()
    trains_again(model, execution)


@pytest.mark.parametrize("phase", ["forward hook", "backward hook", "parameter hook"])
def test_case_03_an_error_in_a_hook(phase: str, execution: str, hardware: str) -> None:
    model = Faulty(LookupError, (1,), phase)
    error, _ = fail(model, execution, LookupError)
    note_of(error, 1, "training_step" if phase == "forward hook" else "backward")
    unchanged(model, buffers=False)


@pytest.mark.parametrize("phase", ["forward hook", "backward hook"])
def test_case_03_the_note_names_the_module_of_the_hook(phase: str, execution: str) -> None:
    error, _ = fail(Faulty(LookupError, (1,), phase), execution, LookupError)
    assert any("net.2.0.norm" in note for note in error.__notes__), error.__notes__


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("error", [OddError(3, why="mine"), Falsy(), Stop(), SystemExit(3), GeneratorExit()])
def test_cases_05_and_11_the_same_object_comes_out(error: BaseException, phase: str, execution: str) -> None:
    vars(error).pop("__notes__", None)
    caught, _ = fail(Faulty(lambda _: error, (1,), phase), execution, type(error))
    assert caught is error
    note_of(caught, 1, "training_step" if phase == "forward" else "backward")


on_sim = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)


def free_again(before: list[int], after: list[int]) -> bool:
    """Whether every device holds as much as before, in bytes."""
    return all(now <= then for then, now in zip(before, after, strict=True))


class Retries(LightningModule):
    """Step 1 runs out of memory on replica ``which``; its user catches that, frees and tries once more.

    Attributes:
        held: Bytes on every simulated device before the step, and after its failure.
    """

    def __init__(self, which: int | None, phase: str = "forward") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 3))
        self.which, self.phase, self.fails, self.catches = which, phase, False, True
        self.held: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.net[:2](batch[0].repeat(64, 1))
        if self.fails and self.global_rank == self.which:
            ask = exhaust(hidden.device)
            if self.phase == "forward":
                ask()
            hidden = _FailsInBackward.apply(hidden, ask)
        return F.cross_entropy(self.net[2:](hidden), batch[1].repeat(64))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.fails = batch_idx == 1 and self.which is not None
        if self.fails and self.catches:
            self.note_held()
            try:
                optimizer.step(closure=optimizer_closure)
            except RuntimeError as error:
                self.fails = False
                assert is_oom_error(error)  # noqa: PT017
                error.__traceback__ = None
            assert not self.fails, "it did run out of memory"
            self.note_held()
        optimizer.step(closure=optimizer_closure)

    def note_held(self) -> None:
        if self.device.type == "sim":
            self.optimizers().zero_grad()
            gc.collect()
            self.held.append([torch.get_device_module("sim").memory_allocated(index) for index in range(3)])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def exhaust(device: torch.device) -> Fault:
    """Asks for more than there is: the host's allocator has words of its own for it."""
    size = 1 << 60 if device.type == "cpu" else 1 << 30
    return lambda: torch.empty(size, dtype=torch.uint8, device=device) and None


@pytest.fixture
def small_devices() -> Iterator[None]:
    """64 MiB each."""
    if not SIMULATED:
        simulate(8, memory="64MiB")
    yield
    if not SIMULATED:
        simulate(8)


def retried(model: Retries, execution: str, **options: Any) -> dict[str, torch.Tensor]:
    strategy = dpx.DPXStrategy(verify="off", execution=execution, **options)
    make_trainer(strategy=strategy, devices=3, max_epochs=1, limit_train_batches=3).fit(model, make_loader())
    return dict(model.state_dict())


@pytest.mark.usefixtures("small_devices", "hardware")
@pytest.mark.parametrize("reducer", ["auto", "colocate"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("which", [0, 2])
def test_cases_06_and_08_after_running_out_of_memory_the_same_run_goes_on(
    which: int, phase: str, reducer: str, execution: str
) -> None:
    model = Retries(which, phase)
    assert_equal(retried(model, execution, reducer=reducer), retried(Retries(None), execution, reducer=reducer))
    if model.held:
        before, after = model.held
        assert free_again(before, after), "what the failed step had allocated on all devices is free"


@pytest.mark.usefixtures("small_devices")
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_case_06_the_note_tells_the_bytes_of_the_device(phase: str, execution: str, hardware: str) -> None:
    model = Retries(1, phase)
    model.catches = False
    error, _ = fail(model, execution, RuntimeError)
    assert is_oom_error(error)
    assert hardware == "cpu" or type(error) is torch.OutOfMemoryError
    note_of(error, 1, "training_step" if phase == "forward" else "backward")
    assert hardware == "cpu" or any("sim:1" in note and "MiB" in note for note in error.__notes__), error.__notes__


class RunsOut(NaiveReducer):
    """The user's own, which fails the first time that step 1 sums, after some sums."""

    def __init__(self, devices: Sequence[torch.device], model: Retries) -> None:
        super().__init__(devices)
        self.model, self.calls = model, 0

    def reduce(self, grads: Any, **options: Any) -> Any:
        total = super().reduce(grads, **options)
        self.calls += self.model.fails
        if self.calls == 2 or (self.calls == 1 and len(total) == len(list(self.model.parameters()))):
            self.calls = 9
            exhaust(self.distinct_devices[0])()
        return total


@pytest.mark.usefixtures("small_devices", "hardware")
@pytest.mark.parametrize("packs", [0, 8])
def test_case_07_running_out_of_memory_in_the_reducer(packs: int, execution: str) -> None:
    """The gradients of the failed step are forgotten on every replica, not added to the next one."""
    model = Retries(-1)
    devices = [torch.device(place) for place in places(3)]
    ours = retried(model, execution, reducer=RunsOut(devices, model), gradient_buckets=packs)
    assert_equal(ours, retried(Retries(None), execution))
    if model.held:
        before, after = model.held
        assert free_again(before, after)


@on_sim
@pytest.mark.parametrize("reducer", ["auto", "colocate"])
def test_case_07_running_out_of_memory_in_the_optimizer(reducer: str) -> None:
    """Adam wants its state on every owner: no parameter has moved on any replica when there is no room."""

    class Adam(Retries):
        def __init__(self) -> None:
            super().__init__(None)
            self.reached = False
            self.net = nn.Sequential(*self.net[:2], nn.Linear(512, 4096), nn.Linear(4096, 3))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.reached = True

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    model = Adam()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    simulate(8, memory="40MiB")
    try:
        with pytest.raises(torch.OutOfMemoryError):
            make_trainer(
                accelerator="sim",
                strategy=dpx.DPXStrategy(verify="off", reducer=reducer, execution="inline"),
                devices=2,
            ).fit(model, make_loader())
    finally:
        simulate(8)
    assert model.reached, "there was room for the gradients"
    assert_equal({name: value.cpu() for name, value in model.state_dict().items()}, before, bitwise=True)


class Recomputes(Faulty):
    """Its middle is recomputed in backward, and only that second run fails."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        part, rank = self.net[2][0], self.global_rank
        hidden = checkpoint(self.net[2], self.net[:2](batch[0]), use_reentrant=False)
        part.fault = partial(fail_with, LookupError, rank) if batch_idx == 1 and rank in self.which else None
        return F.cross_entropy(self.net[3](hidden), batch[1])


def fail_with(error: Callable[[str], BaseException], rank: int) -> None:
    raise error(f"of replica {rank}")


def test_case_04_an_error_in_a_recomputed_segment(execution: str, hardware: str) -> None:
    error, _ = fail(Recomputes(LookupError, (1,)), execution, LookupError)
    note_of(error, 1, "backward")


def test_case_04_the_note_names_the_segment(execution: str, hardware: str) -> None:
    error, _ = fail(Recomputes(LookupError, (1,)), execution, LookupError)
    assert any("net.2.0" in note for note in error.__notes__), error.__notes__


class Written(Faulty):
    """Writes into what a memory plan needs for computing again."""

    def __init__(self, which: tuple[int, ...] = ()) -> None:
        super().__init__(which=which)
        self.net = nn.Sequential(nn.Linear(8, 256), *(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))
        self.head = nn.Linear(256, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = [self.net[0](batch[0].repeat(64, 1))]
        for part in self.net[1:]:
            hidden.append(part[0](hidden[-1]))
            hidden.append(part[1](hidden[-1]))
        loss = F.cross_entropy(self.head(hidden[-1]), batch[1].repeat(64))
        if batch_idx == 1 and self.global_rank in self.which:
            with torch.no_grad():
                for each in hidden[:-2]:  # the last is asked for by an operator that keeps it
                    each.zero_()
        return loss


def test_case_04_an_error_in_the_recomputation_of_a_plan(execution: str) -> None:
    torch.manual_seed(0)
    model = Written((1,))
    batch = [part[:6] for part in next(iter(make_loader()))]
    plan = dpx.search_plan(Written(), batch, planner="threshold")  # which drops all that it can
    assert not plan.keeps_all
    error, _ = fail(
        model, execution, RuntimeError, strategy=dpx.DPXStrategy(verify="off", execution=execution, plan=plan)
    )
    note_of(error, 1, "backward")
    assert "changed in place: net." in str(error), "names the entry of the plan"


class Blocked(Faulty):
    """A replica that calls ``meet`` and then blocks, in one phase of step 1, until ``release``."""

    def __init__(self, phase: str, meet: Fault = lambda: None, which: tuple[int, ...] = (2,)) -> None:
        super().__init__(which=which, phase="backward" if phase == "backward" else "forward")
        self.where, self.meet = phase, meet

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        blocked = batch_idx == 1 and self.global_rank in self.which
        self.net[2][0].fault = partial(block, self.meet) if blocked and self.where in ("forward", "backward") else None
        if self.where == "meeting" and batch_idx == 1:
            self.all_gather(batch[0].sum())
            if blocked:
                block(self.meet)
            self.all_gather(batch[0].sum())
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.where == "copy" and self.global_rank in self.which and self.trainer.global_step == 1:
            block(self.meet)
        return batch


GUARD_SECONDS = 60.0
RELEASE = threading.Event()
ENDED: list[bool] = []  # of every block, whether it was released in time


def block(meet: Fault) -> None:
    meet()
    ENDED.append(RELEASE.wait(GUARD_SECONDS))


@pytest.fixture
def _released() -> Iterator[None]:
    """Ends what is blocked still, and gives back the handlers of signals."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what runs in its background ignore it
    RELEASE.clear()
    ENDED.clear()
    yield
    RELEASE.set()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for thread in threading.enumerate():
        if thread.name.startswith("dpx"):
            thread.join(GUARD_SECONDS)


class BlocksInReduce(NaiveReducer):
    """The user's own."""

    calls = 0

    def reduce(self, grads: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            block(interrupt)
        return super().reduce(grads, **options)


def interrupt() -> None:
    """Ctrl-C."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.usefixtures("_released", "hardware")
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce", "copy", "meeting"])
def test_case_09_an_interrupt_waits_for_no_replica(phase: str, execution: str, hardware: str) -> None:
    if phase == "backward" and execution == "inline" and hardware == "sim":
        pytest.skip("the caller's thread is in autograd's engine, as with one such device")
    after = Aftermath()
    reducer = BlocksInReduce([torch.device(place) for place in places(3)]) if phase == "reduce" else "auto"
    strategy = dpx.DPXStrategy(verify="off", execution=execution, reducer=reducer, gradient_buckets=0)
    trainer = make_trainer(strategy=strategy, devices=3, max_epochs=1, callbacks=[after])
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        trainer.fit(Blocked(phase, interrupt), make_loader())
    assert not ENDED, "the fit ends while the replica is blocked still"
    assert after.kinds == [KeyboardInterrupt]


@pytest.mark.usefixtures("_released")
def test_case_09_ctrl_c_works_again_after_the_fit(execution: str) -> None:
    handler = signal.getsignal(signal.SIGINT)
    trainer = make_trainer(strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=3, max_epochs=1)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        trainer.fit(Faulty(lambda _: KeyboardInterrupt(), (1,)), make_loader())
    assert signal.getsignal(signal.SIGINT) is handler
    trains_again(Faulty(), execution)


class Terminated(Faulty):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return F.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.usefixtures("_released")
def test_case_10_sigterm_ends_the_run_after_the_step_with_its_exit_code(execution: str) -> None:
    after = Aftermath()
    trainer = make_trainer(strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=3, callbacks=[after])
    with pytest.raises(SystemExit) as caught:
        trainer.fit(Terminated(), make_loader())
    assert trainer.global_step == 2, "the step ends"
    assert len(after.seen) == 1
    assert caught.value.code == 128 + signal.SIGTERM


@pytest.mark.usefixtures("_released")
@pytest.mark.parametrize("phase", ["forward", "backward", "meeting"])
def test_case_12_a_replica_that_blocks_is_named_after_the_timeout(phase: str, capfd: Any) -> None:
    # More than a busy machine needs for a step.
    strategy = dpx.DPXStrategy(verify="off", execution="threads", timeout=4.0)
    trainer = make_trainer(strategy=strategy, devices=3, max_epochs=1)
    with pytest.raises(dpx.DPXError, match="replica 2") as caught:
        trainer.fit(Blocked(phase), make_loader())
    assert not ENDED
    told = f"{caught.value} {caught.value.__notes__} {capfd.readouterr().err}"
    assert "in block" in told, "the stacks of all threads"


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_case_13_peers_that_wait_in_batch_norm_end_too(phase: str, which: int, execution: str, hardware: str) -> None:
    class AtFirst(Faulty):
        def __init__(self) -> None:
            super().__init__(LookupError, (which,), phase)
            self.net[2] = nn.Sequential(nn.BatchNorm1d(8), Part(phase), nn.BatchNorm1d(8))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            fails = batch_idx == 1 and self.global_rank in self.which
            self.net[2][1].fault = partial(fail_with, LookupError, which) if fails else None
            return F.cross_entropy(self.net(batch[0]), batch[1])

    error, _ = fail(AtFirst(), execution, LookupError, sync_batchnorm=True)
    note_of(error, which, "training_step" if phase == "forward" else "backward")


class Warns(Faulty):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        warnings.warn("odd", UserWarning, stacklevel=1)
        rank_zero_warn("odder", stacklevel=1)
        rank_zero_info(f"step {batch_idx}")
        return F.cross_entropy(self.net(batch[0]), batch[1])


def test_case_15_a_warning_is_an_error_in_a_replica_too(execution: str, hardware: str) -> None:
    error, _ = fail(Warns(), execution, UserWarning)
    assert str(error) == "odd"
    note_of(error, 0, "training_step")


def test_case_15_filters_are_those_of_the_caller_and_lines_come_once(execution: str, caplog: Any) -> None:
    trainer = make_trainer(strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=3, max_epochs=1)
    with warnings.catch_warnings(record=True) as seen, caplog.at_level("INFO"):
        warnings.simplefilter("default")
        trainer.fit(Warns(), make_loader())
    texts = [str(one.message) for one in seen]
    assert (texts.count("odd"), texts.count("odder")) == (1, 1)
    assert [record.message for record in caplog.records if record.message.startswith("step")] == [
        f"step {index}" for index in range(4)
    ]


class PartlyNone(Faulty):
    """Replicas ``which`` have no loss; rows that count are noted."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank in self.which:
            return None
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction=self.phase)


@pytest.mark.filterwarnings("ignore:.*returned.*None.*")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 2)])
def test_case_16_shares_without_a_loss_weigh_nothing(
    which: tuple[int, ...], reduction: Any, execution: str, hardware: str
) -> None:
    def net(model: LightningModule) -> dict[str, torch.Tensor]:
        return {name: value.cpu() for name, value in model.state_dict().items() if "norm." not in name}

    rows, labels = next(iter(make_loader()))
    ours, one = PartlyNone(which=which, phase=reduction), PartlyNone(phase=reduction)
    for model in (ours, one):
        model.net[2] = nn.Tanh()
    strategy = dpx.DPXStrategy(verify="off", execution=execution, workload=[2.0, 1.0, 1.0], loss_reduction=reduction)
    batches: Any = DataLoader([(rows, labels)] * 3, batch_size=None)
    make_trainer(strategy=strategy, devices=3, max_epochs=1).fit(ours, batches)
    kept = [part for index, part in enumerate((range(8), range(8, 12), range(12, 16))) if index not in which]
    chosen = [row for part in kept for row in part]
    batches = DataLoader([(rows[chosen], labels[chosen])] * 3, batch_size=None)
    make_trainer(max_epochs=1).fit(one, batches)
    assert_equal(net(ours), net(one))


def test_case_16_it_is_said_once_that_some_replicas_have_no_loss(execution: str) -> None:
    trainer = make_trainer(strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=3, max_epochs=1)
    with pytest.warns(UserWarning, match="None.*replica 1") as seen:
        trainer.fit(PartlyNone(which=(1,), phase="mean"), make_loader())
    assert sum("None" in str(one.message) for one in seen) == 1


@pytest.mark.host
def test_case_16_processes_are_weighted_by_the_rows_that_have_a_loss(tmp_path: Path) -> None:
    """Rank 0's second replica has none: 4 of its 8 rows count, and 8 of those of rank 1."""
    program = Path(__file__).with_name("none_program.py")
    cluster = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        programs.start(program, tmp_path, environment={**cluster, "NODE_RANK": str(rank)}, joint=True)
        for rank in range(2)
    ]
    texts = finish(processes)
    assert [process.returncode for process in processes] == [0, 0], texts
    rows, labels = next(iter(make_loader()))
    chosen = [*range(4), *range(8, 16)]
    torch.manual_seed(0)
    one, batches = Classifier(), DataLoader([(rows[chosen], labels[chosen])] * 3, batch_size=None)
    make_trainer(max_epochs=1).fit(one, batches, batches)
    for rank in range(2):
        assert_equal(torch.load(tmp_path / f"{rank}.pt"), dict(one.state_dict()))


class Returns(Faulty):
    """Replicas ``which`` return something odd."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        loss = losses.mean()
        if self.global_rank not in self.which:
            return {"loss": loss} if self.phase == "mapping" else loss
        odd = {
            "no loss": {"lost": loss}, "tuple": (loss, loss), "number": 1.5, "rows": losses, "detached": loss.detach(),
            "text": "loss", "none inside": {"loss": None}, "host": loss.cpu(), "mapping": loss,
        }  # fmt: skip
        return odd[self.phase]


@pytest.mark.filterwarnings("ignore:.*returned.*None.*")
@pytest.mark.parametrize("which", [(0, 1, 2), (1,), (0,)])
@pytest.mark.parametrize("kind", ["no loss", "tuple", "number", "rows", "detached", "text", "none inside"])
def test_case_17_lightning_says_what_is_wrong_with_the_output(
    kind: str, which: tuple[int, ...], execution: str, hardware: str
) -> None:
    """The words of one device."""
    with pytest.raises(Exception, match=r".") as theirs:
        make_trainer(max_epochs=1).fit(Returns(which=(0,), phase=kind), make_loader())
    error, _ = fail(Returns(which=which, phase=kind), execution, type(theirs.value))
    assert str(error).splitlines()[0] == str(theirs.value).splitlines()[0]


def test_case_17_the_replica_is_named(execution: str) -> None:
    error, _ = fail(Returns(which=(1,), phase="tuple"), execution, Exception)
    assert any("replica 1" in note for note in getattr(error, "__notes__", [])), error


def test_case_17_a_loss_on_another_device_trains_as_on_one(execution: str, hardware: str) -> None:
    ours, one = Returns(which=(0, 1, 2), phase="host"), Returns()
    make_trainer(strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=3, max_epochs=1).fit(
        ours, make_loader(51, 17)
    )
    make_trainer(max_epochs=1).fit(one, make_loader(51, 17))
    assert ours.net[0].weight.isfinite().all()


class Structures(Faulty):
    """Each replica returns what ``made`` makes of its rank."""

    def __init__(self, made: Callable[[int, torch.Tensor], Any]) -> None:
        super().__init__()
        self.made = made

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.made(self.global_rank, F.cross_entropy(self.net(batch[0]), batch[1]))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda rank, loss: {"loss": loss, f"extra{rank}": 1}, r"extra0.* and .*extra1"),
        (lambda rank, loss: {"loss": loss} if rank else loss, r"Tensor.*dict"),
        (lambda rank, loss: loss if rank else {"loss": loss}, r"dict.*Tensor"),
        (lambda rank, loss: {"loss": loss, "x": [1, loss] if rank else loss}, r"x: Tensor, list"),
        (lambda rank, loss: {"loss": loss, "x": loss.expand(rank + 9)}, r"x: ?.*9.*10|\(9,\), \(10,\)"),
        (lambda rank, loss: {"loss": loss, "x": ["a"] * (rank + 1)}, r"x: 1, 2"),
    ],
    ids=["keys", "tensor-dict", "dict-tensor", "types", "shapes", "lengths"],
)
def test_case_18_different_structures_are_named_and_one_device_goes_on(
    made: Any, message: str, execution: str, hardware: str
) -> None:
    torch.manual_seed(0)
    ours = Structures(made)
    with pytest.warns(UserWarning, match=f"training_step gets all of its batches whole.*{message}"):
        make_trainer(strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=2, max_epochs=1).fit(
            ours, make_loader()
        )
    torch.manual_seed(0)
    one = Structures(made)
    make_trainer(max_epochs=1).fit(one, make_loader())
    assert_equal(ours.state_dict(), one.state_dict())


class AssertsOnTheDevice(Classifier):
    """What a kernel's assertion comes out as."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        return F.cross_entropy(self.net(batch[0]), batch[1])


def test_case_14_a_device_that_is_lost_is_called_so(execution: str, hardware: str) -> None:
    trainer = make_trainer(strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=3, max_epochs=1)
    with pytest.raises(torch.AcceleratorError) as caught:
        trainer.fit(AssertsOnTheDevice(), make_loader(), make_loader())
    assert any(f"{places(3)[1]} is lost to this process" in note for note in caught.value.__notes__)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_case_14_on_cuda_further_steps_are_refused() -> None:
    """In a process of its own, because the device is lost to it."""
    script = (
        "import torch, lightning_dpx as dpx\n"
        "group = dpx.ReplicaGroup(torch.nn.Embedding(4, 2), ['cuda:0', 'cuda:0'], execution='inline')\n"
        "for ids in (torch.full((4,), 9), torch.zeros(4, dtype=torch.long)):\n"
        "    try:\n"
        "        group.forward(ids, is_train=True); torch.cuda.synchronize(); print('went on')\n"
        "    except RuntimeError as error:\n"
        "        print('refused', type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.splitlines()[-1].startswith("refused"), done.stdout + done.stderr
