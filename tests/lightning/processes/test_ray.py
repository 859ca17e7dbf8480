"""Workers of Ray Train are processes, each with its own replicas."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import Classifier, assert_equal, make_loader, make_trainer
from tests.programs import REPOSITORY

pytestmark = [pytest.mark.timeout(600), pytest.mark.processes, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("ray_program.py")


def printed_by_ray(case: str, folder: Path) -> str:
    """What the program and the workers printed; as a program that Ray could start anew, not as a fork of the server."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(PROGRAM), case, str(folder)]
    environment = {**os.environ, "PYTHONPATH": path, "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("case", ["environment", "restarted"])
def test_workers_of_ray_train_to_the_weights_of_one_device(case: str, tmp_path: Path) -> None:
    """With Ray's environment; and with none, where Ray starts workers again that were lost."""
    pytest.importorskip("ray.train.lightning")
    printed = printed_by_ray(case, tmp_path)
    assert "ended well" in printed, printed
    went_on = sorted(path.name for path in tmp_path.glob("* went on"))
    assert went_on == (["rank 0 went on", "rank 1 went on"] if case == "restarted" else [])
    torch.manual_seed(0)
    alone = Classifier(optimizer="adam")
    make_trainer(precision="64-true").fit(alone, make_loader(48), make_loader(48))
    weights = torch.load(tmp_path / f"{case}.pt", weights_only=True)
    expected = dict(alone.state_dict())
    if case == "restarted":  # Lightning restores into float32, and converts the module afterwards
        weights = {name: value.float() for name, value in weights.items()}
        expected = {name: value.float() for name, value in expected.items()}
    assert_equal(weights, expected)
