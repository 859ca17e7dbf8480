"""Several processes: connecting, ranks, and stopping together."""
