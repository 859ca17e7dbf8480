"""What a run allocates and frees, watched from outside."""
