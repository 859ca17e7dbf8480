"""K replicas of any module and their gradients, without Lightning."""

from lightning_dpx.group.replica_group import ReplicaGroup

__all__ = ["ReplicaGroup"]
