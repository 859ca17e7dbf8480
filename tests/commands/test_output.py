"""What commands say beside their result."""

from pathlib import Path
from typing import Any

import pytest

from lightning_dpx.commands.output import TellOnce, written
from lightning_dpx.errors import ConfigurationError


def test_a_sentence_is_said_once(capsys: Any) -> None:
    tell = TellOnce()
    tell("the batch goes whole")
    tell("the batch goes whole")
    told = capsys.readouterr()
    assert told.err.count("the batch goes whole") == 1
    assert not told.out


def test_an_error_of_the_file_system_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--save .* cannot be written: .*Name another file"):
        with written("save", tmp_path):
            tmp_path.write_text("a folder")
