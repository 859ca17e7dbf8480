"""Several processes, each with its own replicas: equal to one device, and clear about what goes wrong."""

import csv
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from lightning_dpx.memory.plan_cache import default_folder
from tests import programs
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer
from tests.lightning.processes.process_program import WITH_MEETINGS, Embedded, Summed, late_batches
from tests.programs import free_port

pytestmark = [pytest.mark.timeout(600), pytest.mark.processes]

PROGRAM = Path(__file__).with_name("process_program.py")
RESTARTED = Path(__file__).with_name("restart_program.py")


def start(case: str, folder: Path, world: int = 2, program: Path = PROGRAM) -> list[Any]:
    """The processes of a run, as a cluster's launcher would start them: one per node."""
    cluster = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        programs.start(program, case, folder, environment={**cluster, "NODE_RANK": str(rank)}, joint=True)
        for rank in range(world)
    ]


def finish(processes: list[Any], seconds: float = 400) -> list[str]:
    try:
        return [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def one_device(model: Classifier | None = None, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    start = Classifier(optimizer="adam")
    model = start if model is None else model
    model.load_state_dict(start.state_dict())
    make_trainer(**options).fit(model, make_loader(48), make_loader(48))
    return model.state_dict()


def weights_of_both(case: str, folder: Path) -> dict[str, torch.Tensor]:
    """Runs two processes, which must end well, without threads of gloo, and with the same bits."""
    processes = start(case, folder)
    for printed in finish(processes):
        assert "ended well" in printed, printed
        assert "a process group at the end: False" in printed, printed
    assert [process.returncode for process in processes] == [0, 0]
    first, second = (torch.load(folder / f"{case}_{rank}.pt", weights_only=True) for rank in range(2))
    assert_equal(second, first, bitwise=True)
    return first


@pytest.mark.parametrize("case", ["even", "colocate", "uneven", "sum-accumulated", "dealt", "joined", "runs-out-alone"])
def test_two_processes_of_replicas_train_to_the_weights_of_one_device(case: str, tmp_path: Path) -> None:
    weights = weights_of_both(case, tmp_path)
    if case == "sum-accumulated":
        options = {"accumulate_grad_batches": 2, "precision": "64-true"}
        assert_equal(weights, one_device(Summed(optimizer="sgd"), **options))
    elif case != "dealt":  # by a sampler that shuffles
        assert_equal(weights, one_device(precision="64-true"))


def test_the_throughput_monitor_tells_who_waits_and_for_whom(tmp_path: Path) -> None:
    first, second = finish(start("waits", tmp_path))
    assert "ended well" in first, first
    assert "ended well" in second, second
    waits = [json.loads((tmp_path / f"waits_{rank}.json").read_text()) for rank in range(2)]
    assert waits[0]["waiting_ms"] > waits[1]["waiting_ms"] > 0
    assert [one["last_process"] for one in waits] == [1, 1]
    with (tmp_path / "waits.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12  # two replicas in six steps
    assert float(rows[-1]["waiting_ms"]) == waits[0]["waiting_ms"]
    assert {row["last_process"] for row in rows} == {"1"}
    table = first[first.index("dpx: work of the last step") :].splitlines()
    assert table[0].endswith(", process 1 came last")
    assert table[1].endswith("waiting ms")


def test_one_process_alone_may_measure_how_long_it_waits(tmp_path: Path) -> None:
    """The other has no monitor, and takes part in nothing that tells who was last."""
    for printed in finish(start("waits-alone", tmp_path)):
        assert "ended well" in printed, printed
    found = json.loads((tmp_path / "waits_0.json").read_text())
    assert found["waiting_ms"] > 0
    assert found["last_process"] is None


class MeanAtFirst(Summed):
    """What is trained while no process could find out that its loss is a sum."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss / 2 if self.global_step == 0 else loss


def test_processes_agree_on_the_loss_as_soon_as_one_finds_out(tmp_path: Path) -> None:
    weights = weights_of_both("sum-late", tmp_path)
    torch.manual_seed(0)
    model = MeanAtFirst(optimizer="sgd")
    make_trainer(precision="64-true").fit(model, DataLoader(late_batches(), None), make_loader(48))
    assert_equal(weights, model.state_dict())


@pytest.mark.parametrize("case", ["sparse-uneven", "sparse-sum"])
def test_sparse_gradients_of_two_processes_train_to_the_weights_of_one_device(case: str, tmp_path: Path) -> None:
    weights = weights_of_both(case, tmp_path)
    torch.manual_seed(0)
    model = Embedded(case)
    make_trainer(precision="64-true").fit(model, make_loader(48), make_loader(48))
    assert_equal(weights, model.state_dict())


@pytest.mark.parametrize(
    "case", ["meets", "merged", "contrastive", "centered-uneven", "batchnorm", "batchnorm-uneven", "batchnorm-merged"]
)
def test_collectives_inside_a_step_reach_the_replicas_of_all_processes(case: str, tmp_path: Path) -> None:
    weights = weights_of_both(case, tmp_path)
    torch.manual_seed(0)
    norm = case.startswith("batchnorm")
    alone = Classifier(norm=norm) if norm or case == "meets" else WITH_MEETINGS[case]()
    make_trainer(precision="64-true").fit(alone, make_loader(48), make_loader(48))
    assert_equal(weights, alone.state_dict())


def test_processes_plan_together_where_only_one_of_them_must(tmp_path: Path) -> None:
    """The profiled step meets the other process, which would wait for it in vain, or take it for its own step."""
    for rank, printed in enumerate(finish(start("shapes", tmp_path))):
        assert "ended well" in printed, printed
        assert printed.count("dpx: profiles a step") == (2 if rank == 0 else 0), "only rank 0 talks"


@pytest.mark.parametrize("case", ["runs-out-early", "runs-out-late"])
def test_a_step_that_meets_other_processes_is_not_repeated_by_one_of_them(case: str, tmp_path: Path) -> None:
    """They would take what it sends again, or what its profile sends, for something else, or wait for ever."""
    first, second = finish(start(case, tmp_path))
    assert "on_oom='replan' does not repeat this step: it meets other processes inside of it" in second, second
    assert "Process 0 lost rank 1 of 2 processes" in first, first


def test_a_step_that_meets_other_processes_is_not_tried_again_on_fewer_rows_by_one_of_them(tmp_path: Path) -> None:
    first, second = finish(start("runs-out-tried", tmp_path))
    assert "cannot be tried on fewer rows: it meets other processes inside of it" in second, second
    assert "Process 0 lost rank 1 of 2 processes" in first, first


def test_processes_look_their_steps_up_together(tmp_path: Path) -> None:
    """One that had to profile its step alone would wait for the others, which found theirs in the cache."""
    finish(start("shapes", tmp_path))
    for printed in finish(start("shapes", tmp_path)):
        assert "ended well" in printed, printed
        assert "dpx: profiles a step" not in printed
    profiles = [path for path in default_folder().iterdir() if '"profiles"' in path.read_text()[:200]]
    assert len(profiles) == 4  # two steps of two processes
    profiles[0].unlink()
    first, second = finish(start("shapes", tmp_path))
    assert "ended well" in first, first
    assert "ended well" in second, second
    assert first.count("dpx: profiles a step") == 1


def test_the_activation_planner_under_ddp_ends_at_the_same_bits(tmp_path: Path) -> None:
    for case in ("planned", "unplanned"):
        for printed in finish(start(case, tmp_path)):
            assert "ended well" in printed, printed
    ranks = {case: [torch.load(tmp_path / f"{case}_{r}.pt", weights_only=True) for r in range(2)] for case in
             ("planned", "unplanned")}  # fmt: skip
    assert_equal(ranks["planned"][0], ranks["unplanned"][0], bitwise=True)
    assert_equal(ranks["planned"][1], ranks["planned"][0], bitwise=True)


def test_under_torchrun_files_are_written_once_and_resume_in_one_process(tmp_path: Path) -> None:
    with programs.quick_interpreter():
        done = programs.run(
            "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}",
            PROGRAM, "checkpoint", tmp_path, timeout=400,
        )  # fmt: skip
    assert done.stdout.count("ended well") == 2, done.stdout + done.stderr
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["half.ckpt"]
    model = Classifier(optimizer="adam")
    trainer = make_trainer(max_epochs=3, strategy=dpx.DPXStrategy(execution="inline"), devices=3)
    trainer.fit(model, make_loader(48), make_loader(48), ckpt_path=tmp_path / "half.ckpt")
    assert_equal(model.state_dict(), one_device(max_epochs=3))


def under_torchrun(folder: Path) -> str:
    """What two agents print that stand for two nodes, each with two processes of two replicas."""
    port = free_port()
    with programs.quick_interpreter():
        agents = [
            programs.start(
                "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}",
                "--max-restarts=2", "--monitor-interval=0.1", "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=restarts", RESTARTED, folder, joint=True,
            )
            for node in range(2)
        ]  # fmt: skip
        return "".join(finish(agents))


def test_a_killed_process_is_started_again_and_the_run_ends_as_if_nothing_was_lost(tmp_path: Path) -> None:
    """torchrun keeps the store of all attempts: found there, addresses of lost processes let every restart time out."""
    weights = []
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "killed":
            (folder / "kill").touch()
        printed = under_torchrun(folder)
        resumed = name == "killed"
        assert printed.count("ended well in attempt") == 4, printed
        assert printed.count(f"resumed: {resumed}") == 4, printed
        assert not (folder / "kill").exists()
        weights.append(torch.load(folder / "weights.pt", weights_only=True))
    assert_equal(weights[1], weights[0], bitwise=True)


def test_different_models_are_refused_at_setup_by_name(tmp_path: Path) -> None:
    printed = finish(start("different", tmp_path))
    for text in printed:
        assert "parameter net.2.weight is [3, 16] torch.float32 on rank 0 and [5, 16] torch.float32 on rank 1" in text
        seconds = float(text.partition("refused after ")[2].split()[0])  # about 1 on an idle machine
        assert seconds < 60, "half the timeout"


def test_gradients_with_a_graph_are_refused_between_processes(tmp_path: Path) -> None:
    for printed in finish(start("second-order", tmp_path)):
        assert "by hand, needs gradients of the whole batch that have a graph" in printed, printed
        assert "Start one process" in printed


def test_a_process_that_ends_is_named_by_the_others(tmp_path: Path) -> None:
    processes = start("endless", tmp_path)
    while len(list(tmp_path.glob("running_*"))) < 2:
        assert all(process.poll() is None for process in processes), finish(processes)
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGKILL)
    printed = finish(processes)
    assert processes[0].returncode not in (0, -signal.SIGKILL)
    assert "Process 0 lost rank 1 of 2 processes during" in printed[0], printed[0]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(dpx.ConfigurationError, match="timeout=0 is not allowed"):
        dpx.DPXStrategy(timeout=0)
