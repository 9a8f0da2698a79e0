"""The whole check of a checkpoint: its tokens, its memory, both runs, the report."""

import gc
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from isobit.checkpoint.config import FlashNextConfig
from isobit.checkpoint.opening import open_checkpoint
from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.tokenizer import Tokenizer
from isobit.engine.memory import GIB, available, gib
from isobit.engine.placement import Placement
from isobit.errors import IsobitError
from isobit.fidelity.boundaries import part_names
from isobit.fidelity.compare import CPU_LIMITS, CUDA_LIMITS, Report, Say, compare
from isobit.fidelity.isobit_run import run_isobit
from isobit.fidelity.parameters import parameters, table_gathers, text_config
from isobit.fidelity.reference import Reference
from isobit.fidelity.tensors import DeviceArrays

PAST_BUDGET = 96  # positions past the indexer's budget that a check has unless told otherwise
END_TOKEN_SPACING = 37  # random tokens hold an end token this often, so that n-grams are cut
LOGIT_COPIES = 6  # isobit's, those of up to four reference runs, and one at work
MASK_COPIES = 4  # of an attention layer's score matrix: scores, mask, softmax, and one at work
CUT_COPIES = 2  # isobit's values and the reference's at every cut
GPU_LOGIT_COPIES = 2  # of a run, and one at work
GPU_STREAM_COPIES = 64  # activations of a layer at work, each at most as large as the streams
GPU_DECODING = 4 * GIB  # of a linear layer that is being decoded


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
    they are random, keyed by `seed`. device: isobit's and the reference's. memory_gib: the most memory of that device
    to use (None: what is free). Raises IsobitError when the checkpoint, the text or the memory does not allow it.
    """
    checkpoint = open_checkpoint(folder)
    count = token_count(checkpoint.config, tokens)
    ids = random_tokens(checkpoint.config, count, seed) if text is None else text_tokens(folder, text, count)
    reference = fitting_reference(folder, checkpoint, len(ids), memory_gib, device)
    say("isobit")
    mine = run_isobit(checkpoint, ids, device)
    say("dequantizing for the reference")
    load_reference(reference, checkpoint)
    report = compare(mine, reference, checkpoint, ids, say, CPU_LIMITS if device == "cpu" else CUDA_LIMITS)
    # A difference must not be that of two states of a file.
    checkpoint.store.check_unedited()
    return report


def fitting_reference(
    folder: Path, checkpoint: Checkpoint, tokens: int, memory_gib: float | None = None, device: str = "cpu"
) -> Reference:
    """The reference on isobit's device, its weights yet to come; IsobitError, with the numbers, if it does not fit."""
    reference = Reference(text_config(folder), table_gathers(checkpoint), _place(device))
    needs = _needs(reference, checkpoint.config, tokens)
    limit = _device_limit(reference) if memory_gib is None else int(memory_gib * GIB)
    if needs.on_device > limit:
        whose = "are available" if memory_gib is None else "are allowed (--memory-gib)"
        where = "" if reference.device.type == "cpu" else " on the GPU"
        raise IsobitError(
            f"{folder}: the float32 reference needs {gib(needs.on_device)}{where} (weights {gib(needs.weights)}, "
            f"{tokens:,} tokens {gib(needs.rows)}), but {gib(limit)} {whose}; "
            "check a checkpoint of fewer layers or experts (isobit synth --layers, --experts), or use a larger machine"
        )
    if needs.beside > available():
        raise IsobitError(
            f"{folder}: {tokens:,} tokens need {gib(needs.beside)} of main memory for the logits of all runs, but "
            f"{gib(available())} are available; take fewer --tokens"
        )
    return reference


def load_reference(reference: Reference, checkpoint: Checkpoint) -> None:
    """Dequantize the checkpoint's weights onto the reference's device, once what ran there before is freed."""
    gc.collect()
    if reference.device.type == "cpu":
        reference.load(parameters(checkpoint))
    else:
        torch.cuda.empty_cache()
        reference.load(parameters(checkpoint, arrays=DeviceArrays(reference.device)))


def token_count(config: FlashNextConfig, tokens: int | None) -> int:
    """How many positions to compare: those asked for, or enough for 96 past the indexer's budget."""
    window = config.max_position_embeddings
    if tokens is None:
        past = config.indexer_budget + config.indexer_compress_ratio - 1 if config.attention_layers else 0
        return min(past + PAST_BUDGET, window)
    if not 1 <= tokens <= window:
        raise IsobitError(f"{tokens} tokens: expected 1 to the checkpoint's window of {window:,}")
    return tokens


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


@dataclass(frozen=True)
class _Needs:
    """Bytes: of the weights and of all tokens' rows on the reference's device, and what the host keeps beside a GPU."""

    weights: int
    rows: int
    beside: int

    @property
    def on_device(self) -> int:
        return self.weights + self.rows


def _needs(reference: Reference, config: FlashNextConfig, tokens: int) -> _Needs:
    largest = max(int(np.prod(shape)) * 4 for shape in reference.shapes.values())
    logits = 4 * tokens * config.vocab_size
    masks = MASK_COPIES * 4 * config.num_attention_heads * tokens**2
    streams = 4 * tokens * config.stream_width
    kept = LOGIT_COPIES * logits + CUT_COPIES * streams * len(part_names(config))
    weights = reference.nbytes + largest
    if reference.device.type == "cpu":
        return _Needs(weights, kept + masks, beside=0)
    return _Needs(weights + GPU_DECODING, GPU_LOGIT_COPIES * logits + GPU_STREAM_COPIES * streams + masks, beside=kept)


def _place(device: str) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    from isobit.cuda import memory as gpu

    return gpu.device()


def _device_limit(reference: Reference) -> int:
    return available() if reference.device.type == "cpu" else Placement("cuda").limit(None)
