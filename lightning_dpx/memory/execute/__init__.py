"""A plan at work: saved-tensor hooks, and values that are recomputed, replayed or fetched in backward."""
