"""Compiled modules on several replicas: one device's results, its compilations, and its checkpoint files."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.compile import to_uncompiled
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import SIMULATED, assert_equal, make_loader, make_trainer

pytestmark = [
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo looks at it
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Net(nn.Module):
    """Rows (B, 8) to logits (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Model(LightningModule):
    """Logs nothing in its steps: in code that is compiled as a whole, Lightning's ``self.log`` fails on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.training_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counting:
    """A backend that counts its graphs, and how often each is called."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.num_calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_graphs += 1

        def run(*args: Any) -> Any:
            self.num_calls += 1
            return graph.forward(*args)

        return run


def compiled(form: str, backend: Counting) -> Any:
    torch.manual_seed(0)
    model = Model()
    if form == "whole":
        return torch.compile(model, backend=backend)
    if form == "submodule":
        model.net = torch.compile(model.net, backend=backend)
    elif form == "in place":
        model.net.compile(backend=backend)
    elif form == "dynamic":
        model.net.compile(backend=backend, dynamic=True)
    else:
        for block in model.net.blocks:
            block.compile(backend=backend)
    return model


def trained(form: str, backend: Counting, **options: Any) -> dict[str, torch.Tensor]:
    model = compiled(form, backend)
    trainer = make_trainer(**options)
    trainer.fit(model, make_loader(48), make_loader(48))
    seen = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
    module = trainer.lightning_module
    return {**seen, "predictions": torch.cat(trainer.predict(module, make_loader(48)))}


@pytest.mark.parametrize("form", ["whole", "submodule", "in place", "regional", "dynamic"])
def test_replicas_of_a_compiled_module_train_as_one_device_and_compile_as_often(form: str) -> None:
    alone, together = Counting(), Counting()
    one = trained(form, alone)
    torch.compiler.reset()
    ours = trained(form, together, strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    assert_equal(ours, one)
    assert together.num_graphs == alone.num_graphs
    assert together.num_calls > alone.num_calls, "both replicas must have run compiled code"


class CompiledStep(Model):
    """Its optimizer's step is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = Counting()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...  # that of by hand would train

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.step = torch.compile(optimizer.step, backend=self.backend)
        return optimizer


class CompiledStepByHand(CompiledStep):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


class CompiledStepOfClosure(CompiledStepByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().step(closure=lambda: self.loss_with_gradients(batch))

    def loss_with_gradients(self, batch: Any) -> torch.Tensor:
        self.optimizers().zero_grad()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        return loss


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("kind", [CompiledStep, CompiledStepByHand, CompiledStepOfClosure])
@pytest.mark.parametrize("execution", ["inline", "threads"])
def test_a_compiled_step_of_an_optimizer_is_taken_once(kind: type[CompiledStep], execution: str) -> None:
    weights = []
    for options in ({}, {"strategy": dpx.DPXStrategy(execution=execution, verify="off"), "devices": 2}):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = kind()
        make_trainer(**options).fit(model, make_loader(48), make_loader(48))
        weights.append(model.state_dict())
        assert model.backend.num_calls > 0, "the step must have run compiled code"
    assert_equal(weights[1], weights[0])


@pytest.mark.slow  # the compiler of the CPU's code takes half a minute
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_modes_of_the_default_backend_train_as_one_device(mode: str) -> None:
    weights = []
    for options in ({}, {"strategy": dpx.DPXStrategy(execution="inline"), "devices": 2}):
        torch.manual_seed(0)
        model = Model()
        model.net = torch.compile(model.net, mode=mode)
        make_trainer(**options).fit(model, make_loader(48), make_loader(48))
        weights.append({name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()})
    assert_equal(weights[1], weights[0])


@pytest.mark.parametrize("form", ["whole", "in place"])
def test_threads_that_were_asked_for_are_left_out_and_it_is_said(form: str) -> None:
    strategy = dpx.DPXStrategy(execution="threads", verify="off")
    model = compiled(form, Counting())
    names = "forward, training_step, validation_step" if form == "whole" else "net"
    with pytest.warns(
        UserWarning, match=f"'threads' runs replicas in line here, as compiled code .* at a time: {names}"
    ):
        make_trainer(strategy=strategy, devices=2).fit(model, make_loader(), make_loader(48))


def test_replicas_that_take_their_slices_as_one_stay_so_and_say_why(caplog: pytest.LogCaptureFixture) -> None:
    backend = Counting()
    with caplog.at_level("INFO"):
        trained("in place", backend, strategy="dpx", devices=2)
    assert backend.num_graphs > 0
    assert "take their slices as one: compiled code cannot be watched (net)" in caplog.text


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_all_devices_are_named_whose_replicas_take_turns(sim: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        trained("in place", Counting(), strategy="dpx", accelerator="sim", devices=2)
    assert "dpx: 2 replicas on sim:0, sim:1 run one after the other, as there is compiled code: net." in caplog.text


def test_a_module_that_was_compiled_whole_can_be_uncompiled_after_its_run() -> None:
    backend = Counting()
    wrapped = compiled("whole", backend)
    make_trainer(strategy="dpx", devices=2).fit(wrapped, make_loader(48), make_loader(48))
    module = to_uncompiled(wrapped)
    assert "_torchdynamo_orig_callable" not in vars(module.training_step.__func__)
    assert list(module.state_dict()) == list(Model().state_dict()), "no _orig_mod in the names of its parameters"


@pytest.mark.usefixtures("sim")
def test_simulated_devices_run_it_uncompiled_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    backend = Counting()
    strategy = dpx.DPXStrategy(verify="off")
    with caplog.at_level("INFO"):
        ours = trained("submodule", backend, strategy=strategy, devices=2, accelerator="sim")
    assert backend.num_graphs == 0
    assert_equal(ours, trained("submodule", backend))
    assert "dpx: simulated devices run no compiled code; net runs as it was written." in caplog.text


@pytest.mark.parametrize("before", ["in place", "submodule"])
def test_a_run_goes_on_from_a_file_of_a_module_with_other_parts_compiled(before: str, tmp_path: Any) -> None:
    after = "submodule" if before == "in place" else "in place"
    backend = Counting()
    trainer = make_trainer(max_epochs=1, strategy="dpx", devices=2)
    trainer.fit(compiled(before, backend), make_loader(48), make_loader(48))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    model = compiled(after, backend)
    later = make_trainer(max_epochs=2, strategy="dpx", devices=2)
    later.fit(model, make_loader(48), make_loader(48), ckpt_path=tmp_path / "last.ckpt")
    one = trained(before, backend)
    for name, value in model.state_dict().items():
        assert_equal({name: value}, {name: one[name.replace("_orig_mod.", "")]})


class Wide(Model):
    """Large enough for a plan."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
        self.net = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Linear(64, 3))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_replicas_with_a_budget_replay_compiled_blocks(caplog: pytest.LogCaptureFixture) -> None:
    found = []
    loaders = make_loader(1024, 512), make_loader(512, 512)
    strategy = dpx.DPXStrategy(memory_budget="1.75MiB", plan_cache=False, execution="inline")
    for options in ({}, {"strategy": strategy, "devices": 2}):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Wide()
        for block in model.net[1:5]:
            block.forward = torch.compile(block.forward, backend="aot_eager_decomp_partition")
        with caplog.at_level("INFO"):
            make_trainer(**options).fit(model, *loaders)
        found.append(model.state_dict())
    assert_equal(found[1], found[0])
    assert "MiB predicted of 1.8 MiB allowed" in caplog.text
    assert "everything fits" not in caplog.text
    assert "that no profiled step had saved" not in caplog.text
