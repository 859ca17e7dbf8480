"""Made-up devices and a small plan, to be drawn."""

import torch
from torch import nn

from lightning_dpx.memory import MemoryPlan, Profile, plan_profile, profile_module
from lightning_dpx.pictures import DeviceStep

MIB = 2**20


DEVICES = [
    DeviceStep(
        f"cuda:{index}",
        {"parameters": 10 * MIB, "gradients": 10 * MIB, "optimizer": 20 * MIB, "buffers": MIB},
        {"forward": 50 * MIB, "backward": (60 - index) * MIB, "optimizer": 41 * MIB},
        planned=61 * MIB,
        budget=64 * MIB,
        capacity=80 * MIB,
    )
    for index in range(5)
]


def planned() -> tuple[Profile, MemoryPlan]:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(4)))
    profile = profile_module(module, torch.randn(64, 32))
    return profile, plan_profile(module, profile, int(0.7 * profile.peak))
