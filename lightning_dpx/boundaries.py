"""Where lists are cut: gradients into buckets, devices into groups, and both alike where they are predicted."""

from collections.abc import Sequence


def split_at_boundaries(sizes: Sequence[float], num_splits: int) -> list[list[int]]:
    """Indices of N items in at most ``num_splits`` runs of about equal size, from the last item to the first."""
    total = sum(sizes)
    splits: list[list[int]] = [[]]
    done = 0.0
    # Backward finishes the last parameters first.
    for index in reversed(range(len(sizes))):
        # By what has gone before, not by the size of the run: runs stay even on the whole, although
        # no parameter is ever split.
        if splits[-1] and done >= total * len(splits) / num_splits and len(splits) < num_splits:
            splits.append([])
        splits[-1].append(index)
        done += sizes[index]
    return splits


def halves(num_devices: int) -> list[list[int]]:
    """Two groups of devices, and one of fewer than four: what is taken where nothing is known of the links."""
    # Of fewer, one half would be a single device with nothing to sum.
    if num_devices < 4:
        return [list(range(num_devices))]
    half = (num_devices + 1) // 2
    return [list(range(half)), list(range(half, num_devices))]
