"""``dpx plan --strategy`` predicts a rank of other strategies than ours."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_dpx.cli import main
from tests.pictures.headings import doubled_headings

pytestmark = pytest.mark.filterwarnings("default::jsonargparse._deprecated.JsonargparseDeprecationWarning")
PROGRAM = "tests.lightning.memory.rank_program"


def config(folder: Path, model: str = "Whole", strategy: str = "auto") -> list[str]:
    path = folder / "config.yaml"
    path.write_text(
        f"trainer:\n  accelerator: gpu\n  devices: 8\n  num_nodes: 2\n  max_epochs: 1\n  strategy: {strategy}\n"
        f"model:\n  class_path: {PROGRAM}.{model}\ndata:\n  class_path: {PROGRAM}.Words\n"
    )
    return ["plan", "--config", str(path), "--no-plan-cache"]


def planned(capsys: Any, *arguments: str) -> tuple[dict[str, Any], int]:
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (device,) = found["devices"]
    return device, found["ranks"]


def test_fsdp2_is_sharded_over_all_devices_of_all_nodes(tmp_path: Path, capsys: Any) -> None:
    few, num_few = planned(capsys, *config(tmp_path, "Sharded"), "--strategy", "fsdp2", "--devices", "2")
    many, num_many = planned(
        capsys, *config(tmp_path, "Sharded"), "--strategy", "fsdp2", "--devices", "2", "--num-nodes", "4"
    )
    assert (num_few, num_many) == (4, 8)
    assert few["device"] == "rank 0 of 4"
    assert few["parameters"] / 2 <= many["parameters"] < few["parameters"] * 0.55
    assert few["communication"] > 0
    parts = ("parameters", "gradients", "optimizer", "buffers", "inputs", "communication", "unplanned")
    assert few["peak"] == sum(few[part] for part in parts)


def test_a_table_has_what_communication_takes(tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "report.html"
    units = ["--shard-units", "model.layers.*", "--shard-units", "model"]
    arguments = [*config(tmp_path), "--strategy", "fsdp2", *units, "--budget", "80%", "--report", str(page)]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "one of 16 processes with --strategy fsdp2:"
    heads, cells = lines[2].split(), lines[3].split()
    assert heads[7] == "communication"
    assert cells[:4] == ["rank", "0", "of", "16"]
    text = page.read_text()
    assert "What a budget costs" in text
    assert doubled_headings(text) == []


def test_ddp_keeps_buckets_unless_gradients_are_views_of_them(tmp_path: Path, capsys: Any) -> None:
    own, _ = planned(capsys, *config(tmp_path), "--strategy", "ddp")
    views = (
        "\n    class_path: lightning.pytorch.strategies.DDPStrategy\n    dict_kwargs: {gradient_as_bucket_view: true}"
    )
    viewed, ranks = planned(capsys, *config(tmp_path, strategy=views), "--strategy", "ddp")
    assert ranks == 16
    assert own["communication"] == own["gradients"] == own["parameters"] == viewed["gradients"]
    assert viewed["communication"] == 0
    assert own["rows"] == 8, "every process has a batch of its own"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--strategy", "fsdp"], "invalid choice: 'fsdp'"),
        (["--strategy", "fsdp2"], "not known what fully_shard is called on: configure_model() of Whole is not there"),
        (["--strategy", "fsdp2", "--shard-units", "net"], "--shard-units net names no module of Whole; it has model"),
        (["--shard-units", "model"], "--shard-units is for --strategy fsdp2"),
        (["--strategy", "ddp", "--link", "50GB/s"], "predicted for --strategy dpx, and not for ddp; leave out --link"),
        (
            ["--strategy", "fsdp2", "--micro-batches", "2"],
            "--micro-batches is for --strategy dpx; fsdp2 cuts no batches",
        ),
    ],
)
def test_what_is_missing_or_means_nothing_is_said(options: list[str], said: str, tmp_path: Path, capsys: Any) -> None:
    assert main([*config(tmp_path), *options]) == 1
    assert said in capsys.readouterr().err


def test_tensor_parallel_layers_are_refused(tmp_path: Path, capsys: Any) -> None:
    parallel = (
        "\n    class_path: lightning.pytorch.strategies.ModelParallelStrategy"
        "\n    init_args: {data_parallel_size: 8, tensor_parallel_size: 2}"
    )
    assert main([*config(tmp_path, "Sharded", parallel), "--strategy", "fsdp2"]) == 1
    assert "tensor_parallel_size=2; what tensor-parallel layers take is not predicted" in capsys.readouterr().err
