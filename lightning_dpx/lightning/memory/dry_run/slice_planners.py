"""What each device of a run holds beside activations, and what plans its slice, for slices of any number of rows."""

from collections.abc import Callable, Sequence
from functools import partial

from lightning_dpx.lightning.lightning_api import LightningModule, Trainer
from lightning_dpx.lightning.memory.device_planner import DevicePlanner, Number
from lightning_dpx.lightning.memory.dry_run.device_forecast import beside_micro_batches, lasting_bytes
from lightning_dpx.lightning.memory.dry_run.settings import Settings
from lightning_dpx.lightning.memory.micro_batch_cost import seconds_of_a_micro_batch
from lightning_dpx.memory import MemoryPlan, Profile
from lightning_dpx.memory.plan_cache import found_or_planned

ProfileOfRows = Callable[[int], Profile]


class SlicePlanners:
    """The devices of a run, by their index among those of the settings.

    Args:
        trainer: Of the run.
        module: What is trained.
        settings: Of the run.
        of_slice: The step in one piece, by its rows.
        of_part: A micro-batch, by its rows.
        numbers: For every device, into how many micro-batches its slice is cut.
        inputs: Bytes of a batch.
        num_rows: Its rows.
        others: Bytes that a device which was asked holds beside what has a name.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        settings: Settings,
        of_slice: ProfileOfRows,
        of_part: ProfileOfRows,
        numbers: Sequence[Number],
        *,
        inputs: int,
        num_rows: int,
        others: int,
    ) -> None:
        self._settings = settings
        self._of_slice = of_slice
        self._of_part = of_part
        self._numbers = numbers
        self._inputs = inputs
        self._num_rows = num_rows
        # These are the same for all numbers of rows, and are found once: batch sizes are tried by the dozen.
        self._plan = partial(plan_step, module, settings)
        self._beside = beside_micro_batches(trainer, module, settings)
        self._lasting = lasting_bytes(trainer, module, settings, others)

    def static_bytes(self, index: int, rows: int) -> dict[str, int]:
        """By name, what is there all the time on a device, with a slice of ``rows`` rows."""
        # A batch stays on its device for the whole step, beside what the step itself keeps.
        return {**self._lasting[index], "inputs": self._inputs * rows // self._num_rows}

    def planner(self, index: int, rows: int) -> DevicePlanner:
        """Plans a slice of ``rows`` rows on a device."""
        return DevicePlanner(
            rows,
            self._numbers[index],
            self._of_slice,
            self._of_part,
            self._plan,
            seconds_each=seconds_of_a_micro_batch(self._settings.devices[index]),
            beside=self._beside,
        )


def plan_step(module: LightningModule, settings: Settings, profile: Profile, room: int | None) -> MemoryPlan:
    """The plan of a step for so many bytes of activations, from the cache of the settings where it is there."""
    plan, found = found_or_planned(settings.cache, module, profile, room, settings.planner)
    # Said, as the figures are then those of the run that has filled the cache.
    if found:
        settings.cache.say(f"dpx: the memory plan was found in the cache, in {settings.cache.path_of(found)}.")
    return plan
