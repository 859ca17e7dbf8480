"""One copy of a module: which objects it shares with the original, and which it gets for itself."""
