"""At setup, before any batch is there: whether a memory budget can be met at all."""

import gc
from collections.abc import Callable, Sequence

from lightning_dpx.errors import BudgetError
from lightning_dpx.lightning.lightning_api import rank_zero_info
from lightning_dpx.lightning.memory.device_rooms import DeviceRooms
from lightning_dpx.lightning.memory.profiled_steps import by_device
from lightning_dpx.lightning.memory.profiling import devices_of
from lightning_dpx.lightning.memory.static import StaticMemory
from lightning_dpx.memory import Planner, Profile, plan_devices
from lightning_dpx.replicas import BatchSlice, Replica, ReplicaSet
from lightning_dpx.units import format_mib


def check_feasible(
    rooms: DeviceRooms,
    planner: Planner,
    replicas: ReplicaSet,
    static: Callable[[Sequence[BatchSlice]], StaticMemory],
    example: Callable[[Replica], list[Profile]],
    *,
    may_be_idle: bool = False,
) -> None:
    """Refuses a budget that leaves no room for activations, or not for those of one row of an example.

    Args:
        rooms: The budgets, and what they leave.
        planner: Who decides.
        replicas: The replicas.
        static: What a step needs beside activations.
        example: What at least a step of a replica takes on each of its devices; nothing if that is not known.
        may_be_idle: Whether the first batch tells which parameters get no gradient, and then nothing is kept for them.

    Raises:
        BudgetError: it does.
    """
    gc.collect()  # what is there in reference cycles only is no reason
    # No rows are known yet. Reversed, so that the first replica of each device is the
    # one that stays in the dict.
    firsts = {replica.device: BatchSlice(replica, 0, None) for replica in reversed(replicas.replicas)}
    held = static(list(firsts.values()))
    all_devices = by_device(list(firsts.values()))
    limits = {device: rooms.budgets.limit(device, replicas.devices) for device in all_devices}
    try:
        free = {device: rooms.room(device, held, limit) for device, limit in limits.items()}
    except BudgetError:
        # The first batch tells what its step does not use, and refuses the rest.
        if may_be_idle and all(held.present(device) < limit for device, limit in limits.items()):
            return
        raise
    for home, batch_slice in firsts.items():
        devices = devices_of(batch_slice.replica)
        profiles = example(batch_slice.replica)
        if not profiles:
            return  # what one of them cannot try, none can
        try:
            # The plan itself is dropped: an example row says that a budget is too small,
            # and nothing about a batch.
            plan_devices(replicas.root.module, profiles, [free[device] for device in devices], planner)
        except BudgetError as error:
            device = devices[error.device_index]
            rooms.explain(error, device, limits[device] - free[device], limits[device], 1)
            error.add_note("That is for one row of example_input_array, in forward and backward alone.")
            raise
        rank_zero_info(
            f"dpx: without a plan, one row of example_input_array takes {format_mib(profiles[0].peak)} of the "
            f"{format_mib(free[home])} on {home} that memory_budget leaves for activations; "
            "the first batch is planned."
        )
