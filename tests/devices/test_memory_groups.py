"""Limits of containers and schedulers, read from files as Linux has them."""

from pathlib import Path

import pytest

from lightning_dpx.devices.memory_groups import GroupMemory, group_memory

MIB = 2**20


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def own_groups(folder: Path, text: str) -> Path:
    path = folder / "self"
    path.write_text(text)
    return path


def test_the_group_with_the_least_left_counts(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    stat = f"anon 5\ninactive_file {2 * MIB}\nactive_file {MIB}"
    write(root / "slurm" / "job", memory__max=100 * MIB, memory__current=40 * MIB, memory__stat=stat)
    write(root / "slurm", memory__max=200 * MIB, memory__current=190 * MIB, memory__stat=stat)
    write(root, memory__max="max", memory__current=900 * MIB, memory__stat=stat)
    own = own_groups(tmp_path, "0::/slurm/job\n")
    assert group_memory(own, root) == GroupMemory(200 * MIB, 13 * MIB)
    # What is used is read each time.
    write(root / "slurm", memory__current=100 * MIB)
    assert group_memory(own, root) == GroupMemory(100 * MIB, 63 * MIB)


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(root, memory__max=64 * MIB, memory__current=70 * MIB, memory__stat="inactive_file 0")
    assert group_memory(own_groups(tmp_path, "0::/\n"), root) == GroupMemory(64 * MIB, 0)


def test_the_first_version_has_other_files(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    stat = f"inactive_file 1\ntotal_inactive_file {MIB}\nactive_file 1\ntotal_active_file {MIB}"
    limited = {"memory__limit_in_bytes": 50 * MIB, "memory__usage_in_bytes": 20 * MIB, "memory__stat": stat}
    write(root / "memory" / "docker" / "abc", **limited)
    write(root / "memory", **{**limited, "memory__limit_in_bytes": 2**63 - 4096})
    own = own_groups(tmp_path, "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    assert group_memory(own, root) == GroupMemory(50 * MIB, 32 * MIB)


@pytest.mark.parametrize("text", ["0::/\n", "1:name=systemd:/\n", ""])
def test_without_a_limit_there_is_none(tmp_path: Path, text: str) -> None:
    write(tmp_path / "cgroup", memory__max="max", memory__current=1)
    assert group_memory(own_groups(tmp_path, text), tmp_path / "cgroup") is None


def test_without_control_groups_there_is_none(tmp_path: Path) -> None:
    assert group_memory(tmp_path / "nothing", tmp_path) is None
