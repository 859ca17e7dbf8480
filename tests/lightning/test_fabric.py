"""Fabric leaves the loop to the user: it is told what to use there."""

from typing import Any

import pytest
from lightning.fabric import Fabric

import lightning_dpx


def test_the_name_is_refused_with_what_to_use() -> None:
    with pytest.raises(lightning_dpx.UnsupportedError, match=r"needs a Trainer.*ReplicaGroup\(module, devices\)"):
        Fabric(strategy="dpx", accelerator="cpu", devices=2)


def test_an_object_says_so_in_fabrics_own_error() -> None:
    strategy: Any = lightning_dpx.DPXStrategy()
    with pytest.raises(ValueError, match=r"for a Trainer of .*; in a loop of your own, use .*ReplicaGroup"):
        Fabric(strategy=strategy, accelerator="cpu", devices=2)
