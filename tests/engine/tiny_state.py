"""A state pool whose contents are a known function of the tokens: fast, and as strict as a model about each row."""

import hashlib
from functools import lru_cache

import numpy as np

from isobit.model.state import StatePool, Stream
from isobit.ops import load_ops
from isobit.ops.batch import PAGE_ROWS, AttentionCache

BLOCK = 4
VOCABULARY = 5


def tiny_pool(slots: int = 3, pages: int = 24) -> StatePool:
    """Recurrent state and two caches, one of them the MTP head's, which lags a row behind."""
    recurrent = {"a.conv": np.zeros((slots, 2, 3), np.float32), "a.history": np.zeros((slots, 2), np.int32)}
    caches = {name: _cache(pages) for name in ("b", "mtp")}
    return StatePool(load_ops("cpu"), recurrent, {}, caches, BLOCK, slots, pages)


def feed(pool: StatePool, stream: Stream, tokens) -> None:
    """Take the stream from its row to the end of `tokens`, which begin with those that it has seen."""
    tokens = [int(token) for token in tokens]
    pool.reserve(stream, len(tokens) - stream.rows)
    digest = hashlib.sha256(_bytes(tokens[: stream.rows]))
    for row in range(stream.rows, len(tokens)):
        digest.update(_bytes(tokens[row : row + 1]))
        values = np.frombuffer(digest.digest(), "<u2")
        _write(pool.caches["b"], stream, row, values)
        if row:
            _write(pool.caches["mtp"], stream, row - 1, values)
        pool.recurrent["a.conv"][stream.slot] = values[:6].reshape(2, 3)
        pool.recurrent["a.history"][stream.slot] = values[6:8]
        stream.rows = row + 1


def logits_after(tokens) -> np.ndarray:
    """float32 [VOCABULARY], what the last of `tokens` gives."""
    seed = int.from_bytes(hashlib.sha256(_bytes(tokens)).digest()[:8], "little")
    return np.random.default_rng(seed).random(VOCABULARY, np.float32)


def digest_after(tokens) -> str:
    """The digest of the state that `tokens` lead to, computed afresh."""
    return _digest_after(tuple(tokens))


@lru_cache(maxsize=1000)
def _digest_after(tokens: tuple[int, ...]) -> str:
    pool = tiny_pool(slots=1, pages=-(-len(tokens) // PAGE_ROWS))
    stream = pool.open()
    feed(pool, stream, tokens)
    return pool.digest(stream)


def _bytes(tokens) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


def _cache(pages: int) -> AttentionCache:
    kept = (pages, PAGE_ROWS, 1, 2)
    return AttentionCache(
        np.zeros(kept, np.uint16),
        np.zeros(kept, np.uint16),
        np.zeros((pages, PAGE_ROWS, 2), np.float32),
        np.zeros((pages, PAGE_ROWS // BLOCK, 2), np.float32),
    )


def _write(cache: AttentionCache, stream: Stream, row: int, values: np.ndarray) -> None:
    page, offset = stream.pages[row // PAGE_ROWS], row % PAGE_ROWS
    cache.keys[page, offset] = values[8:10]
    cache.values[page, offset] = values[10:12]
    cache.index_raw[page, offset] = values[12:14]
    if offset % BLOCK == BLOCK - 1:
        cache.index_pooled[page, offset // BLOCK] = values[14:16]
