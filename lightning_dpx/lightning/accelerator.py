"""``Trainer(accelerator="sim", devices=4)``: simulated devices as a Lightning accelerator."""

from collections.abc import Sequence
from typing import Any

import torch

from lightning_dpx.lightning.lightning_api import Accelerator, MisconfigurationException
from lightning_dpx.simulate import MAX_DEVICES, is_loaded, simulate

DEFAULT_DEVICES = 8


class SimAccelerator(Accelerator):
    """Devices made by :func:`lightning_dpx.simulate`, or by this class where it was not called."""

    def setup_device(self, device: torch.device) -> None:
        """Makes the root device current.

        Raises:
            MisconfigurationException: Lightning's own strategies place a module on the CPU instead.
        """
        if device.type != "sim":
            raise MisconfigurationException(
                f"accelerator='sim' was given the device {device}: Lightning's own strategies do not know simulated "
                "devices. Use strategy='dpx', for one device as well."
            )
        torch.get_device_module("sim").set_device(device)

    def teardown(self) -> None:
        """The devices stay."""

    @staticmethod
    def parse_devices(devices: int | str | Sequence[int]) -> list[int]:
        """Indices: ``4`` and ``"4"`` are the first four, ``-1`` and ``"-1"`` all, ``[0, 2]`` and ``"0,2"`` those.

        Raises:
            MisconfigurationException: no devices, or one that is not there.
        """
        if isinstance(devices, str):
            devices = [int(part) for part in devices.split(",") if part] if "," in devices else int(devices)
        # Names, as `dpx plan` and a ReplicaGroup take them.
        if not isinstance(devices, int) and not all(isinstance(index, int) for index in devices):
            raise MisconfigurationException(
                f"devices={devices!r} is not allowed: a Trainer takes a number of simulated devices, or their indices, "
                "such as [0, 1]."
            )
        wanted = list(range(devices)) if isinstance(devices, int) else list(devices)
        # Where simulate() was not called, a Trainer is the first to need devices. An index that is
        # too high is refused below, with the number of those that there are.
        if not is_loaded():
            simulate(min(max([*wanted, DEFAULT_DEVICES - 1]) + 1, MAX_DEVICES))
        count = torch.get_device_module("sim").device_count()
        indices = list(range(count)) if devices == -1 else wanted
        if not indices or not all(0 <= index < count for index in indices):
            raise MisconfigurationException(
                f"devices={devices!r} asks for simulated devices {indices}, but there are 0 to {count - 1}; "
                f"make more with lightning_dpx.simulate(num_devices), at most {MAX_DEVICES}."
            )
        return indices

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """One device per index."""
        return [torch.device("sim", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        """All that there are."""
        if is_loaded():
            return int(torch.get_device_module("sim").device_count())
        return DEFAULT_DEVICES

    @staticmethod
    def is_available() -> bool:
        """Always; making the devices says what is missing."""
        return True

    @staticmethod
    def name() -> str:
        """The name in ``Trainer(accelerator=...)``."""
        return "sim"

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """Bytes, under the names of CUDA's allocator."""
        stats: dict[str, Any] = torch.get_device_module("sim").memory_stats(device)
        return stats

    @classmethod
    def register_accelerators(cls, accelerator_registry: Any) -> None:
        """Adds "sim"; doing it twice changes nothing."""
        # The registry raises for a name that it has already.
        if "sim" not in accelerator_registry.available_accelerators():
            accelerator_registry.register("sim", cls, description="simulated devices")
