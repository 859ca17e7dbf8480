"""A step on fake tensors: sizes without memory, for a batch, a model or a device that is not there.

Forward and backward run as always, operator by operator and through autograd's own engine, so every storage comes and
goes as in a real step; only nothing is computed. [Note: where fakes are] They are on the device that is planned for
where torch can reach it, else on the CPU: a build of torch without a device's runtime ends the process as soon as
autograd meets a tensor that claims to be there. Sizes are the same, and where the operators are not, they are replaced
(:class:`AsOnAccelerators`) or not trusted.

Memory is taken on the host only, where operators are tried one by one (:mod:`lightning_dpx.memory.profile.probe`).

What no fake can tell: numbers, but for small whole ones (:mod:`lightning_dpx.memory.profile.known_numbers`). So it
is not proved that a repeated operator gives the same ones; masks are known from the operator that draws them, and times
from FLOPs and bytes. Nor can a step look at its other numbers (``.item()``, a branch on a tensor), or call an operator
that has no rule for fakes. What libraries of other devices need beside is estimated, which kernel attention takes is
assumed, and ``torch.autocast`` of an absent device does nothing.
"""

import gc
import traceback
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from lightning_dpx.devices import canonical_device, counts_by_its_clock, is_host
from lightning_dpx.errors import DPXError
from lightning_dpx.memory.execute.recipes import NotRecomputable
from lightning_dpx.memory.execute.replays import Replay
from lightning_dpx.memory.execute.values import Value, repeat
from lightning_dpx.memory.profile.accelerator_ops import AsOnAccelerators
from lightning_dpx.memory.profile.bookkeeping import Bookkeeping, measured_bookkeeping
from lightning_dpx.memory.profile.costs import CostModel, Trial
from lightning_dpx.memory.profile.known_numbers import is_known, with_known_numbers
from lightning_dpx.memory.profile.probe import Probe, Probed, as_probed
from lightning_dpx.memory.profile.replay_trials import TimedReplay, WatchedReplay
from lightning_dpx.memory.profile.roofline import OperatorSeconds, Rates, rates_of
from lightning_dpx.memory.tracing.allocator_account import OperatorMemory
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.memory.tracing.scratch import inside_bytes
from lightning_dpx.memory.tracing.storage_ledger import Allocation
from lightning_dpx.python_objects.leave_no_trace import CopyOnWrite, untouched
from lightning_dpx.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    buffers_of,
    disable_current_modes,
    gathered_bytes,
    is_traceable_wrapper_subclass,
    mark_as_parameter,
    on_distributed_tensors,
    parameters_of,
    schema_of,
    tree_map_only,
    with_part,
)

aten: Any = torch.ops.aten
NO_ANSWER = (RuntimeError, TypeError, ValueError, AssertionError)  # of torch, where a fake has none
_T = TypeVar("_T")
_G = TypeVar("_G", covariant=True)  # what a run gives


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
            return AsOnAccelerators()
        return nullcontext()

    def _watch(self) -> RatedTrace:
        return RatedTrace(self.device, self._target, self._writes)

    def tried(self, value: Value) -> Trial:
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

    def timed_replay(self, replay: Replay) -> TimedReplay:
        """Makes a call again; its time is that of its operators there."""
        self._costs.seconds = 0.0
        with self._watch(), self._costs:
            found = replay.replay()
        return TimedReplay(found, self._costs.seconds)

    def watched_replay(self, replay: Replay) -> WatchedReplay:
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


class FakeTrace(RatedTrace):  # type: ignore[no-untyped-call]
    """A trace of fakes, which also notes what cannot be read from them later.

    Attributes:
        masks: Storages with zeros and one other number, as a dropout draws them.
        resized: Parameters of ``fully_shard``, whose storages torch resizes, which no operator tells.
        resized_bytes: Of those at every event; empty where there are none.
    """

    def __init__(self, device: torch.device, target: torch.device, probe: Probe | None, *, numbers: bool) -> None:
        super().__init__(device, target, fake=True, probe=probe, numbers=numbers)
        self.masks: set[Allocation] = set()
        self.resized: list[Any] = []
        self.resized_bytes: list[int] = []
        self._ledger.before_event = self._note_resized

    def _note_resized(self) -> None:
        if self.resized:
            self.resized_bytes.append(gathered_bytes(self.resized))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # fakes are asked for their device by an operator
            return func(*args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if schema_of(func).is_mutable and args and isinstance(args[0], torch.Tensor):
            allocation = self._made(args[0])
            # A dropout fills its mask with draws, all of it, and scales it then. Any other write
            # makes something else of it.
            if func in _IN_PLACE and allocation is not None and args[0].nbytes == allocation.num_bytes:
                self.masks.add(allocation)
            elif not _scales(func, args) and allocation is not None:
                self.masks.discard(allocation)
        elif _fills(func, args) and (allocation := self._made(out)) is not None:
            self.masks.add(allocation)
        return out

    def observed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float, OperatorMemory]:
        """Refuses tensors on absent devices, before autograd sees them; see [Note: where fakes are]."""
        if func is aten.mkldnn_rnn_layer.default:
            raise RuntimeError("what a recurrent layer's library keeps is not known to fake tensors")
        out, seconds, taken = super().observed(func, args, kwargs)
        results = out if isinstance(out, list | tuple) else (out,)
        for leaf in results:
            if isinstance(leaf, torch.Tensor) and leaf.device.type not in (self._device.type, "cpu", "meta"):
                raise RuntimeError(f"the step makes a tensor on {leaf.device}; write device=x.device, or self.device")
        return out, seconds, taken

    def _made(self, tensor: torch.Tensor) -> Allocation | None:
        return self.allocation_of(tensor.untyped_storage())


_IN_PLACE = {aten.bernoulli_.float, aten.zero_.default, aten.fill_.Scalar}
_CONSTANTS = {
    aten.zeros, aten.zeros_like, aten.new_zeros, aten.ones, aten.ones_like, aten.new_ones, aten.full, aten.full_like,
    aten.new_full,
}  # fmt: skip


def _fills(func: Any, args: Any) -> bool:
    """Whether an operator makes a tensor of zeros and one other number."""
    # Truth values in a dtype of numbers are zeros and ones.
    return func.overloadpacket in _CONSTANTS or (func is aten._to_copy.default and args[0].dtype is torch.bool)


def _scales(func: Any, args: Any) -> bool:
    """Whether an operator in place multiplies by a number."""
    if func not in (aten.div_.Scalar, aten.div_.Tensor, aten.mul_.Scalar, aten.mul_.Tensor):
        return False
    return not isinstance(args[1], torch.Tensor) or args[1].ndim == 0


class FakeCosts(RooflineCosts):
    """Watches a step on fake tensors.

    Args:
        mode: Whose fakes they are.
        here: The device that they claim to be on.
        target: What is planned for.
        numbers: Whether small whole numbers stay real.
    """

    kinds = (torch.Tensor, FakeTensor)

    def __init__(
        self,
        mode: FakeTensorMode,
        here: torch.device,
        target: torch.device,
        *,
        numbers: bool,
    ) -> None:
        super().__init__(here, target)
        self._mode = mode
        self._numbers = numbers
        self._traces = list[FakeTrace]()
        # Of an accelerator nothing is taken while it is planned for: others may be at work there.
        self._probe = Probe(here, self.rates) if is_host(target) else None
        inside = "by rule" if self._probe is None else "tried one by one"
        self.basis: str = (
            f"from fake tensors for {target}: times by FLOPs and bytes, what operators take inside {inside}, "
            "recomputation not proven here"
        )

    def preserve_module_state(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Restores all but tensors, which are fakes in the module's place."""
        return untouched(module, tensors=False, reach=self.reach_of(module))

    def trace(self) -> MemoryTrace:
        """Follows the storages of a run."""
        # All of them are kept: what their runs have left behind is looked for at the very end.
        self._traces.append(FakeTrace(self.device, self._target, self._probe, numbers=self._numbers))
        return self._traces[-1]

    def _watch(self) -> RatedTrace:
        return RatedTrace(self.device, self._target, fake=True, probe=self._probe, numbers=self._numbers)

    @property
    def left_behind(self) -> int:
        """How many of the storages that were watched are still there."""
        count = 0
        for trace in self._traces:
            count += sum(allocation.died is None for allocation in trace.allocations)
        return count

    @contextmanager
    def trying(self) -> Iterator[None]:
        """What operators make when they are repeated is fake, too."""
        with self._mode:
            yield

    def is_same(self, again: torch.Tensor, original: torch.Tensor) -> bool:
        """True: fakes have no numbers to compare, so it is assumed."""
        return True

    def is_mask(self, value: Value, span: Allocation) -> bool:
        """Whether a dropout has drawn it."""
        # The last trace is that of the run whose values are tried.
        return span in self._traces[-1].masks


def fake_device_for(target: torch.device) -> torch.device:
    """Where the fakes of a step for ``target`` are; see [Note: where fakes are]."""
    if is_host(target) or not torch.get_device_module(target).is_available():
        return torch.device("cpu")
    # One that is beyond those of this machine: autograd's thread of it would end the process.
    if target.index is not None and target.index >= torch.get_device_module(target).device_count():
        return torch.device(target.type, 0)
    return canonical_device(target)


class _Fakes:
    """The fakes of a step's tensors: one for one tensor, however often it is reached, so that tied ones stay tied.

    Args:
        mode: Whose fakes they are.
        here: Where they are.
        numbers: Whether small whole numbers stay real.
        sharded: Whether spread parameters stay so, with fakes for the parts that are here.
    """

    def __init__(self, mode: FakeTensorMode, here: torch.device, *, numbers: bool, sharded: bool) -> None:
        self._mode = mode
        self._here = here
        self._numbers = numbers
        self._sharded = sharded
        self._known: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor, or the copy of numbers that stay real."""
        if id(tensor) not in self._known:
            self._known[id(tensor)] = self._made(tensor)
        return self._known[id(tensor)]

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._sharded and is_traceable_wrapper_subclass(tensor):
            return _fake_parts_of(tensor, self._mode)
        if self._numbers and is_known(tensor):
            return _copy_of(tensor)
        return _fake_of(tensor, self._here)

    def clear(self) -> None:
        """Forgets all of them."""
        self._known.clear()


@contextmanager
def faked(
    module: nn.Module,
    batch: Any,
    target: torch.device,
    here: torch.device,
    *,
    numbers: bool = True,
    sharded: bool = False,
) -> Iterator[tuple[Any, FakeCosts]]:
    """Inside, the parameters and buffers of ``module`` are fakes, and it works on fakes and small whole numbers only.

    Its tensors may also be on the meta device, or fakes of another mode. All its attributes are put back.

    Args:
        module: Any module.
        batch: Any nested structure with tensors, real ones or not.
        target: What is planned for.
        here: Where the fakes are.
        numbers: Whether small whole numbers stay real, with which the step takes the branches that it really does.
        sharded: Whether parameters that ``fully_shard`` has spread stay so, with fakes for the parts that are here.

    Yields:
        The batch as fakes, and what watches a step on it.

    Raises:
        TypeError: a tensor has no fake: it is sparse, of a subclass, not initialized, or in a ScriptModule.
    """
    if any(isinstance(child, torch.jit.ScriptModule) for child in module.modules()):
        raise TypeError("a ScriptModule takes no fake tensors")
    # Real tensors meet fakes in operators: whole numbers that stay real, and constants that are no
    # attributes of a module.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    numbers = numbers and is_host(here)
    costs = FakeCosts(mode, here, target, numbers=numbers)
    fakes = _Fakes(mode, here, numbers=numbers, sharded=sharded)
    with _put_back(module), mode:
        # All are found before any is replaced, so that the walk meets no fakes.
        tensors: list[tuple[nn.Module, str, torch.Tensor]] = []
        for child in module.modules():
            tensors += _tensors_of(child)
        for child, name, _ in tensors:
            for registered in (parameters_of(child), buffers_of(child)):
                if name in registered:
                    registered[name] = None
        if not sharded:
            module.to(here)  # there is nothing to move, but a LightningModule remembers the device
        for child, name, tensor in tensors:
            setattr(child, name, fakes.of(tensor))  # recurrent layers notice
        yield tree_map_only(torch.Tensor, fakes.of, batch), costs
    tensors.clear()
    fakes.clear()
    # Fakes that only cycles hold have been left by nothing, and would be told of below.
    gc.collect()
    _warn_of(costs.left_behind)


def _warn_of(left_behind: int) -> None:
    """Tells of fakes that outlive a step."""
    if left_behind:
        warnings.warn(
            f"The step left {left_behind} fake tensors in something outside of the module that outlives it, such "
            "as a cache; do not run real steps in this process.",
            stacklevel=7,
        )


class RunsOnFakes(Protocol[_G]):
    """A step on fake tensors."""

    def __call__(self, *, numbers: bool) -> _G:
        """What it gives; ``numbers`` says whether small whole numbers are real all the same, as :func:`faked` does."""


def with_or_without_numbers(run: RunsOnFakes[_T]) -> _T:
    """What ``run`` gives with small whole numbers that stay real, as :func:`faked` takes it; if need be, without."""
    try:
        return run(numbers=True)
    except DPXError:  # about the step itself, whichever built-in error it is as well
        raise
    except NO_ANSWER as error:  # it may be that numbers of fakes were to be written into real ones
        # Its frames hold fakes of the run that was broken off.
        traceback.clear_frames(error.__traceback__)
        return run(numbers=False)


def _tensors_of(child: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """The tensors that ``child`` itself holds, with their names; also plain attributes."""
    found = []
    for held in (parameters_of(child), buffers_of(child), vars(child)):
        for name, entry in held.items():
            if isinstance(entry, torch.Tensor):
                found.append((child, name, entry))
    return found


@contextmanager
def _put_back(module: nn.Module) -> Iterator[None]:
    """Restores on exit every attribute of every submodule, and the contents of plain containers among them."""
    states: list[tuple[Any, Any]] = []
    for child in module.modules():
        attributes = vars(child)
        states.append((attributes, dict(attributes)))
        for value in attributes.values():
            if type(value) in (dict, OrderedDict, defaultdict):
                states.append((value, dict(value)))
            elif type(value) in (list, set, deque):
                states.append((value, list(value)))
    try:
        yield
    finally:
        # Filled again instead of replaced: others may hold the same dict or list.
        for container, content in states:
            container.clear()
            if isinstance(container, list | deque):
                container.extend(content)
            else:
                container.update(content)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A real copy, so that what the step writes is not kept."""
    with disable_current_modes():
        return tensor.detach().clone()


def _fake_parts_of(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor like ``tensor``, which is made of others, such as a distributed one, made of fakes of those."""
    # The mode remembers what its fakes are of by weak references, and a tensor that has any cannot be moved to another
    # device; so it is given another one with the same memory.
    made: torch.Tensor = mode.from_tensor(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made


def _fake_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake of ``tensor`` on ``device``, of the mode that is active."""
    if on_distributed_tensors((type(tensor),)):
        part: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
        return with_part(tensor, _fake_of(part, device))
    if type(tensor) not in (torch.Tensor, nn.Parameter, FakeTensor) or tensor.layout is not torch.strided:
        raise TypeError(f"there is no fake of a {type(tensor).__name__} with layout {tensor.layout}")
    # Strides as they are: kernels and views depend on them.
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    made.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        mark_as_parameter(made)
        if tensor.grad is not None and tensor.grad.layout is torch.strided:
            # Backward adds to a gradient that is there, and takes other memory than for a first
            # one.
            made.grad = torch.empty_like(made)
    return made
