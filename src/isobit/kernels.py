"""Settings of the kernel compiler, made before it is imported: where compiled kernels are kept, how threads wait."""

import hashlib
import os
import shutil
import sys
from functools import cache
from pathlib import Path

import platformdirs

FAMILY = "isobit-kernels"
KEPT_VERSIONS = 4  # caches of other versions of the sources that are left in place


def source_digest(root: Path = Path(__file__).parent) -> str:
    """Hexadecimal digest of every source file that a kernel may be compiled from, by name and content."""
    digest = hashlib.sha256()
    for path in sorted([*root.glob("ops/**/*.py"), *root.glob("checkpoint/*.py")]):
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
    """Point the compiler at this version's cache and let waiting threads sleep; returns the cache's folder."""
    # OpenMP threads that spin at a barrier stall each other whenever other processes use the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Numba knows a cached kernel by its own file alone, so an edit to a function that it inlines would go unseen.
    folder = cache_folder()
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    numba = sys.modules.get("numba")
    if numba is not None:
        numba.config.CACHE_DIR = str(folder)
    drop_old_versions(folder)
    return folder


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
