"""Manual optimization on replicas: what touches an optimizer happens once."""
