"""Every parameter has an owner among the devices, and its gradient is summed there (tensorpack's colocate mode)."""

from collections.abc import Sequence

from lightning_dpx.reducers.base import Dense, register_reducer
from lightning_dpx.reducers.naive import NaiveReducer
from lightning_dpx.reducers.placement import least_loaded_placement


@register_reducer("colocate")
class ColocateReducer(NaiveReducer):
    """Owners are spread by least load; the optimizer's state lives with them, 1/D of it per device.

    With the values that the owners send back, a step moves the bytes of one all-reduce. That is ZeRO's first stage
    (Rajbhandari et al. 2020), one parameter at a time.
    """

    def owners(self, sizes: Sequence[int]) -> list[int]:
        return [self.devices.index(device) for device in least_loaded_placement(sizes, self.distinct_devices)]

    def sum_between_devices(self, lists: Sequence[Dense], targets: Sequence[int]) -> Dense:
        return self._sum_at(lists, targets, targets)
