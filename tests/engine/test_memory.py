"""How much memory there is: of the machine, and of the container that the process runs in."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from isobit.engine import memory

MIB = 1 << 20


def group(folder: Path, limit: str, used: int, files: tuple[int, int] = (0, 0)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("memory.max").write_text(f"{limit}\n")
    folder.joinpath("memory.current").write_text(f"{used}\n")
    active, inactive = files
    folder.joinpath("memory.stat").write_text(f"anon 5\nactive_file {active}\ninactive_file {inactive}\nslab 3\n")


@pytest.fixture
def own(tmp_path) -> Path:
    """A process in the group /pod/box."""
    path = tmp_path / "own"
    path.write_text("12:cpuset:/\n0::/pod/box\n")
    return path


def test_every_group_with_a_limit_counts_and_pages_of_files_are_left(tmp_path, own):
    groups = tmp_path / "cgroup"
    group(groups / "pod", str(500 * MIB), 300 * MIB)
    group(groups / "pod" / "box", str(400 * MIB), 390 * MIB, files=(50 * MIB, 100 * MIB))
    group(groups / "other", str(MIB), 0)
    assert list(memory.left_in_groups(groups, own)) == [160 * MIB, 200 * MIB]
    group(groups / "pod" / "box", "max", 390 * MIB)
    group(groups / "pod", str(100 * MIB), 300 * MIB)
    assert list(memory.left_in_groups(groups, own)) == [0]


def test_groups_of_the_first_version_count_too_also_where_a_container_sees_none_but_its_own(tmp_path):
    own, groups = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("4:memory:/docker/0123\n0::/\n")
    memory_groups = groups / "memory"
    memory_groups.mkdir(parents=True)
    memory_groups.joinpath("memory.limit_in_bytes").write_text(f"{300 * MIB}\n")
    memory_groups.joinpath("memory.usage_in_bytes").write_text(f"{200 * MIB}\n")
    memory_groups.joinpath("memory.stat").write_text(f"total_active_file {MIB}\ntotal_inactive_file {2 * MIB}\n")
    assert list(memory.left_in_groups(groups, own)) == [103 * MIB]


@pytest.mark.parametrize("said", [None, "", "3:memory:/box\n", "3:cpu:/odd\n", "0::/gone\n", "0::/odd\n"])
def test_without_such_groups_nothing_counts(tmp_path, said):
    own, groups = tmp_path / "own", tmp_path / "cgroup"
    group(groups / "odd", "lots", 1)
    if said is not None:
        own.write_text(said)
    assert list(memory.left_in_groups(groups, own)) == []


def test_a_container_has_no_more_than_its_limit(tmp_path, own, monkeypatch):
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000 * MIB))
    left = memory.left_in_groups
    monkeypatch.setattr(memory, "left_in_groups", lambda: left(tmp_path, own))
    assert memory.available() == 1000 * MIB
    group(tmp_path / "pod" / "box", str(400 * MIB), 300 * MIB)
    assert memory.available() == 100 * MIB
