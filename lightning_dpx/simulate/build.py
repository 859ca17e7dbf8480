"""Compiles the sim backend once per source and PyTorch version.

No lock: PyTorch's own cache of extensions waits for ever behind the lock file of a process that was killed while it
compiled. Here everyone compiles in a folder of its own, and an atomic rename publishes the result.
"""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch

from lightning_dpx.errors import UnsupportedError
from lightning_dpx.torch_compat import user_cache_dir

SOURCE = Path(__file__).with_name("backend.cpp")


def load_library() -> None:
    """Loads the compiled backend into the process, compiling it where that was not done before (about 20 s).

    Raises:
        UnsupportedError: there is no compiler or no ninja, or the compiled backend can be kept nowhere.
    """
    # Loading what others have compiled needs neither a compiler nor ninja.
    library = cached_library()
    if library.exists():
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        return
    require_build_tools()
    from torch.utils.cpp_extension import load  # imports setuptools; only here it is needed

    with _build_folder(library) as folder:
        load(library.stem, [str(SOURCE)], extra_cflags=["-O1"], build_directory=folder, is_python_module=False)
        # The folder lies beside the target, as a rename is atomic within one file system only.
        os.replace(Path(folder, library.name), library)


def _build_folder(library: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="building_", dir=library.parent)
    except OSError as error:
        raise UnsupportedError(
            f"The backend of simulated devices is compiled once and kept in {library.parent}, which cannot be written "
            f"({error}); set TORCH_EXTENSIONS_DIR to a folder that can."
        ) from error


def cached_library() -> Path:
    """Where the compiled backend is kept: under ``TORCH_EXTENSIONS_DIR``, else in the user's cache folder."""
    user_cache = user_cache_dir(appname="torch_extensions")  # type: ignore[no-untyped-call]
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or user_cache
    # A library that was built for another torch may not even load.
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    return Path(root, f"lightning_dpx_sim_{key}.so")


def is_built() -> bool:
    """Whether the backend has been compiled here, so that devices are simulated without a compiler and at once."""
    return cached_library().exists()


def require_build_tools() -> None:
    """Whether the backend could be built here.

    Raises:
        UnsupportedError: what is missing.
    """
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        raise UnsupportedError(
            "Simulated devices need a C++ compiler, and none of c++, g++ and clang++ is on the PATH; install one "
            "(for example `apt install g++`)."
        )
    if importlib.util.find_spec("ninja") is None and shutil.which("ninja") is None:
        raise UnsupportedError(
            "Simulated devices need ninja to build their backend; pip install 'lightning-dpx[simulate]'."
        )
