"""The sum of a parameter's gradient of earlier steps, or slices, and of one that has come."""

import torch


def added_gradient(earlier: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients of one parameter, in the memory of the first where both are dense."""
    # The sum of two sparse gradients has other indices than either, and no dense one goes into a sparse one.
    if earlier.layout == gradient.layout == torch.strided:
        return earlier.add_(gradient)
    # Torch adds a sparse tensor to a dense one, and not the other way round.
    return gradient + earlier if gradient.layout == torch.strided else earlier + gradient
