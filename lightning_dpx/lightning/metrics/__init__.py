"""Metric objects that all replicas share."""
