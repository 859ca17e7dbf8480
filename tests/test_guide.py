"""The README and the guide: every block runs, every link leads somewhere, every error has its cure."""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch import Trainer

import lightning_dpx as dpx
from examples.digits import DigitClassifier, DigitData
from lightning_dpx import errors
from lightning_dpx.cli import main
from tests.conftest import SIMULATED

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "examples" / "guide"
README = ROOT / "README.md"
PAGES = [README, *sorted(GUIDE.glob("*.md"))]
NEEDS_SIMULATION = {"simulated_devices", "shifts"}

# Lightning calls what jsonargparse has deprecated, and advises on loaders; the digits have batch norms.
pytestmark = [
    pytest.mark.filterwarnings("default:dpx. the step is planned in one piece"),
    pytest.mark.filterwarnings("default::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
    pytest.mark.filterwarnings("default::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


class ShortTrainer(Trainer):
    """Ends after two steps, and writes nothing."""

    def __init__(self, **options: Any) -> None:
        usual = {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        super().__init__(**{**usual, **options})


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@cache
def commands() -> list[list[str]]:
    """All calls of ``dpx`` on all pages, each once."""
    lines = {line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()}
    return [shlex.split(line)[1:] for line in sorted(lines) if line.startswith("dpx ")]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
@pytest.mark.usefixtures("own_registries")
def test_every_block_of_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem in NEEDS_SIMULATION and SIMULATED:
        pytest.skip(SIMULATED)
    monkeypatch.setattr(lightning.pytorch, "Trainer", ShortTrainer)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    datamodule = DigitData(32)
    names = {
        "__name__": page.stem,
        "model": DigitClassifier(),
        "datamodule": datamodule,
        "loader": datamodule.train_dataloader(),
        "module": torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in "12345678")
        ),
        "batch": torch.randn(256, 64),
    }
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_every_call_of_dpx_runs(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the pages' own config; a fit stops after one step."""
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in arguments]
    quick = {"fit": ["--trainer.fast_dev_run", "1"]}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    if "--print_config" in words:
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0
        return
    assert main([*words, *quick.get(words[0], [])]) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_and_picture_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    missing = [link for link in links if not link.startswith("https://") and not (page.parent / link).exists()]
    assert not missing


def test_the_guide_lists_all_of_its_pages_and_the_readme_leads_to_them() -> None:
    index = (GUIDE / "README.md").read_text()
    for page in PAGES[1:]:
        if page.name != "README.md":
            assert f"]({page.name})" in index
    assert "examples/guide/README.md" in README.read_text()


def test_the_readme_is_one_page_with_pictures() -> None:
    text = README.read_text()
    assert len(text.split()) <= 1000
    assert text.count("![") >= 3


@pytest.mark.parametrize("page", ["README.md", "examples/guide/first_fit.md"])
def test_commands_come_after_what_installs_them(page: str) -> None:
    text = (ROOT / page).read_text()
    assert '".[cli]"' in text[: text.index("dpx fit --config")]


def test_every_error_has_its_cure() -> None:
    table = (GUIDE / "troubleshooting.md").read_text()
    ours = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, dpx.DPXError)]
    assert len(ours) > 10
    missing = [name for name in ours if name != "DPXError" and f"| `{name}` |" not in table]
    assert not missing
