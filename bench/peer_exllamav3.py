"""exllamav3 behind the few calls that measurements need; imported in processes of their own only, never by isobit.

`python bench/peer_exllamav3.py DIR TOKENS.npy LOGITS.npy` writes the logits of all positions: float16 [T, V].
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

NAME = "exllamav3"
MISSING = (
    "exllamav3 is not installed: pip install exllamav3==1.6.5 (it compiles its extension at the first import, or takes "
    "a built exllamav3_ext from PYTHONPATH)"
)
CHUNK_ROWS = 4096
PAGE_ROWS = 256
TABLE_STEP = 16  # pages by which a block table grows
Tokens = Sequence[int]


def what_lacks(folder: Path) -> str | None:
    """Why the package cannot be measured on this folder, in one line, or None."""
    if find_spec(NAME) is None:
        return MISSING
    if not any(folder.glob("*.safetensors")):
        return f"{folder}: holds no *.safetensors files, which exllamav3 reads; write some with isobit synth"
    return None


def pages_for(rows: int) -> int:
    """As many as the package's generator lays out for a stream of so many rows."""
    return -(-rows // PAGE_ROWS // TABLE_STEP) * TABLE_STEP


def in_inference_mode(method: Callable) -> Callable:
    """As the package's generator runs everything: its states are tensors of that mode."""

    @wraps(method)
    def run(self, *arguments, **options):
        with self.torch.inference_mode():
            return method(self, *arguments, **options)

    return run


class Exllamav3:
    """A checkpoint loaded whole onto the first GPU: the forwards of its generator, an fp16 cache, no drafts."""

    def __init__(self, folder: Path, rows: int, lanes: int, device: str = "cuda:0"):
        """rows: the most that all streams together have; lanes: the most streams."""
        import torch
        from exllamav3 import Cache, Config, Model
        from exllamav3.version import __version__

        self.torch = torch
        self.model = Model.from_config(Config.from_directory(str(folder)))
        pages = pages_for(rows) + lanes * TABLE_STEP
        self.cache = Cache(self.model, max_num_tokens=pages * PAGE_ROWS, max_batch_size=lanes)
        self.vocabulary = self.model.config.vocab_size
        self.streams: list[Stream] = []
        self.model.load(device=torch.device(device), max_chunk_size=CHUNK_ROWS)
        self.version = __version__

    @in_inference_mode
    def open(self, prompts: Sequence[Tokens], room: int = 1) -> list[int]:
        """Streams of these prompts, with room for more rows; the first token of each, greedy."""
        self.close()
        pages = pages_for(max(map(len, prompts)) + room)
        for lane in range(len(prompts)):
            table = self.torch.arange(lane * pages, (lane + 1) * pages, dtype=self.torch.int32)
            self.streams.append(Stream(table, self.cache.get_new_state()))
        return [self._prefill(stream, prompt) for stream, prompt in zip(self.streams, prompts, strict=True)]

    @in_inference_mode
    def step(self, tokens: Tokens) -> list[int]:
        """Feed one token to each stream; the next of each, greedy."""
        ids = self.torch.tensor(tokens, dtype=self.torch.long)[:, None]
        return self._greedy(self._run(self.model.forward, ids, self.streams, pinned_staging=True))

    @in_inference_mode
    def close(self) -> None:
        """Drop the streams."""
        for stream in self.streams:
            stream.state.free()
        self.streams = []

    @in_inference_mode
    def logits(self, tokens: Tokens) -> np.ndarray:
        """Those of every position: float16 [T, V]."""
        self.close()
        table = self.torch.arange(pages_for(len(tokens)), dtype=self.torch.int32)
        self.streams = [Stream(table, self.cache.get_new_state())]
        rows = [self._run(self.model.forward, chunk, self.streams) for chunk in self._chunks(tokens)]
        found = [logits[0, :, : self.vocabulary].half().cpu().numpy() for logits in rows]
        self.close()
        return np.concatenate(found)

    def _prefill(self, stream: "Stream", prompt: Tokens) -> int:
        *chunks, last = self._chunks(prompt)
        for chunk in chunks:
            self._run(self.model.prefill, chunk, [stream])
        return self._greedy(self._run(self.model.forward, last, [stream], last_tokens_only=1))[0]

    def _chunks(self, tokens: Tokens) -> list:
        return list(self.torch.tensor([list(tokens)], dtype=self.torch.long).split(CHUNK_ROWS, dim=1))

    def _run(self, forward, ids, streams: "list[Stream]", **options):
        params = {
            "attn_mode": "flash_attn",
            "cache": self.cache,
            "block_table": self.torch.stack([stream.table for stream in streams]),
            "cache_seqlens": self.torch.tensor([stream.rows for stream in streams], dtype=self.torch.int32),
            "recurrent_states": [stream.state for stream in streams],
            **options,
        }
        logits = forward(ids, params)
        for stream in streams:
            stream.rows += ids.shape[1]
        return logits

    def _greedy(self, logits) -> list[int]:
        return logits[:, -1, : self.vocabulary].argmax(-1).tolist()


@dataclass
class Stream:
    """A stream's pages (int32), its recurrent state and how many rows it has."""

    table: Any
    state: Any
    rows: int = 0


def main(folder: str, tokens_file: str, logits_file: str) -> int:
    lacking = what_lacks(Path(folder))
    if lacking:
        print(lacking, file=sys.stderr)
        return 2
    tokens = np.load(tokens_file).tolist()
    np.save(logits_file, Exllamav3(Path(folder), len(tokens), lanes=1).logits(tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
