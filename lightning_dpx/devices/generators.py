"""Random generators of the host and of devices; with all others in :mod:`lightning_dpx.python_objects.preserve`."""

from collections.abc import Iterable, Sequence

import torch

from lightning_dpx.devices.identity import device_context, distinct_devices, is_host
from lightning_dpx.torch_compat import DisableFuncTorch, DisableTorchDispatch


def host_random_state() -> torch.Tensor:
    """A snapshot of the process-wide CPU generator, to notice that it was drawn from."""
    # Of the generator itself: what a step asks torch.get_rng_state() for, traces count as its memory.
    state: torch.Tensor = torch.default_generator.get_state()
    return state


def host_random_digest() -> int:
    """Tells states of that generator apart, and takes no memory; whichever modes and transforms are under way."""
    with DisableTorchDispatch(), DisableFuncTorch():
        return hash(host_random_state().numpy().tobytes())


class RandomStates:
    """The generators of the host and of ``devices``, as they are now."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._host = host_random_state()
        # A meta device computes nothing, and has no generator.
        others = [device for device in distinct_devices(list(devices)) if not is_host(device) and device.type != "meta"]
        self._states = [(device, torch.get_device_module(device).get_rng_state(device)) for device in others]

    def again(self) -> "RandomStates":
        """The states of the same generators, as they are now."""
        return RandomStates([torch.device("cpu"), *(device for device, _ in self._states)])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomStates):
            return NotImplemented
        return all(map(torch.equal, self._all(), other._all()))

    __hash__: None = None  # type: ignore[assignment]

    def same_on_devices(self, other: "RandomStates") -> bool:
        """Whether the generators of all devices but the host are where they were then."""
        return all(map(torch.equal, self._all()[1:], other._all()[1:]))

    def _all(self) -> list[torch.Tensor]:
        return [self._host, *(state for _, state in self._states)]

    @property
    def nbytes(self) -> int:
        """Bytes that the states take."""
        return sum(state.nbytes for state in self._all())

    def digest(self) -> int:
        """A number that tells states apart without keeping them."""
        with DisableFuncTorch():  # transforms that are under way would take them for theirs
            return hash(tuple(state.numpy().tobytes() for state in self._all()))

    def restore(self) -> None:
        """The generators continue as if nothing had been drawn since."""
        torch.set_rng_state(self._host)
        for device, state in self._states:
            torch.get_device_module(device).set_rng_state(state, device)


def seed_apart(devices: Sequence[torch.device]) -> None:
    """Gives every accelerator but the first another seed, where all have the process's.

    ``torch.manual_seed`` seeds all devices alike, and replicas on them would then drop out the same units.
    """
    for offset, device in enumerate(distinct_devices(devices)[1:], start=1):
        if is_host(device):
            continue
        with device_context(device):
            module = torch.get_device_module(device)
            # Another seed was given to this device on purpose.
            if module.initial_seed() == torch.initial_seed():
                module.manual_seed(torch.initial_seed() + offset)
