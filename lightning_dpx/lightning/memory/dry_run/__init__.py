"""What a training step would take on devices that need not be there."""
