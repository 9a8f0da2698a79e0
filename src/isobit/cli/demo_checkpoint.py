"""The demo's checkpoint, made once and kept in the user's cache folder."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

import isobit
from isobit.errors import IsobitError

PRESET = "demo"


def demo_checkpoint() -> Path:
    """The folder of the demo checkpoint; made first when it is not there. IsobitError when it cannot be written."""
    cache = platformdirs.user_cache_path("isobit")
    folder = cache / f"{PRESET}-{isobit.__version__}-{_recipe()}"
    if not folder.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _make(cache, folder)
        except OSError as error:
            advice = "free some space or set XDG_CACHE_HOME"
            raise IsobitError(f"cannot write the demo checkpoint to {cache}: {error.strerror}: {advice}") from None
    return folder


@contextmanager
def kept_or_temporary() -> Iterator[Path]:
    """The demo checkpoint, from the cache; where that cannot be written, made for this once and removed at the end.

    Raises IsobitError when there is room for neither.
    """
    try:
        kept = demo_checkpoint()
    except IsobitError:
        kept = None
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="isobit-demo-") as temporary:
        _make(Path(temporary), Path(temporary) / PRESET)
        yield Path(temporary) / PRESET


def _make(cache: Path, folder: Path) -> None:
    from isobit.checkpoint.synth import synthesize
    from isobit.checkpoint.unfinished import unfinished_folder

    # One name for all versions, so that each removes what killed ones of another have left.
    with unfinished_folder(cache / PRESET) as unfinished:
        made = unfinished / "checkpoint"
        synthesize(made, preset=PRESET)
        try:
            os.rename(made, folder)
        except OSError:
            # Another process may have been faster; its folder is the same.
            if not folder.is_dir():
                raise
            shutil.rmtree(made)


def _recipe() -> str:
    """What tells checkpoints of different makers apart: a digest of the code that writes them."""
    from isobit import checkpoint

    digest = hashlib.sha256()
    for source in sorted(Path(checkpoint.__file__).parent.glob("synth*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:8]
