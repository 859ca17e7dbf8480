"""Replicas that are neighbors on one device take their slices as one."""

import pytest
import torch

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning.memory.dry_run.settings import Settings, with_merged_replicas


def on(*names: str) -> tuple[torch.device, ...]:
    return tuple(map(torch.device, names))


def test_neighbors_on_one_device_are_one_and_have_the_rows_of_both() -> None:
    settings = Settings(devices=on("cuda:0", "cuda:0", "cuda:1"), workload=[1, 2, 3], micro_batches=[2, 3, 4])
    merged = with_merged_replicas(settings)
    assert merged.devices == on("cuda:0", "cuda:1")
    assert merged.workload[0] == merged.workload[1]
    assert merged.micro_batches == [2, 4]


def test_settings_of_different_devices_stay_as_they_are() -> None:
    settings = Settings(devices=on("cuda:0", "cuda:1"))
    assert with_merged_replicas(settings) is settings


def test_a_device_in_two_places_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cuda:0 is named in two places"):
        with_merged_replicas(Settings(devices=on("cuda:0", "cuda:1", "cuda:0")))
