"""The whole check of a checkpoint: its tokens, its memory, both runs, the report."""

from pathlib import Path

import numpy as np

from isobit.checkpoint.config import FlashNextConfig
from isobit.checkpoint.opening import open_checkpoint
from isobit.checkpoint.tokenizer import Tokenizer
from isobit.engine.memory import GIB, available, gib
from isobit.errors import IsobitError
from isobit.fidelity.boundaries import part_names
from isobit.fidelity.compare import CPU_LIMITS, CUDA_LIMITS, Report, Say, compare
from isobit.fidelity.isobit_run import run_isobit
from isobit.fidelity.parameters import parameters, table_gathers, text_config
from isobit.fidelity.reference import Reference

PAST_BUDGET = 96  # positions past the indexer's budget that a check has unless told otherwise
END_TOKEN_SPACING = 37  # random tokens hold an end token this often, so that n-grams are cut
LOGIT_COPIES = 6  # isobit's, those of up to four reference runs, and one at work
MASK_COPIES = 4  # of an attention layer's score matrix: scores, mask, softmax, and one at work
CUT_COPIES = 2  # isobit's values and the reference's at every cut


def check(
    folder: Path,
    tokens: int | None = None,
    text: Path | None = None,
    seed: int = 0,
    memory_gib: float | None = None,
    say: Say = lambda step: None,
    device: str = "cpu",
) -> Report:
    """Teacher-force the same tokens through isobit and the reference.

    tokens: how many (None: enough for 96 positions past the indexer's budget). text: a file to take them from; else
    they are random, keyed by `seed`. device: isobit's; the reference runs on the CPU. Raises IsobitError when the
    checkpoint, the text or the memory does not allow it.
    """
    checkpoint = open_checkpoint(folder)
    count = _count(checkpoint.config, tokens)
    ids = random_tokens(checkpoint.config, count, seed) if text is None else text_tokens(folder, text, count)
    reference = Reference(text_config(folder), table_gathers(checkpoint))
    _refuse_what_does_not_fit(folder, reference, checkpoint.config, len(ids), memory_gib)
    say("isobit")
    mine = run_isobit(checkpoint, ids, device)
    say("dequantizing for the reference")
    reference.load(parameters(checkpoint))
    return compare(mine, reference, checkpoint, ids, say, CPU_LIMITS if device == "cpu" else CUDA_LIMITS)


def random_tokens(config: FlashNextConfig, count: int, seed: int) -> np.ndarray:
    """int64 [count], uniform over the vocabulary, with end tokens inside where the model knows one."""
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, count)
    if config.eos_token_ids:
        ids[END_TOKEN_SPACING::END_TOKEN_SPACING] = config.eos_token_ids[0]
    return ids


def text_tokens(folder: Path, text: Path, count: int) -> np.ndarray:
    """int64 [count or fewer], the beginning of a UTF-8 file in the checkpoint's tokens."""
    try:
        content = text.read_text(encoding="utf-8")
    except OSError as error:
        raise IsobitError(f"{text}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise IsobitError(f"{text}: is not UTF-8 text; give a text file") from None
    ids = Tokenizer(folder).encode(content)[:count]
    if not ids:
        raise IsobitError(f"{text}: holds no tokens; give a text file with at least a few hundred")
    return np.array(ids, np.int64)


def _count(config: FlashNextConfig, tokens: int | None) -> int:
    window = config.max_position_embeddings
    if tokens is None:
        past = config.indexer_budget + config.indexer_compress_ratio - 1 if config.attention_layers else 0
        return min(past + PAST_BUDGET, window)
    if not 1 <= tokens <= window:
        raise IsobitError(f"{tokens} tokens: expected 1 to the checkpoint's window of {window:,}")
    return tokens


def _refuse_what_does_not_fit(
    folder: Path, reference: Reference, config: FlashNextConfig, tokens: int, memory_gib: float | None
) -> None:
    largest = max(int(np.prod(shape)) * 4 for shape in reference.shapes.values())
    logits = LOGIT_COPIES * 4 * tokens * config.vocab_size
    masks = MASK_COPIES * 4 * config.num_attention_heads * tokens**2
    rows = logits + masks + CUT_COPIES * 4 * tokens * config.stream_width * len(part_names(config))
    needed = reference.nbytes + largest + rows
    limit = available() if memory_gib is None else int(memory_gib * GIB)
    if needed > limit:
        whose = "are available" if memory_gib is None else "are allowed (--memory-gib)"
        raise IsobitError(
            f"{folder}: the float32 reference needs {gib(needed)} (weights {gib(reference.nbytes + largest)}, "
            f"{tokens:,} tokens {gib(rows)}), but {gib(limit)} {whose}; "
            "check a checkpoint of fewer layers or experts, or use a larger machine"
        )
