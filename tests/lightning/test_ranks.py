"""Inside a step a replica is a rank, outside the process is."""

from typing import Any

import pytest

import lightning_dpx as dpx
from tests.conftest import Classifier, make_loader, make_trainer

pytestmark = pytest.mark.usefixtures("hardware")


class Ranks(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rank", float(self.global_rank), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("world", float(self.trainer.world_size), reduce_fx="min", on_step=False, on_epoch=True)
        self.log("rows_in_all", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_inside_a_step_a_replica_is_a_rank(execution) -> None:
    trainer = make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=4)
    trainer.fit(Ranks(), make_loader(num_rows=32), make_loader(num_rows=32))
    logged = trainer.callback_metrics
    assert (logged["rank"].item(), logged["world"].item(), logged["rows_in_all"].item()) == (3, 4, 32)
    assert (trainer.global_rank, trainer.world_size) == (0, 1)
