"""The queues that a device works off side by side: streams."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from lightning_dpx.devices.identity import is_only_of_its_type

_DEFAULT = 0  # the number of a stream that nobody has chosen
_WITHOUT = ("cpu", "meta")  # types of devices that have none


def chosen_streams(devices: Iterable[torch.device]) -> tuple[torch.Stream, ...]:
    """Streams that the calling thread has made current on ``devices``, in place of their default ones.

    Which stream is current is known to one thread only. What another one queues on the default stream would neither
    wait for what is queued here, nor be waited for.
    """
    chosen: list[torch.Stream] = []
    for device in devices:
        # Asked for every task of every stage, so without a call.
        if device.type in _WITHOUT or is_only_of_its_type(device):
            continue
        # Of its own module: torch.accelerator refuses all other types where simulated devices are there.
        stream = torch.get_device_module(device).current_stream(device)
        if stream.stream_id != _DEFAULT:
            chosen.append(stream)
    return tuple(chosen)


def stream_context(stream: torch.Stream) -> AbstractContextManager[object]:
    """Makes ``stream`` current on its device for the calling thread."""
    # To enter the stream itself asks torch.accelerator.
    context: AbstractContextManager[object] = torch.get_device_module(stream.device).stream(stream)
    return context
