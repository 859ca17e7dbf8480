"""No patch of torch or Lightning outlives a run, whatever became of it."""

import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_only as of_pytorch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize

import lightning_dpx
from tests.conftest import Classifier, StepsByHand, assert_equal, make_loader, make_trainer, seeded

LIBRARIES = ("torch", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics")
Names = dict[str, Any]


def functions_of_libraries() -> Names:
    """What the names of functions, methods and classes point to, and what functions carry as attributes."""
    names: Names = {}
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] in LIBRARIES and isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                names.update(_with_members(f"{path}.{name}", value))
    return names


def _with_members(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) is types.FunctionType:
        yield path, value
        for name, member in vars(value).items():
            yield f"{path}.{name}", member
    elif issubclass(type(value), type):  # not isinstance: deprecated names warn where they are asked
        yield path, value
        for name, member in vars(value).items():
            if isinstance(member, types.FunctionType | property | staticmethod | classmethod):
                yield f"{path}.{name}", member


def changed(before: Names, after: Names) -> list[str]:
    return sorted(name for name, value in before.items() if name in after and after[name] is not value)


class ByHand(StepsByHand, Classifier):
    pass


class Fails(Callback):
    def __init__(self, *, also_when_told: bool = False) -> None:
        self.also_when_told = also_when_told

    def on_train_batch_end(self, *_: Any) -> None:
        raise ValueError("The run fails.")

    def on_exception(self, *_: Any) -> None:
        if self.also_when_told:
            raise ValueError("And so does what is told of it.")


def fit(callbacks: list[Callback], model: Any = None, **options: Any) -> None:
    strategy = lightning_dpx.DPXStrategy(**options)
    trainer = make_trainer(strategy=strategy, devices=2, callbacks=callbacks, max_epochs=1, accelerator="cpu")
    trainer.fit(model or seeded(), make_loader(), make_loader())


@pytest.fixture(scope="module")
def before() -> Names:
    """After a run of each kind, which imports what is imported only then."""
    make_trainer(max_epochs=1, limit_train_batches=1).fit(seeded(), make_loader(), make_loader())
    fit([], execution="threads")
    return functions_of_libraries()


@pytest.mark.parametrize(
    "options",
    [{}, {"execution": "inline"}, {"execution": "threads"}, {"memory_budget": "64MiB"}, {"model": ByHand}],
    ids=str,
)
def test_names_of_libraries_mean_after_a_fit_what_they_meant_before(before: Names, options: dict[str, Any]) -> None:
    kind = options.pop("model", None)
    fit([], kind() if kind else None, **options)
    assert not changed(before, functions_of_libraries())


@pytest.mark.parametrize("also_when_told", [False, True])
def test_they_do_after_a_fit_that_failed(before: Names, also_when_told: bool) -> None:
    with pytest.raises(ValueError, match=r"fails|what is told"):
        fit([Fails(also_when_told=also_when_told)])
    assert not changed(before, functions_of_libraries())


def test_the_rank_of_functions_for_rank_zero_is_that_of_the_process_again() -> None:
    ranks: list[type] = []

    class Looks(Callback):
        def on_train_start(self, *_: Any) -> None:
            ranks.append(type(vars(rank_zero_only)["rank"]))

    with pytest.raises(ValueError, match=r"fails|what is told"):
        fit([Looks(), Fails(also_when_told=True)])
    assert ranks[0] is not int, "inside of a run it knows the running replica"
    assert type(rank_zero_only.rank) is int
    assert type(of_pytorch.rank) is int


class SwitchesAttention(Classifier):
    """Slices overlap: the first one leaves its context while the second one is in its own."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            loss: torch.Tensor = super().training_step(batch, batch_idx)
            time.sleep(0.01 * (1 + self.global_rank))
        return loss


@pytest.mark.usefixtures("hardware")
def test_settings_that_a_step_puts_back_are_what_they_were() -> None:
    before = torch.backends.cuda.flash_sdp_enabled()
    trainer = make_trainer(strategy=lightning_dpx.DPXStrategy(execution="threads"), devices=2, max_epochs=1)
    try:
        trainer.fit(SwitchesAttention(), make_loader(), make_loader())
        assert torch.backends.cuda.flash_sdp_enabled() == before
    finally:
        torch.backends.cuda.enable_flash_sdp(before)
        torch.backends.cuda.enable_mem_efficient_sdp(True)


class CachesWeights(Classifier):
    """Copies of a parametrized layer have one cache: a slice that overlaps with another one finds its weights there."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.net[0])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with parametrize.cached():
            loss: torch.Tensor = super().training_step(batch, batch_idx)
            time.sleep(0.01)
        return loss


@pytest.mark.usefixtures("hardware")
def test_slices_find_no_weights_of_each_other_in_a_cache_of_parametrizations() -> None:
    def trained(**options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = CachesWeights()
        make_trainer(max_epochs=1, **options).fit(model, make_loader(32), make_loader(4))
        return model.state_dict()

    ours = trained(strategy=lightning_dpx.DPXStrategy(execution="threads"), devices=2)
    assert_equal(ours, trained())
