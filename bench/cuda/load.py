"""How fast a checkpoint gets into GPU memory, beside a plain read of the same bytes; with and without the page cache.

python bench/cuda/load.py DIR [--repeats 3] [--device cuda]

Cold: the system was told to drop the files' pages first; it keeps those that other processes map. Writes nothing.
"""

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isobit.checkpoint.reader import Checkpoint
from isobit.model.load import load_model, parts_of
from isobit.model.read_ahead import READERS, stored_bytes, tensor_names
from isobit.ops import load_ops

CHUNK_BYTES = 8 << 20
CONTEXT = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    total = sum(stored_bytes(Checkpoint(options.folder), part) for part in parts_of(Checkpoint(options.folder)))
    print(f"{options.folder}: {total / 1e9:.2f} GB are loaded; medians of {options.repeats}")
    ops = load_ops(options.device)
    ways = {"plain read": lambda: read(options.folder), "load": lambda: load(options.folder, ops)}
    for state in ("cold", "warm"):
        for way, run in ways.items():
            seconds = [timed(options.folder, run, cold=state == "cold") for _ in range(options.repeats)]
            median = statistics.median(seconds)
            print(f"{state} {way}: {median:.2f} s, {total / 1e9 / median:.2f} GB/s", flush=True)


def timed(folder: Path, run: Callable[[], None], cold: bool) -> float:
    """Seconds of a run."""
    if cold:
        drop_pages(folder)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def drop_pages(folder: Path) -> None:
    """Have the system forget what it holds of the checkpoint's files."""
    os.sync()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(folder: Path, ops: object) -> None:
    """The checkpoint's weights on the device, and away again."""
    with Checkpoint(folder) as checkpoint:
        model = load_model(checkpoint, ops, CONTEXT)
    if model.ops.family == "cuda":
        import torch

        torch.cuda.synchronize()
        del model
        torch.cuda.empty_cache()


def read(folder: Path) -> None:
    """The bytes that loading reads, each thread's into a buffer of its own."""
    own = threading.local()

    def read_piece(piece: tuple[Path, int, int]) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(bytearray(CHUNK_BYTES))
        file, offset, size = piece
        os.preadv(opened[file], [own.buffer[:size]], offset)

    with Checkpoint(folder) as checkpoint, ThreadPoolExecutor(READERS) as readers:
        opened = {path: os.open(path, os.O_RDONLY) for path in checkpoint.store.files}
        try:
            for _ in readers.map(read_piece, pieces(checkpoint)):
                pass
        finally:
            for descriptor in opened.values():
                os.close(descriptor)


def pieces(checkpoint: Checkpoint) -> Iterator[tuple[Path, int, int]]:
    """File, offset and size of what is read at a time; tensors that lie end to end are read together."""
    names = [name for part in parts_of(checkpoint) for name in tensor_names(checkpoint, part)]
    infos = sorted(map(checkpoint.store.info, names), key=lambda info: (info.file, info.offset))
    ranges: list[tuple[Path, int, int]] = []
    for info in infos:
        file, begin, end = ranges[-1] if ranges else (None, 0, 0)
        if file == info.file and end == info.offset:
            ranges[-1] = (info.file, begin, info.offset + info.nbytes)
        else:
            ranges.append((info.file, info.offset, info.offset + info.nbytes))
    for file, begin, end in ranges:
        for offset in range(begin, end, CHUNK_BYTES):
            yield file, offset, min(CHUNK_BYTES, end - offset)


if __name__ == "__main__":
    main()
