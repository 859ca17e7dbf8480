"""Checkpoint files that are whole whenever they have their name, and that run no code."""

import io
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO


class WholeFiles(TorchCheckpointIO):
    """Writes a file beside the old one, down to the disk, and then gives it the name; reads tensors and plain data."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Replaces ``path`` at once; remote paths go Lightning's way."""
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in target.parent.glob(f".{target.name}.*.part"):  # of a save that was killed
            leftover.unlink(missing_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        try:
            content = io.BytesIO()  # written straight to a full disk, torch.save would tell of its own trouble only
            torch.save(checkpoint, content)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def load_checkpoint(self, path: Any, map_location: Any = lambda s, _: s, weights_only: Any = None) -> Any:
        """Also from an address only what runs no code, unless the caller says otherwise."""
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
