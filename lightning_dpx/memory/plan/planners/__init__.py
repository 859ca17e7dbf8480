"""Ways to choose: one file each, registered by name."""
