"""Replicas on several devices run the same compiled code, of which torch keeps a few versions: some for each device.

Code that was compiled on one device is compiled anew on another, as its guards hold the device of every tensor. After
eight versions torch gives up and runs what comes as it was written, without an error: eight devices take all of them in
training alone, and validation or batches of another size have none left.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from lightning_dpx.devices import distinct_devices
from lightning_dpx.python_objects.shared_patch import SharedPatch, Undo
from lightning_dpx.torch_compat import dynamo_config


def versions_for(devices: Sequence[torch.device]) -> AbstractContextManager[None]:
    """Inside of it torch keeps as many versions of compiled code for each of ``devices`` as else for one."""
    number = len(distinct_devices(devices))
    if number == 1:
        return nullcontext()

    def make() -> Undo:
        config = dynamo_config()
        # Of what is set when a run begins, which users may raise themselves.
        patch = config.patch(recompile_limit=config.recompile_limit * number)
        patch.__enter__()
        return lambda: patch.__exit__(None, None, None)

    return SharedPatch(make)
