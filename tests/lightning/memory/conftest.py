"""Simulated devices for the tests, which are eight again after each."""

import gc
from collections.abc import Iterator

import pytest

import lightning_dpx as dpx


@pytest.fixture
def devices_as_before() -> Iterator[None]:
    """The devices have all room again, and as many as ever, whatever the test has simulated."""
    yield
    gc.collect()
    dpx.simulate(8)
