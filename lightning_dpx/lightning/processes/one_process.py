"""A process that works by itself, whatever its launcher has said of others."""

from lightning_dpx.lightning.lightning_api import LightningEnvironment


class OneProcess(LightningEnvironment):
    """Of a run that this process makes alone, to look at a step: the others of a job do not, and would be waited for.

    The environment variables of a launcher, and the rank of the process, stay as they are for the runs that follow.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """Lightning starts none."""
        return True

    def world_size(self) -> int:
        """This process."""
        return 1

    def set_world_size(self, size: int) -> None:
        """Lightning would set what it has counted."""

    def global_rank(self) -> int:
        """The first, and the only one."""
        return 0

    def set_global_rank(self, rank: int) -> None:
        """Lightning's own environment would make this the rank of the whole process."""

    def local_rank(self) -> int:
        """Its devices are named, so none is chosen by the rank."""
        return 0

    def node_rank(self) -> int:
        """The only machine."""
        return 0
