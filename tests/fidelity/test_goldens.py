"""isobit against reference values that were made elsewhere (tests/goldens/make_goldens.py); needs no PyTorch."""

from pathlib import Path

import numpy as np
import pytest

from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.trellis import codebook_values, tile_to_matrix, unpack_ring, unpack_states
from isobit.fidelity.isobit_run import run_isobit
from tests.goldens.checkpoints import CHECKPOINTS, KEPT_ROWS, digest, make_checkpoint

GOLDENS = Path(__file__).parent.parent / "goldens"
FORMATS = np.load(GOLDENS / "formats.npz")
LOGITS = np.load(GOLDENS / "logits.npz")
HALF_OPERANDS = 5e-3  # relative error of logits whose linear layers have half-precision operands


def cases(kind: str) -> list[str]:
    return [name.removesuffix("/words") for name in FORMATS if name.startswith(kind) and name.endswith("/words")]


@pytest.mark.parametrize("case", cases("tile"))
def test_tile(case):
    _, codebook, bits = case.split("/")
    tile = FORMATS[f"{case}/words"].view(np.int16)[None, None]
    values = tile_to_matrix(codebook_values(codebook)[unpack_states(tile, float(bits))])
    assert values.tobytes() == FORMATS[f"{case}/values"].tobytes()


@pytest.mark.parametrize("case", cases("ring"))
def test_ring(case):
    states = unpack_ring(FORMATS[f"{case}/words"].view(np.int16), int(case.split("/")[2]))
    assert codebook_values("mul1")[states].tobytes() == FORMATS[f"{case}/values"].tobytes()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits(name, tmp_path):
    folder = make_checkpoint(name, tmp_path / name)
    assert digest(folder) == LOGITS[f"{name}/digest"], "the synthetic checkpoint has changed: remake the goldens"
    checkpoint = Checkpoint(folder)
    logits = run_isobit(checkpoint, LOGITS[f"{name}/tokens"]).logits[list(KEPT_ROWS)]
    expected = LOGITS[f"{name}/logits"]
    errors = np.linalg.norm(logits - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() < HALF_OPERANDS
    assert np.array_equal(logits.argmax(1), expected.argmax(1))
