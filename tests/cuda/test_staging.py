"""Uploads of many arrays as one block."""

from functools import cache

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'isobit[cuda]'")

from isobit.cuda import memory, staging

pytestmark = pytest.mark.usefixtures("emulated_cuda")


@pytest.mark.parametrize("part_bytes", [7, 1 << 20])
def test_every_piece_lies_at_its_place_with_zeros_between(monkeypatch, part_bytes):
    monkeypatch.setattr(staging, "PART_BYTES", part_bytes)
    monkeypatch.setattr(staging, "BUFFER_BYTES", 4 * part_bytes)
    monkeypatch.setattr(staging, "_buffers", cache(staging._buffers.__wrapped__))  # of that size
    rng = np.random.default_rng(0)
    arrays = [rng.integers(1, 255, size, dtype=np.uint8) for size in (40, 1, 300)]
    read_only = np.arange(5, dtype=np.int32)
    read_only.flags.writeable = False
    pieces = [(512, arrays[2]), (0, arrays[0]), (256, arrays[1]), (1024, read_only)]
    block = memory.to_host(staging.upload(pieces, 1100))
    expected = np.zeros(1100, np.uint8)
    for place, array in pieces:
        expected[place : place + array.nbytes] = array.view(np.uint8)
    assert np.array_equal(block, expected)


def test_spans_have_at_most_so_many_bytes():
    parts = [(place, np.zeros(30, np.uint8)) for place in range(0, 400, 40)]
    batches = list(staging._spans(parts, 100))
    assert [part for batch in batches for part in batch] == parts
    assert all(batch[-1][0] + 30 - batch[0][0] <= 100 for batch in batches)
    assert len(batches) == 5
