"""The step, tried before it is trained: as one device and in slices, compared."""
