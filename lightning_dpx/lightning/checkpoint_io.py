"""Checkpoint files that are whole whenever they have their name, and that run no code."""

import glob
import io
import os
import platform
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

from lightning_dpx.errors import name_file
from lightning_dpx.lightning.lightning_api import CheckpointIO, TorchCheckpointIO
from lightning_dpx.lightning.lightning_compat import WrappingCheckpointIO
from lightning_dpx.units import format_mib


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a file beside the old one, down to the disk, and then gives it the name; reads tensors and plain data."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Replaces ``path`` at once; remote paths go Lightning's way."""
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        part = target.with_name(f".{target.name}.{platform.node()}-{os.getpid()}.part")
        content = io.BytesIO()  # written straight to a full disk, torch.save would tell of its own trouble only
        torch.save(checkpoint, content)
        try:
            with part.open("wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except BaseException as error:
            part.unlink(missing_ok=True)
            if isinstance(error, OSError):
                name_file(error, target)
                error.add_note(_describe_failed_save(target, content.getbuffer().nbytes))
            raise

    def load_checkpoint(self, path: Any, map_location: Any = lambda s, _: s, weights_only: Any = None) -> Any:
        """Loads only what runs no code, also from an address, unless the caller says otherwise."""
        try:
            weights_only = True if weights_only is None else weights_only
            if os.path.isfile(path) and zipfile.is_zipfile(path):  # torch does not compare the checksums
                with zipfile.ZipFile(path) as file:
                    if damaged := file.testzip():
                        raise ValueError(f"its part {damaged} is damaged")
            return super().load_checkpoint(path, map_location, weights_only)
        except Exception as error:
            error.add_note(f"While reading {path}.")
            raise


def with_whole_files(given: CheckpointIO | None) -> CheckpointIO:
    """The plugin that was given, or whole files; one that wraps another, and was given none, wraps whole files."""
    if given is None:
        return AtomicCheckpointIO()
    if isinstance(given, WrappingCheckpointIO):
        given.checkpoint_io = AtomicCheckpointIO()  # does nothing where it has one
    return given


def _describe_failed_save(target: Path, size: int) -> str:
    free = shutil.disk_usage(target.parent).free
    kept = f"{target} is what it was" if target.exists() else f"{target} does not exist"
    return (
        f"While saving {target}: it takes {format_mib(size)}, and {format_mib(free)} are free in "
        f"{target.parent}. {kept}, and nothing else was left there."
    )


def _sweep(target: Path) -> None:
    """Removes what saves of ``target`` left behind that were killed on this machine."""
    for part in target.parent.glob(f".{glob.escape(target.name)}.{glob.escape(platform.node())}-*.part"):
        number = part.stem.rpartition("-")[2]
        if number.isdigit() and not _is_alive(int(number)):
            part.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    if os.name != "posix":  # asking would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return process != os.getpid()  # of which no save is under way
