"""Draws from generators that all replicas share: whether there are any, and that a batch has those of one device.

What a step draws once (how far to mix, which branch to take, by ``random``, NumPy or ``torch.rand(())``), each slice
would draw for itself. Where a rehearsal has seen that the number of draws does not depend on the rows, every slice
begins where the batch began, and draws the same:

    batch begins at state s --slice 0--> t --put back--> s --slice 1--> t --> goes on at t, as on one device

Where it draws so on its device, slices on other devices begin where the generator of the first device is.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dpx.devices import RandomStates, host_random_state, is_host
from lightning_dpx.python_objects.preserve import GeneratorStates, held_generators, put_back, same_state, state_of
from lightning_dpx.python_objects.process_generators import GeneratorWatch, ProcessGenerators
from lightning_dpx.replicas.same_draws import Draw, has_dropout_off
from lightning_dpx.torch_compat import on_tensors_of_tensors


@dataclass(frozen=True, slots=True)
class SeenGenerators:
    """Generators as they were: the host's of PyTorch, the process's, those that a module holds, some devices'."""

    torch: torch.Tensor
    process: ProcessGenerators
    held: list[tuple[Any, Any]]
    devices: RandomStates | None = None

    def put_back(self) -> None:
        """They continue as if nothing had been drawn since."""
        torch.set_rng_state(self.torch)
        if self.devices is not None:
            self.devices.restore()
        self.process.restore()
        for generator, state in self.held:
            put_back(generator, state)


class DrawWatch:
    """Compares the generators before and after a run: PyTorch's, Python's, NumPy's, and the module's own.

    Args:
        module: The module whose code draws.

    Attributes:
        is_of_others: Whether other threads were seen to draw, so that a comparison says nothing of a step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.is_of_others: bool = False
        # It reads them where they lie: to copy them before and after every step would take 0.2 ms.
        self._process = GeneratorWatch()

    @cached_property
    def generators(self) -> list[Any]:
        """The generators that the module or a global holds; looked for once."""
        return held_generators([self._module])

    def now(self, devices: Sequence[torch.device] = ()) -> SeenGenerators:
        """The states of the generators, such as before a run, and of those of ``devices``."""
        held = [(generator, state_of(generator)) for generator in self.generators]
        on_devices = RandomStates(devices) if devices else None
        return SeenGenerators(host_random_state(), self._process.now(), held, on_devices)

    def has_drawn(self, seen: SeenGenerators) -> bool:
        """Whether there were draws since :meth:`now`."""
        return not torch.equal(seen.torch, host_random_state()) or self.has_drawn_outside_torch(seen)

    def has_drawn_outside_torch(self, seen: SeenGenerators) -> bool:
        """As :meth:`has_drawn`, but for PyTorch's generator of the host; of devices, those that were given."""
        if seen.process != self._process.now():
            return True
        if seen.devices is not None and not seen.devices.same_on_devices(seen.devices.again()):
            return True
        return not all(same_state(state_of(generator), state) for generator, state in seen.held)


class ThreadDraws(TorchDispatchMode):
    """Notes whether this thread draws from a generator of PyTorch's; all threads share that of the host.

    Attributes:
        seen: Whether it did.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if on_tensors_of_tensors(types):
            return NotImplemented
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not has_dropout_off(func, args, kwargs):
            # In inference mode dropout comes here as it is called, and draws nothing in evaluation.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self.seen = True
        if self.seen or func.namespace == "aten":
            return func(*args, **kwargs)
        # An operator of a library does not say that it draws, and what it calls does not come here.
        before = host_random_state()
        result = func(*args, **kwargs)
        self.seen = not torch.equal(before, host_random_state())
        return result


# The host's generator of PyTorch; those of Python and NumPy, and of modules; those of devices beside the host.
Source = Literal["torch", "others", "devices"]


@dataclass(frozen=True, slots=True)
class StepDraws:
    """What one call of a step has drawn.

    Attributes:
        before: Where they were.
        after: Where it has left them.
        of_torch: What it drew from PyTorch's generator of the host.
        of_devices: What it drew from the generators of other devices.
    """

    before: GeneratorStates
    after: GeneratorStates
    of_torch: tuple[Draw, ...]
    of_devices: tuple[Draw, ...] = ()


def drawn_once(calls: Sequence[StepDraws]) -> tuple[set[Source], set[Source]]:
    """The sources from which a step draws as often for the whole batch as for each slice, and those where it does not.

    Args:
        calls: Of one device on the whole batch, and of slices of several sizes, all from the same states.
    """
    once: set[Source] = set()
    by_rows: set[Source] = set()
    if any(call.of_torch for call in calls):
        # As many draws of as many numbers in all calls: none of them depends on the rows.
        is_once = len({call.of_torch for call in calls}) == 1
        (once if is_once else by_rows).add("torch")
    if any(call.after.differs_outside_torch(call.before) for call in calls):
        is_once = not any(call.after.differs_outside_torch(calls[0].after) for call in calls)
        (once if is_once else by_rows).add("others")
    return once, by_rows


def drawn_on_devices(calls: Sequence[StepDraws]) -> tuple[set[Source], set[Source]]:
    """As :func:`drawn_once`, of the generators of devices beside the host, each of which has its own.

    Args:
        calls: As there.
    """
    if not any(call.of_devices for call in calls):
        return set(), set()
    numbers = {_without_masks(call.of_devices) for call in calls}
    is_once = len(numbers) == 1 and numbers != {()}
    found: set[Source] = {"devices"}
    return (found, set()) if is_once else (set(), found)


def draws_both_ways(calls: Sequence[StepDraws]) -> bool:
    """Whether a step draws some numbers of a device once for its batch, and others by rows.

    Both come from one generator, so slices cannot begin where the batch began for some of them only.

    Args:
        calls: As of :func:`drawn_once`.
    """
    return any(map(_are_both, ({call.of_torch for call in calls}, {call.of_devices for call in calls})))


def _are_both(by_call: set[tuple[Draw, ...]]) -> bool:
    # Masks by rows move the generator on, too, wherever slices begin.
    if len(by_call) == 1:
        return False
    numbers = set(map(_without_masks, by_call))
    # Draws of another number of calls, as in a loop over rows, have no counterparts.
    if len(set(map(len, numbers))) > 1:
        return False
    return any(len(set(column)) == 1 and column[0] > 0 for column in zip(*numbers, strict=True))


def _without_masks(draws: Iterable[Draw]) -> tuple[int, ...]:
    """How many numbers each draw had that slices do not have each their own of by design."""
    return tuple(draw.numbers for draw in draws if not draw.is_mask)


class BatchDraws:
    """Lets every slice of a batch draw the same.

    Args:
        sources: From which.
        generators: Those that the module holds, and globals.
        root: The first replica's device, which draws for a batch what one device would.
    """

    def __init__(self, sources: set[Source], generators: Sequence[Any], root: torch.device) -> None:
        self._sources = sources
        self._generators = generators
        self._put_back: list[Callable[[], None]] = []
        # Now, as slices on other devices may run at once.
        self._of_root: torch.Tensor | None = None
        if "devices" in sources and not is_host(root):
            self._of_root = torch.get_device_module(root).get_rng_state(root)

    def begin_slice(self, device: torch.device) -> None:
        """One slice begins, on this device; those before it are over, but on other devices."""
        if self._of_root is not None and not is_host(device):
            torch.get_device_module(device).set_rng_state(self._of_root, device)
        # The first slice finds nothing to put back; it begins where the batch does.
        for restore in self._put_back:
            restore()
        if self._put_back:
            return
        if "torch" in self._sources:
            self._put_back.append(RandomStates(()).restore)
        if "others" in self._sources:
            self._put_back.append(GeneratorStates(generators=self._generators).restore_outside_torch)
