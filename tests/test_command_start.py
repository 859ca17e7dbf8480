"""The program ``dpx`` is ended without a traceback while it imports; other programs have theirs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SCRIPT = "import sys\nfrom lightning_dpx.cli import main\nsys.exit(main())\n"


def ended(tmp_path: Path, name: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a program of this name says that imports the package."""
    path = tmp_path / name
    path.write_text(SCRIPT)
    command = ["-m", "lightning_dpx"] if name == "-m" else [str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), **variables}
    return subprocess.run(
        [sys.executable, *command, "doctor"], env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300
    )


@pytest.mark.parametrize("name", ["dpx", "-m"])
def test_ctrl_c_while_torch_is_imported_leaves_a_line(name: str, tmp_path: Path) -> None:
    # Found before the real one.
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = ended(tmp_path, name)
    assert done.stderr == "dpx: interrupted\n"
    assert done.returncode == -signal.SIGINT
    other = ended(tmp_path, "train.py")
    assert "Traceback" in other.stderr
    assert other.stderr.endswith("KeyboardInterrupt\n")


def test_ctrl_c_that_a_module_makes_another_error_of_is_told_as_such(tmp_path: Path) -> None:
    """As numpy's modules in C do."""
    lines = ["import signal", "try:", "    signal.raise_signal(signal.SIGINT)", "except KeyboardInterrupt:"]
    (tmp_path / "torch.py").write_text("\n".join([*lines, "    raise ImportError('once') from None", ""]))
    done = ended(tmp_path, "dpx")
    assert done.stderr == "dpx: interrupted\n"
    assert done.returncode == -signal.SIGINT
    assert ended(tmp_path, "train.py").stderr.endswith("ImportError: once\n")


def test_ctrl_c_that_a_module_swallows_ends_the_command(tmp_path: Path) -> None:
    lines = ["import signal", "try:", "    signal.raise_signal(signal.SIGINT)", "except KeyboardInterrupt:", "    pass"]
    # One that the package itself imports, found before the real one.
    real = Path(yaml.__file__).parent
    (tmp_path / "yaml").mkdir()
    code = ["import sys", *lines, f"__path__ = [{str(real)!r}]", f"exec(open({str(real / '__init__.py')!r}).read())"]
    (tmp_path / "yaml" / "__init__.py").write_text("\n".join([*code, ""]))
    done = ended(tmp_path, "dpx")
    assert done.stderr == "dpx: interrupted\n"
    assert done.returncode == 130


@pytest.mark.parametrize("name", ["dpx", "-m"])
def test_an_error_of_the_package_is_a_line(name: str, tmp_path: Path) -> None:
    done = ended(tmp_path, name, LIGHTNING_DPX_PACKAGE="nobody")
    assert done.stderr.startswith("dpx: LIGHTNING_DPX_PACKAGE='nobody' is not allowed; choose one of lightning")
    assert done.returncode == 1


def test_other_errors_have_their_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken')\n")
    done = ended(tmp_path, "dpx")
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("ImportError: broken\n")
