"""What differs between device types, seen from outside."""

import os

import pytest
import torch

from lightning_dpx.devices import free_bytes


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="not Linux")
def test_files_in_memory_do_not_take_the_host_s_room() -> None:
    """Linux gives their pages up for whoever asks; on a host that reads much, hardly any other page is free."""
    with open("/proc/meminfo", encoding="ascii") as file:
        available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    assert free_bytes(torch.device("cpu")) == pytest.approx(available, rel=0.2)
