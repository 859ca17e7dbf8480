"""What ``dpx`` can do, a file per command; each adds itself to the parser and runs when it is named."""

from lightning_dpx.commands import bench, doctor, plan, train

__all__ = ["bench", "doctor", "plan", "train"]
