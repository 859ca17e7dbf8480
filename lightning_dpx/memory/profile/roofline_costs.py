"""A step that runs here, priced for another device: seconds from its rates, bytes inside of operators by rule."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from lightning_dpx.devices import counts_by_its_clock, is_host
from lightning_dpx.memory.execute.recipes import NotRecomputable
from lightning_dpx.memory.execute.recomputation import repeat
from lightning_dpx.memory.execute.values import Value
from lightning_dpx.memory.execute.whole_call_replays import WholeCallReplay
from lightning_dpx.memory.profile.accelerator_ops import AsOnAccelerators
from lightning_dpx.memory.profile.bookkeeping import Bookkeeping, measured_bookkeeping
from lightning_dpx.memory.profile.costs import CostModel, Trial
from lightning_dpx.memory.profile.known_numbers import with_known_numbers
from lightning_dpx.memory.profile.probe import Probe, Probed, as_probed
from lightning_dpx.memory.profile.replay_trials import TimedReplay, WatchedReplay
from lightning_dpx.memory.profile.roofline import OperatorSeconds, Rates, rates_of
from lightning_dpx.memory.tracing.allocator_account import OperatorMemory
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.memory.tracing.scratch import inside_bytes
from lightning_dpx.memory.tracing.storage_ledger import Allocation
from lightning_dpx.python_objects.leave_no_trace import CopyOnWrite


class RatedTrace(MemoryTrace):  # type: ignore[no-untyped-call]
    """A trace with times from rates; what operators take inside is by rule where no device tells.

    Args:
        device: Where the tensors of the step are.
        target: What is planned for.
        writes: What is told before an operator writes to a tensor.
        fake: Whether these tensors are, so that operators take nothing.
        numbers: Whether small whole numbers are real all the same.
        probe: What tries operators of fakes for real, where the target is there.

    Attributes:
        rates: Of the target; others may be put in their place.
    """

    # All tensors of the step may be fakes here. Elsewhere they are a look of torch's own at what
    # an operator would give, and no memory of the step.
    _sees_fakes = True

    def __init__(
        self,
        device: torch.device,
        target: torch.device,
        writes: CopyOnWrite | None = None,
        *,
        fake: bool = False,
        numbers: bool = False,
        probe: Probe | None = None,
    ) -> None:
        super().__init__(device, writes)
        self._numbers = numbers
        self.rates: Rates = rates_of(target)
        self._target = target
        self._probe = probe
        self._probed: Probed | None = None  # the operator that is being looked at
        self._by_rule = fake or device.type != target.type
        # The account of this device tells nothing of what the operators of another one take
        # inside.
        if self._by_rule:
            self.follow_storages_only()

    def observed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float, OperatorMemory]:
        """The results of an operator, and what it would take."""
        run = partial(with_known_numbers, func) if self._numbers else func
        # How long it took here is of no use: the operator computed nothing, or on another device.
        out, _, taken = super().observed(run, args, kwargs)
        self._probed = None if self._probe is None else self._probe.of(func, args, kwargs, out)
        if self._probed is not None:
            out = as_probed(out, self._probed)
            taken = self._probed.taken
        return out, self.rates.seconds(func, args, kwargs, out), taken

    def _inside(self, func: Any, args: Any, out: Any, counted: int) -> int:
        if self._by_rule and self._probed is None:
            return inside_bytes(func, args, out, self._target.type)
        return super()._inside(func, args, out, counted)


class RooflineCosts(CostModel):
    """Runs a step here, for another device: times come from that device's rates.

    Args:
        here: Where the tensors of the step are.
        target: What is planned for.
        part: As :class:`CostModel` takes it.
    """

    is_sure_at_once: bool = True

    def __init__(self, here: torch.device, target: torch.device, *, part: tuple[int, int] | None = None) -> None:
        super().__init__(here, part=part)
        self.rates: Rates = rates_of(target)
        self._target = target
        self.offloads: bool = not is_host(target)
        self.hides_copies = not counts_by_its_clock(target)
        self.elsewhere: bool = here.type != target.type
        self.times_steps = False  # nothing runs as fast here as it would there
        self._costs = OperatorSeconds(self.rates)

    def as_on_target(self) -> AbstractContextManager[Any]:
        """A context for a forward, which keeps in there what the target's operators would."""
        if self.elsewhere and self.offloads:
            return AsOnAccelerators(self._target)
        return nullcontext()

    def _watch(self) -> RatedTrace:
        return RatedTrace(self.device, self._target, self._writes)

    def trial_of(self, value: Value) -> Trial:
        """The tensor of ``value``, made again, and what that would take.

        Raises:
            NotRecomputable: the device has another operator for it, which no recipe repeats.
        """
        # Nodes with this in their name belong to kernels that only the CPU has, such as its
        # attention; the target saves other tensors, for other nodes.
        if self.elsewhere and "ForCpu" in value.operator:
            raise NotRecomputable("the device that is planned for has another operator")
        self._costs.seconds = 0.0
        trace = self._watch()
        with trace, self._costs:
            tensor = repeat(value)
        return Trial(tensor, self._costs.seconds, max(trace.curve, default=0))

    def timed_replay(self, replay: WholeCallReplay) -> TimedReplay:
        """Makes a call again; its time is that of its operators there."""
        self._costs.seconds = 0.0
        with self._watch(), self._costs:
            found = replay.replay()
        return TimedReplay(found, self._costs.seconds)

    def watched_replay(self, replay: WholeCallReplay) -> WatchedReplay:
        """Makes a call again, with a trace of the memory that it takes there."""
        trace = self._watch()
        with trace, self._costs:
            found = replay.replay()
        return WatchedReplay(found, trace)

    def bookkeeping(self) -> Bookkeeping:
        """The same as here on the host; nothing for devices, which work while Python does."""
        if self.offloads:
            return Bookkeeping()
        return measured_bookkeeping()

    def compressed(self, value: Value, span: Allocation) -> tuple[int, float] | None:
        """Bytes and seconds of a compressed mask on the host; other targets compress nothing."""
        if self.offloads or not self.is_mask(value, span):
            return None
        return self._mask_costs(value)

    def is_mask(self, value: Value, span: Allocation) -> bool:
        """Whether it is one number or zero everywhere."""
        return super().compressed(value, span) is not None

    def _mask_costs(self, value: Value) -> tuple[int, float]:
        mask = value.held()
        return mask.numel(), 3 * mask.nbytes / self.rates.bytes

    def copy_seconds(self, tensor: torch.Tensor) -> float:
        """Seconds of a copy to the host's memory or back, by the target's rate."""
        return tensor.nbytes / self.rates.host_bytes

    def offloading_room(self) -> int:
        """No bytes: what the host of that device has free is not known here."""
        return 0
