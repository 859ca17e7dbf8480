"""Case 9 and 12, what comes after: a step that was abandoned never touches the module again."""

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.replicas.abandonment import keep_gradients_out
from tests.conftest import assert_equal, make_loader, make_trainer, places

# A step that blocks notes it in a list, and only then, so that all others run in threads.
pytestmark = pytest.mark.filterwarnings("ignore:The .*_step writes Python state that its replicas share")
GUARD_SECONDS = 60.0
SHORT_SECONDS = 3.0  # a deadline that is to pass, and that the step before keeps on a busy machine
REACHED = threading.Event()
RELEASE = threading.Event()


def interrupt() -> None:
    """Ctrl-C."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def block(meet: Callable[[], None]) -> None:
    """In the middle of a step, until the test says so."""
    REACHED.set()
    meet()
    RELEASE.wait(GUARD_SECONDS)


def let_go() -> None:
    """What is still blocked goes on, and ends."""
    RELEASE.set()
    for thread in threading.enumerate():
        if thread.name.startswith("dpx"):
            thread.join(GUARD_SECONDS)


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    """Ends what is blocked still, and gives back the handlers of signals."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what runs in its background ignore it
    REACHED.clear()
    RELEASE.clear()
    yield
    let_go()
    for number, handler in handlers.items():
        signal.signal(number, handler)


class _BlocksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, act: Callable[[], None]) -> torch.Tensor:
        ctx.act = act
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.act()
        return grads[0], None


class Stuck(LightningModule):
    """Rows (B, 8) to logits (B, 3); one replica blocks in a step, in one phase of it.

    Args:
        phase: "forward", "backward", "evaluation", or nowhere.
        which: The replica.
        meet: Called before it blocks.
    """

    def __init__(self, phase: str = "", which: int = 0, meet: Callable[[], None] = interrupt) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.phase, self.which, self.meet = phase, which, meet
        self.seen: list[int] = []
        self.steps = 0

    def forward(self, rows: torch.Tensor, phase: str = "") -> torch.Tensor:
        hidden = self.first(rows)
        if phase == "backward":
            hidden = _BlocksInBackward.apply(hidden, lambda: block(self.meet))
        elif phase:
            block(self.meet)
        return self.last(self.norm(hidden))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        # Of the third batch no rehearsal takes a look.
        blocked = batch_idx == 2 and self.global_rank == self.which and self.phase in ("forward", "backward")
        loss = F.cross_entropy(self(batch[0], self.phase if blocked else ""), batch[1])
        self.log("train_loss", loss)
        # What always writes would run in turns, in the calling thread; and one that has first written there by the
        # end of its forward, which a blocked one has not reached, runs again on the whole batch.
        if blocked and self.phase == "forward":
            self.seen.append(batch_idx)
            self.steps += 1
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        blocked = batch_idx == 1 and self.global_rank == self.which and self.phase == "evaluation"
        self.log("val_loss", F.cross_entropy(self(batch[0], self.phase if blocked else ""), batch[1]))
        if blocked:
            self.seen.append(batch_idx)
            self.steps += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StuckByHand(Stuck):
    """The same with manual optimization."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def state(model: Stuck) -> dict[str, Any]:
    """All that an abandoned step could change."""
    tensors = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    grads = {name: None if p.grad is None else p.grad.cpu().clone() for name, p in model.named_parameters()}
    attributes = {key: value for key, value in vars(model).items() if isinstance(value, int | str | list)}
    return {"tensors": tensors, "grads": grads, "seen": list(model.seen), "names": sorted(vars(model)), **attributes}


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """To the bit."""
    torch.testing.assert_close(ours.pop("tensors"), theirs.pop("tensors"), rtol=0, atol=0)
    grads = [[(name, None if g is None else g.tolist()) for name, g in each.pop("grads").items()]
             for each in (ours, theirs)]  # fmt: skip
    assert grads[0] == grads[1]
    assert ours == theirs


def fit(model: Stuck, execution: str = "threads", **options: Any) -> None:
    strategy = dpx.DPXStrategy(execution=execution, **options)
    trainer = make_trainer(strategy=strategy, devices=2, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(model, make_loader(48), make_loader(48))


def trains_as_new(model: Stuck) -> None:
    """From fresh weights, the second fit is that of a module that was never interrupted."""
    new = type(model)()
    model.load_state_dict(type(model)().state_dict())
    model.phase = ""
    fit(model)
    fit(new)
    assert_equal(*({name: value.cpu() for name, value in each.state_dict().items()} for each in (model, new)))


@pytest.mark.parametrize(
    ("kind", "phase", "which"),
    [(Stuck, "forward", 0), (Stuck, "backward", 0), (Stuck, "backward", 1), (StuckByHand, "backward", 0)],
)
def test_a_step_that_ctrl_c_abandoned_changes_nothing_after_the_fit(
    kind: type[Stuck], phase: str, which: int, hardware: str
) -> None:
    model = kind(phase, which)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(model)
    left = state(model)
    assert REACHED.is_set()
    assert not RELEASE.is_set(), "the fit has ended while the step is blocked"
    assert "log" not in vars(model)
    assert "optimizers" not in vars(model)
    let_go()
    same(state(model), left)
    trains_as_new(model)


def test_a_step_that_a_deadline_abandoned_changes_nothing_after_the_fit() -> None:
    model = Stuck("backward", 0, lambda: None)
    with pytest.raises(dpx.CollectiveError, match="replica 0"):
        fit(model, timeout=SHORT_SECONDS)
    left = state(model)
    let_go()
    same(state(model), left)
    trains_as_new(model)


def test_a_fit_may_begin_while_the_abandoned_step_is_blocked_still() -> None:
    """On the host: an accelerator has one thread for its backwards, and that is blocked."""
    model = Stuck("backward")
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(model)
    trains_as_new(model)
    left = state(model)
    let_go()
    same(state(model), left)


def test_an_abandoned_evaluation_changes_nothing_either() -> None:
    model = Stuck("evaluation")
    trainer = make_trainer(strategy=dpx.DPXStrategy(execution="threads"), devices=2)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        trainer.validate(model, make_loader(48), verbose=False)
    left = state(model)
    let_go()
    same(state(model), left)
    trains_as_new(model.train())


class Meets(Stuck):
    """In line, replicas that gather are started in threads of their own, where the second one blocks."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.all_gather(batch[0].sum())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("meet", [interrupt, lambda: None], ids=["Ctrl-C", "deadline"])
def test_in_line_a_replica_in_a_thread_is_abandoned_like_any_other(meet: Callable[[], None]) -> None:
    model = Meets("forward", 1, meet)
    expected = (SystemExit, KeyboardInterrupt) if meet is interrupt else dpx.CollectiveError
    with pytest.raises(expected):
        fit(model, "inline", timeout=SHORT_SECONDS if meet is not interrupt else 60.0)
    left = state(model)
    let_go()
    same(state(model), left)
    trains_as_new(model)


def test_a_group_goes_on_after_ctrl_c(hardware: str) -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.blocked = nn.Linear(8, 3), True

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            hidden = self.linear(rows)
            if self.blocked:
                block(interrupt)
            return hidden

    rows, plain = torch.randn(6, 8), nn.Linear(8, 3)
    module = Once().to(places(1)[0])
    plain.load_state_dict({name: value.cpu() for name, value in module.linear.state_dict().items()})
    with dpx.ReplicaGroup(module, places(2), execution="threads") as group:
        # A stage is first seen in turns, in the calling thread; only then in the threads that Ctrl-C abandons.
        module.blocked = False
        group.forward(rows)
        module.blocked = True
        with pytest.raises(KeyboardInterrupt):
            group.forward(rows)
        module.blocked = False
        for _ in range(2):
            group.forward(rows)
            group.backward(torch.ones(6, 3))
        plain(rows).sum().backward()
        torch.testing.assert_close(group.outputs_merged().cpu(), plain(rows))
        torch.testing.assert_close(module.linear.weight.grad.cpu(), plain.weight.grad)


def test_only_backwards_that_have_begun_are_kept_out() -> None:
    """Of two with a graph in common; the later one may end first."""
    weight = nn.Parameter(torch.ones(2))
    shared = weight * 2

    def wait_in_backward() -> None:
        _BlocksInBackward.apply(shared, lambda: block(lambda: None)).sum().backward(retain_graph=True)

    errors: list[BaseException] = []

    def abandoned() -> None:
        try:
            wait_in_backward()
        except BaseException as error:  # noqa: BLE001  told by the assertion
            errors.append(error)

    thread = threading.Thread(target=abandoned)
    thread.start()
    assert REACHED.wait(GUARD_SECONDS)
    keep_gradients_out([weight])
    (shared * 3).sum().backward(retain_graph=True)
    torch.testing.assert_close(weight.grad, torch.full((2,), 6.0))
    RELEASE.set()
    thread.join(GUARD_SECONDS)
    torch.testing.assert_close(weight.grad, torch.full((2,), 6.0))
    assert [type(error).__name__ for error in errors] == ["StepAbandoned"]
