"""What torch keeps for each thread is that of the caller wherever a task runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import lightning_dpx as dpx
from lightning_dpx.replicas.caller_context import CallerContext, default_device, watching_modes
from lightning_dpx.replicas.executor import Task
from tests.conftest import Classifier as Plain
from tests.conftest import make_loader, make_trainer

CPU = torch.device("cpu")


def test_the_callers_context_reaches_the_workers(executor) -> None:
    def look():
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

    assert executor.run([Task(0, CPU, "forward", look)]) == [(True, False, False)]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert executor.run([Task(0, CPU, "forward", look)]) == [(False, False, True)]
    with torch.inference_mode():
        assert executor.run([Task(0, CPU, "forward", look)]) == [(False, True, False)]


def test_saved_tensor_hooks_reach_the_workers(executor) -> None:
    packed = []
    weight = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        executor.run([Task(0, CPU, "forward", lambda: (weight * weight).sum())])
    assert packed


class Names(TorchFunctionMode):
    """Notes the functions that were called, from nothing each time it is entered."""

    def __enter__(self) -> "Names":
        self.seen: list[str] = []
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_modes_reach_the_workers_with_what_they_have_seen(executor) -> None:
    tensor = torch.ones(2, 2)
    with Names() as names, FlopCounterMode(display=False) as flops:
        tensor.square()
        executor.run([Task(replica, CPU, "forward", lambda: torch.mm(tensor, tensor)) for replica in range(3)])
        assert names.seen.count("square") == 1
        assert names.seen.count("mm") == 3
    assert flops.get_total_flops() == 3 * 16
    assert executor.run([Task(0, CPU, "forward", watching_modes)]) == [[]], "a worker leaves them again"


def test_a_mode_that_is_in_force_already_is_not_entered_twice() -> None:
    tensor = torch.ones(2)
    with Names() as names:
        with CallerContext.capture().entered():
            tensor.square()
        assert names.seen.count("square") == 1


def test_a_default_device_is_none_that_watches_and_none_without_an_index() -> None:
    assert default_device() is None
    for name, expected in (("meta", None), ("meta:1", torch.device("meta", 1))):
        with torch.device(name):
            assert default_device() == expected
            assert watching_modes() == []


class _DeviceModule:
    """Notes which of its streams are current; that of the first device is its default one."""

    def __init__(self, entered: list[str]) -> None:
        self._entered = entered

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(stream_id=7 * device.index, device=device)

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        self._entered.append(f"stream {stream.stream_id}")
        yield
        self._entered.append(f"no stream {stream.stream_id}")


def test_streams_that_the_caller_chose_are_current_in_the_task(executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a type that is not what torch takes for the accelerator, as beside simulated devices."""
    entered: list[str] = []
    module = _DeviceModule(entered)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    context = CallerContext.capture([CPU, torch.device("xpu", 0), torch.device("xpu", 1)])
    with context.entered():
        entered.append("the task")
    assert entered == ["stream 7", "the task", "no stream 7"], "the default stream is current in every thread"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_the_caller_queued_on_its_stream_is_done_before_a_task_reads_it(executor) -> None:
    device = torch.device("cuda", 0)
    values = torch.zeros(1000, 1000, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        values.fill_(1.0)
        (seen,) = executor.run([Task(0, device, "forward", values.sum)])
        # Here, as a read waits for what is queued on the current stream alone.
        assert float(seen) == 1e6


class MakesTensors(Plain):
    """Its steps make tensors without saying where, as much code for a default device does."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        ones = torch.ones(len(rows), 1).to(rows.dtype)
        return torch.nn.functional.cross_entropy(self.net(rows * ones), labels)


@pytest.mark.parametrize("execution", ["inline", "threads"])
@pytest.mark.parametrize("kind", ["sim", "sim:0"])
def test_each_replica_has_its_own_device_as_the_default_one(sim: Any, kind: str, execution: str) -> None:
    trained = []
    for devices in (1, 2):
        torch.manual_seed(0)
        model = MakesTensors()
        strategy = dpx.DPXStrategy(execution=execution, verify="off")
        trainer = make_trainer(strategy=strategy, accelerator="sim", devices=devices, max_epochs=1)
        loader = make_loader()  # its sampler draws where the default device is
        with torch.device(kind):
            trainer.fit(model, loader, loader)
        trained.append([parameter.detach().cpu() for parameter in model.parameters()])
    for one, several in zip(*trained, strict=True):
        torch.testing.assert_close(several, one)


def test_a_step_under_a_mode_that_watches_takes_turns(hardware: str) -> None:
    """All FLOPs of its steps are counted, none of a rehearsal's, and by one thread at a time."""
    counted = []
    threads = set()
    for execution in ("inline", "threads"):
        strategy = dpx.DPXStrategy(execution=execution)
        trainer = make_trainer(strategy=strategy, devices=2, max_epochs=1, limit_train_batches=1)
        model = Plain()
        model.net.register_forward_hook(lambda *_: threads.add(threading.current_thread()))
        with FlopCounterMode(display=False) as flops:
            trainer.fit(model, make_loader(), make_loader())
        counted.append(flops.get_total_flops())
    with FlopCounterMode(display=False) as flops:
        make_trainer(max_epochs=1, limit_train_batches=1).fit(Plain(), make_loader(), make_loader())
    assert counted == [flops.get_total_flops()] * 2
    assert threads == {threading.current_thread()}
