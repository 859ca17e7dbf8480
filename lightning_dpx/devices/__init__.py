"""What differs between device types. No other part of the package asks a device for its type."""

from lightning_dpx.devices.generators import (
    RandomStates,
    host_random_digest,
    host_random_state,
    seed_apart,
)
from lightning_dpx.devices.host_room import HostFullError, HostRoom
from lightning_dpx.devices.identity import (
    accelerators,
    autocast_types,
    canonical_device,
    device_beside,
    device_context,
    distinct_devices,
    is_host,
    named_devices,
    num_usable_cpus,
    present_devices,
    spare_devices,
)
from lightning_dpx.devices.links import (
    copy_values,
    default_backend,
    has_nccl,
    linked_groups,
    moved,
    num_direct_links,
    synchronize,
    wire_device,
)
from lightning_dpx.devices.memory import (
    NO_LIMIT,
    Capacity,
    allocated_and_peak,
    capacity_of,
    free_bytes,
    free_garbage,
    keeps_statistics,
    reset_peak_memory,
)
from lightning_dpx.devices.offload import OffloadedTensor, pins_offloaded
from lightning_dpx.devices.out_of_memory import is_out_of_memory, raises_out_of_memory
from lightning_dpx.devices.streams import chosen_streams, stream_context
from lightning_dpx.devices.timing import Stopwatch, clock_of, counts_by_its_clock, is_modelled, modelled_rates
from lightning_dpx.devices.workspaces import keeps_workspaces, take_workspaces

__all__ = [
    "Capacity",
    "HostFullError",
    "HostRoom",
    "NO_LIMIT",
    "OffloadedTensor",
    "RandomStates",
    "Stopwatch",
    "accelerators",
    "allocated_and_peak",
    "autocast_types",
    "canonical_device",
    "capacity_of",
    "chosen_streams",
    "clock_of",
    "copy_values",
    "counts_by_its_clock",
    "default_backend",
    "device_beside",
    "device_context",
    "distinct_devices",
    "free_bytes",
    "free_garbage",
    "has_nccl",
    "host_random_digest",
    "host_random_state",
    "is_host",
    "is_modelled",
    "is_out_of_memory",
    "keeps_statistics",
    "keeps_workspaces",
    "linked_groups",
    "modelled_rates",
    "moved",
    "named_devices",
    "num_direct_links",
    "num_usable_cpus",
    "pins_offloaded",
    "present_devices",
    "raises_out_of_memory",
    "reset_peak_memory",
    "seed_apart",
    "spare_devices",
    "stream_context",
    "synchronize",
    "take_workspaces",
    "wire_device",
]
