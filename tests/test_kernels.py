"""Compiled kernels are kept apart for each version of the sources, wherever the user's cache may be."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from isobit.kernels import FAMILY, KEPT_VERSIONS, drop_old_versions, source_digest

COMPILE = """
import os, sys
import numpy as np
from isobit.ops.norm.cpu import norm
norm(np.ones((3, 64), np.float32), np.zeros(64, np.float32), 1e-6)
print(os.environ["NUMBA_CACHE_DIR"])
"""


def compiled(environment: dict[str, str]) -> Path:
    """Compile a kernel in a new process; where it was kept."""
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    command = [sys.executable, "-c", COMPILE]
    return Path(
        subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=True).stdout.strip()
    )


def test_kernels_are_kept_below_the_users_cache(tmp_path):
    folder = compiled({"XDG_CACHE_HOME": str(tmp_path)})
    assert folder == tmp_path / "isobit" / FAMILY / source_digest()
    assert list(folder.rglob("*.nbi"))


def test_the_users_own_choice_is_respected(tmp_path):
    folder = compiled({"NUMBA_CACHE_DIR": str(tmp_path)})
    assert folder == tmp_path / FAMILY / source_digest()
    assert compiled({"NUMBA_CACHE_DIR": str(folder)}) == folder


@pytest.mark.parametrize("base", ["/dev/null/nowhere", ""])
def test_a_folder_that_kernels_cannot_be_kept_in_is_told(tmp_path, base):
    code = "from isobit.kernels import cache_folder, refused_folder; print(cache_folder()); print(refused_folder())"
    environment = os.environ | {"NUMBA_CACHE_DIR": base or str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    chosen, refused = ran.stdout.split()
    assert refused == (chosen if base else "None")


@pytest.mark.skipif(os.name != "posix", reason="needs a path that cannot be a folder")
def test_without_a_cache_kernels_are_kept_in_a_temporary_folder_and_never_beside_the_sources(tmp_path):
    folder = compiled({"NUMBA_CACHE_DIR": "/dev/null/nowhere", "TMPDIR": str(tmp_path)})
    assert folder.relative_to(tmp_path).parts[1:] == (FAMILY, source_digest())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="needs a path that cannot be a folder")
def test_a_machine_without_a_writable_folder_is_told_so():
    places = {"NUMBA_CACHE_DIR": "/dev/null/nowhere"}
    code = "import tempfile; tempfile.tempdir = '/dev/null'; import isobit.ops"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | places, capture_output=True, text=True)
    assert "set NUMBA_CACHE_DIR to a folder that can be written" in done.stderr


def test_a_first_run_is_known_as_such(tmp_path):
    code = f"from isobit.kernels import none_kept; print(none_kept()){COMPILE}print(none_kept())"
    for expected in (["True", "False"], ["False", "False"]):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        first, *_, last = done.stdout.split()
        assert [first, last] == expected


def test_another_source_is_another_version(tmp_path):
    import isobit

    copy = tmp_path / "isobit"
    shutil.copytree(Path(isobit.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert source_digest(copy) == source_digest()
    (copy / "ops/norm/cuda_more.py").write_text("GPUs have kernels of their own")
    assert source_digest(copy) == source_digest()
    with (copy / "ops/lanes.py").open("a") as file:
        file.write("\n")
    assert source_digest(copy) != source_digest()


def test_old_versions_are_dropped(tmp_path):
    for age in range(9):
        version = tmp_path / f"version{age}"
        version.mkdir()
        os.utime(version, (1e9 - age, 1e9 - age))
    drop_old_versions(tmp_path / "new")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["new", *(f"version{age}" for age in range(KEPT_VERSIONS))]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NUMBA_DISABLE_JIT": "1"}, "NUMBA_DISABLE_JIT is set"),
        ({"NUMBA_CPU_NAME": "generic"}, r"a processor without F16C \(generic\)"),
        ({"NUMBA_CPU_FEATURES": "+sse2,-f16c"}, "a processor without F16C"),
    ],
)
def test_a_compiler_that_cannot_compile_the_kernels_is_refused(environment, message, tmp_path):
    if "CPU" in str(environment) and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("needs x86-64")
    command = [sys.executable, "-m", "isobit", "generate", str(tmp_path), "prompt"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert re.search(message, done.stderr)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs x86-64")
def test_a_processor_that_the_user_names_is_taken_as_it_is():
    subprocess.run(
        [sys.executable, "-c", "import isobit.ops"], env={**os.environ, "NUMBA_CPU_NAME": "haswell"}, check=True
    )
