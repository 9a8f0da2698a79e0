"""Makes the reference files beside it: `python -m tests.goldens.make_goldens` from the repository's root.

logits.npz needs isobit[fidelity] (transformers' model, float32); formats.npz needs NumPy only.
"""

import tempfile
from pathlib import Path

import numpy as np

from isobit.checkpoint.weights import CODEBOOKS, WIDTHS
from tests.goldens.bitwise import ring_values, tile_matrix
from tests.goldens.checkpoints import CHECKPOINTS, KEPT_ROWS, digest, make_checkpoint, tokens_of

FOLDER = Path(__file__).parent


def format_goldens() -> dict[str, np.ndarray]:
    """For every codebook and width a random tile and its values; for every ring width one of 160 and one of 256."""
    generator = np.random.Generator(np.random.PCG64(2024))
    goldens = {}
    for codebook in CODEBOOKS:
        for bits in WIDTHS:
            if bits != int(bits) and codebook != "mul1":
                continue
            words = generator.integers(0, 1 << 16, int(16 * bits), dtype=np.uint16)
            goldens[f"tile/{codebook}/{bits:g}/words"] = words
            goldens[f"tile/{codebook}/{bits:g}/values"] = tile_matrix(words.tolist(), bits, codebook)
    for bits in range(1, 9):
        for count in (160, 256):
            words = generator.integers(0, 1 << 16, count * bits // 16, dtype=np.uint16)
            goldens[f"ring/{count}/{bits}/words"] = words
            goldens[f"ring/{count}/{bits}/values"] = ring_values(words.tolist(), bits)
    return goldens


def logit_goldens() -> dict[str, np.ndarray]:
    """For every checkpoint the logits of some rows, by transformers as it is and with isobit's declared roundings."""
    from isobit.checkpoint.reader import Checkpoint
    from isobit.fidelity.matched import matched_roundings
    from isobit.fidelity.parameters import parameters, table_gathers, text_config
    from isobit.fidelity.reference import Reference

    goldens = {}
    for name in CHECKPOINTS:
        with tempfile.TemporaryDirectory() as parent:
            folder = make_checkpoint(name, Path(parent) / name)
            checkpoint = Checkpoint(folder)
            reference = Reference(text_config(folder), table_gathers(checkpoint))
            reference.load(parameters(checkpoint))
            tokens = tokens_of(name, checkpoint.config.vocab_size, checkpoint.config.ple_end_token)
            plain = reference.run(tokens)
            with matched_roundings(reference, checkpoint):
                matched = reference.run(tokens)
            goldens[f"{name}/digest"] = np.array(digest(folder))
            goldens[f"{name}/plain"] = plain.logits[list(KEPT_ROWS)]
            goldens[f"{name}/matched"] = matched.logits[list(KEPT_ROWS)]
    return goldens


if __name__ == "__main__":
    np.savez_compressed(FOLDER / "formats.npz", **format_goldens())
    np.savez_compressed(FOLDER / "logits.npz", **logit_goldens())
