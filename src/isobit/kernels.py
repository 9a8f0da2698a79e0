"""Settings of the kernel compiler, made before it is imported: where compiled kernels are kept."""

import atexit
import hashlib
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

import platformdirs

from isobit.errors import IsobitError

FAMILY = "isobit-kernels"
KEPT_VERSIONS = 4  # caches of other versions of the sources that are left in place

_refused: list[Path] = []  # the folder that could not be written, if there is one


def source_digest(root: Path = Path(__file__).parent) -> str:
    """Hexadecimal digest of every source file that a CPU kernel may be compiled from, by name and content."""
    digest = hashlib.sha256()
    for path in sorted([*root.glob("ops/**/*.py"), *root.glob("checkpoint/*.py")]):
        if path.name.startswith("cuda"):
            continue
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where this version's compiled kernels are kept, below NUMBA_CACHE_DIR or the user's cache folder."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    base = Path(chosen) if chosen else platformdirs.user_cache_path("isobit")
    # A process that isobit started finds what its parent chose.
    family = base.parent if base.parent.name == FAMILY else base / FAMILY
    return family / source_digest()


@cache
def configure() -> Path:
    """Point the compiler at this version's cache; returns the cache's folder.

    Where that cannot be written it is a temporary folder, removed when the process ends. Raises IsobitError when there
    is none either.
    """
    # Numba knows a cached kernel by its own file alone, so an edit to a function that it inlines would go unseen.
    folder = _writable(cache_folder())
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    numba = sys.modules.get("numba")
    if numba is not None:
        numba.config.CACHE_DIR = str(folder)
    drop_old_versions(folder)
    return folder


def check_compiler() -> None:
    """Raises IsobitError when Numba, as the machine and its settings are, cannot compile the kernels."""
    import numba
    from numba.core.registry import cpu_target

    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        raise IsobitError("NUMBA_DISABLE_JIT is set, but isobit computes with compiled kernels: unset it")
    triple, processor, features = cpu_target.target_context.codegen().magic_tuple()
    # A processor that the user names may have features that are not listed.
    known = bool(features) or processor == "generic"
    if triple.startswith("x86_64") and known and "+f16c" not in features.split(","):
        raise IsobitError(
            f"kernels are compiled for a processor without F16C ({processor}), which isobit needs on x86-64: give a "
            "virtual machine the host's processor model, and unset NUMBA_CPU_NAME and NUMBA_CPU_FEATURES"
        )


def none_kept() -> bool:
    """Whether no kernel of this version has been compiled yet."""
    return not any(configure().rglob("*.nbi"))


def refused_folder() -> Path | None:
    """Where compiled kernels would be kept if it could be written; None if they are."""
    configure()
    return _refused[0] if _refused else None


def _writable(folder: Path) -> Path:
    """`folder`, or a temporary one in its place: Numba would take older kernels that lie beside the sources."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        pass
    try:
        temporary = Path(tempfile.mkdtemp(prefix="isobit-"))
    except OSError as error:
        raise IsobitError(
            f"compiled kernels can be kept neither in {folder} nor in a temporary folder ({error.strerror}): set "
            "NUMBA_CACHE_DIR to a folder that can be written"
        ) from None
    atexit.register(_remove_in, os.getpid(), temporary)
    _refused.append(folder)
    return temporary / FAMILY / folder.name


def _remove_in(process: int, folder: Path) -> None:
    """Remove a folder, but not from a fork of the process that made it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def drop_old_versions(folder: Path) -> None:
    """Remove all but the latest few caches beside `folder`; a cache that cannot be removed is left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        versions = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return
    for version in versions[1 + KEPT_VERSIONS :]:
        shutil.rmtree(version, ignore_errors=True)
