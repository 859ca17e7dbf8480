"""A process that works by itself, whatever its launcher has said of others."""

from lightning_dpx.lightning.lightning_api import LightningEnvironment


class OneProcess(LightningEnvironment):
    """Of a run that this process makes alone, to look at a step: the others of a job do not, and would be waited for.

    Environment variables of a launcher, and the rank of the process, stay as they are for the runs that follow.
    """

    def set_global_rank(self, rank: int) -> None:
        """Lightning's own environment would make this the rank of the whole process."""

    def local_rank(self) -> int:
        """Its devices are named, so none is chosen by a rank of the launcher."""
        return 0

    def node_rank(self) -> int:
        """The only machine."""
        return 0
