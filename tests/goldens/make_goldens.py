"""Makes the reference files beside it: `python -m tests.goldens.make_goldens` from the repository's root.

logits.npz needs isobit[fidelity] (transformers' model, float32); formats.npz needs NumPy only.
"""

import tempfile
from pathlib import Path

import numpy as np

from isobit.checkpoint.weights import CODEBOOKS, WIDTHS
from tests.goldens.bitwise import ring_values, tile_matrix
from tests.goldens.checkpoints import (
    CHECKPOINTS,
    GOLDEN_POSITIONS,
    KEPT_ROWS,
    digest,
    make_checkpoint,
    tokens_of,
)

FOLDER = Path(__file__).parent
DRAWS = 400
MARGIN = 4  # times the error of the scores


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
    """For every checkpoint some rows' logits by transformers, over tokens that leave no choice to rounding."""
    from isobit.checkpoint.reader import Checkpoint
    from isobit.fidelity.parameters import parameters, table_gathers, text_config
    from isobit.fidelity.reference import Reference

    goldens = {}
    for name in CHECKPOINTS:
        with tempfile.TemporaryDirectory() as parent:
            folder = make_checkpoint(name, Path(parent) / name)
            checkpoint = Checkpoint(folder)
            reference = Reference(text_config(folder), table_gathers(checkpoint))
            reference.load(parameters(checkpoint))
            tokens, run = decided_run(name, checkpoint, reference)
            goldens[f"{name}/digest"] = np.array(digest(folder))
            goldens[f"{name}/tokens"] = tokens
            goldens[f"{name}/logits"] = run.logits[list(KEPT_ROWS)]
    return goldens


def decided_run(name, checkpoint, reference):
    """The first draw of tokens whose choices all have margins well above what isobit's roundings do to the scores."""
    from isobit.fidelity.choices import all_forced, score_errors
    from isobit.fidelity.matched import matched_roundings

    config = checkpoint.config
    for draw in range(DRAWS):
        tokens = tokens_of(name, config.vocab_size, config.ple_end_token, GOLDEN_POSITIONS, draw)
        run = reference.run(tokens)
        with matched_roundings(reference, checkpoint):
            rounded = reference.run(tokens, all_forced(run.choices))
        errors = score_errors(rounded.choices, run.choices)
        if all(smallest_margin(layer) > MARGIN * errors[key] for key, layer in run.choices.items()):
            print(f"{name}: draw {draw}")
            return tokens, run
    raise SystemExit(f"{name}: none of {DRAWS} draws is free of near ties")


def smallest_margin(layer) -> float:
    """By how much the scores prefer what was chosen, in the closest choice that is not an exact tie at zero."""
    margins = [np.inf]
    for scores, chosen in zip(layer.scores, layer.chosen, strict=True):
        left = np.delete(scores, chosen)
        if len(left) and (margin := scores[chosen].min() - left.max()):
            margins.append(float(margin))
    return min(margins)


if __name__ == "__main__":
    np.savez_compressed(FOLDER / "formats.npz", **format_goldens())
    np.savez_compressed(FOLDER / "logits.npz", **logit_goldens())
