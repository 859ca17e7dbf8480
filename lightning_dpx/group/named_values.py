"""Parameters and buffers by name: read from replicas, and written into a module."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.group.arguments import check_value
from lightning_dpx.replicas import Replica


def copied_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters on the CPU, by name."""
    return {name: value.detach().cpu().clone() for name, value in module.named_parameters()}


def mean_buffers(replicas: Sequence[Replica]) -> dict[str, torch.Tensor]:
    """The mean of each buffer over replicas, on the CPU, by name; integer ones are those of the first."""
    # As means, since each replica's statistics are of other rows.
    columns = zip(*(replica.buffers for replica in replicas), strict=True)
    buffers = {}
    for (name, own), column in zip(replicas[0].module.named_buffers(), columns, strict=True):
        copies = [buffer.detach().cpu() for buffer in column]
        # A mean of counts, such as the batches that a batch norm has seen, would be no count.
        buffers[name] = torch.stack(copies).mean(0) if own.is_floating_point() else copies[0].clone()
    return buffers


@torch.no_grad()
def write_by_name(module: nn.Module, values: Mapping[str, torch.Tensor], *, allow_extra: bool) -> None:
    """Writes parameters and buffers; those that are not named keep their values.

    Args:
        module: Whose.
        values: By name, each of the shape of what it is written into.
        allow_extra: Leave out names that the module does not have.

    Raises:
        ConfigurationError: another name, unless ``allow_extra``; or a value of another shape, or that is no tensor.
    """
    # A tied weight goes by all of its names, as in a state dict.
    own: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    own.update(module.named_buffers(remove_duplicate=False))
    # All is looked at before the first value is written: an error leaves all as it was.
    for name, value in values.items():
        if name in own:
            check_value(name, value, own[name])
        elif not allow_extra:
            raise ConfigurationError(f"The module has no {name!r}; it has {', '.join(own)} (or allow_extra=True).")
    for name, value in values.items():
        if name in own:
            own[name].copy_(value)
