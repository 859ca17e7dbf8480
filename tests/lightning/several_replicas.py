"""Trainer options for replicas that really run."""

from typing import Any

import lightning_dpx as dpx


def on_replicas(devices: int = 2, **options: Any) -> dict[str, Any]:
    return {"strategy": dpx.DPXStrategy(execution="inline", **options), "devices": devices, "accelerator": "cpu"}
