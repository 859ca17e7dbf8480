"""What ``example_input_array`` tells of memory at setup."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from tests.conftest import assert_equal, make_trainer
from tests.lightning.memory.test_planning import Tower, fit, loader

# The tower counts what every replica sees.
pytestmark = pytest.mark.filterwarnings("ignore:dpx. .*_step on .* is not what it is on one device.*self.seen")


def rows(num_rows: int) -> Any:
    return next(iter(loader(num_rows)))


class Watched(Tower):
    """Notes when data are asked for, and what forward sees."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.loaded = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x.flatten(0, -2)))

    def train_dataloader(self) -> DataLoader[Any]:
        self.loaded = True
        return loader()

    val_dataloader = train_dataloader


def watched(example: torch.Tensor | None = None, **options: Any) -> Watched:
    torch.manual_seed(0)
    model = Watched(**options)
    if example is not None:
        model.example_input_array = example
    return model


def refused(model: Watched, **options: Any) -> BaseException:
    """Why a fit is refused, before any data."""
    with pytest.raises((dpx.PlanError, dpx.UnsupportedError)) as error:
        make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(**options)).fit(model)
    assert not model.loaded
    return error.value


def told(caplog: Any, start: str) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith(f"dpx: {start}")]


def test_an_example_input_of_more_rows_than_a_batch_has_refuses_nothing(caplog: Any) -> None:
    with caplog.at_level("INFO"):
        model = watched(torch.randn(5_000, 128))
        ours = fit(model, strategy=dpx.DPXStrategy(memory_budget="4.5MiB"))
    assert_equal(ours, fit(watched(), strategy="dpx"), bitwise=True)
    (line,) = told(caplog, "without a plan, one row of example_input_array takes")
    assert "on cpu that memory_budget leaves for activations; the first batch is planned" in line
    assert len(told(caplog, "memory of cpu")) == 1


@pytest.mark.parametrize("kind", ["no grad", "no batch dim", "named batch dims"])
def test_an_example_input_that_tells_nothing_is_no_obstacle(kind: str, caplog: Any) -> None:
    class Closed(Watched):
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    torch.manual_seed(0)
    model = Closed() if kind == "no grad" else watched()
    model.example_input_array = torch.tensor(1.0) if kind == "no batch dim" else torch.randn(2, 128)
    options: dict[str, Any] = {"batch_dim": {"0": 0, "1": 0}} if kind == "named batch dims" else {}
    with caplog.at_level("INFO"):
        fit(model, strategy=dpx.DPXStrategy(memory_budget="4.5MiB", **options))
    assert told(caplog, "example_input_array tells nothing about memory before the first batch")
    assert told(caplog, "memory of cpu")
