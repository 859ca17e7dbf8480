"""Devices of a step, together."""

import pytest

import lightning_dpx as dpx
from tests.commands.test_plan import Shallow
from tests.lightning.tuning.test_batch_size_tuner import Rows


def test_replicas_on_one_processor_take_their_slices_as_one() -> None:
    alone, both = (
        dpx.tune(Shallow(), Rows(), devices=devices, batch_sizes=(256,)).batch_sizes[0]
        for devices in (["cuda:0"], ["cuda:0", "cuda:0"])
    )
    assert both.compute == pytest.approx(alone.compute)
    assert [device.peak for device in both.devices] == [device.peak for device in alone.devices]
