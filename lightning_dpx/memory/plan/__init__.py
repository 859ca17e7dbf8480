"""From a profile and a budget to the choice of what to recompute and what to offload."""
