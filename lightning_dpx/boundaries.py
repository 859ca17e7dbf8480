"""Where a list of sizes is cut into runs: buckets of gradients are, and so are predictions of them."""

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
