"""Callbacks and a profiler that report what devices hold and do."""
