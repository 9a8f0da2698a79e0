"""exllamav3 behind the few calls that measurements need; imported in processes of their own only, never by isobit.

`python bench/peer_exllamav3.py DIR TOKENS.npy LOGITS.npy` writes the logits of all positions: float16 [T, V].
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

NAME = "exllamav3"
MISSING = (
    "exllamav3 is not installed: pip install exllamav3==1.6.5 (it compiles its extension at the first import, or takes "
    "a built exllamav3_ext from PYTHONPATH)"
)
CHUNK_ROWS = 4096
PAGE_ROWS = 256
Tokens = Sequence[int]


def is_installed() -> bool:
    return find_spec(NAME) is not None


def whole_pages(rows: int) -> int:
    return -(-rows // PAGE_ROWS) * PAGE_ROWS


class Exllamav3:
    """A checkpoint loaded whole onto the first GPU: prompts in chunks of 4,096 rows, an fp16 cache, no drafts."""

    def __init__(self, folder: Path, rows: int, lanes: int, device: str = "cuda:0"):
        """rows: the most that all streams together have; lanes: the most streams."""
        import torch
        from exllamav3 import Cache, Config, Model
        from exllamav3.version import __version__

        self.torch = torch
        self.model = Model.from_config(Config.from_directory(str(folder)))
        self.cache = Cache(self.model, max_num_tokens=whole_pages(rows) + lanes * PAGE_ROWS, max_batch_size=lanes)
        self.vocabulary = self.model.config.vocab_size
        self.states: list | None = None
        self.model.load(device=torch.device(device), max_chunk_size=CHUNK_ROWS)
        self.version = __version__

    def open(self, prompts: Sequence[Tokens], room: int = 1) -> list[int]:
        """Streams of these prompts, all of one length, with room for more rows; the first token of each, greedy."""
        self.close()
        self.position, self.room = 0, whole_pages(len(prompts[0]) + room)
        ids = self.torch.tensor(prompts, dtype=self.torch.long)
        chunk_rows = CHUNK_ROWS // len(prompts)
        for first in range(0, ids.shape[1], chunk_rows):
            chunk = ids[:, first : first + chunk_rows]
            is_last = first + chunk_rows >= ids.shape[1]
            logits = self._run(chunk, self.model.forward if is_last else self.model.prefill, last_tokens_only=1)
        return self._greedy(logits)

    def step(self, tokens: Tokens) -> list[int]:
        """Feed one token to each stream; the next of each, greedy."""
        ids = self.torch.tensor(tokens, dtype=self.torch.long)[:, None]
        return self._greedy(self._run(ids, self.model.forward, pinned_staging=True))

    def close(self) -> None:
        """Drop the streams."""
        for state in self.states or ():
            state.free()
        self.states = None

    def logits(self, tokens: Tokens) -> np.ndarray:
        """Those of every position: float16 [T, V]."""
        self.close()
        self.position, self.room = 0, whole_pages(len(tokens))
        ids, rows = self.torch.tensor([list(tokens)], dtype=self.torch.long), []
        for first in range(0, len(tokens), CHUNK_ROWS):
            logits = self._run(ids[:, first : first + CHUNK_ROWS], self.model.forward)
            rows.append(logits[0, :, : self.vocabulary].half().cpu().numpy())
        self.close()
        return np.concatenate(rows)

    def _run(self, ids, forward, **options):
        params = {"attn_mode": "flash_attn", "cache": self.cache, "batch_shape": (len(ids), self.room)}
        params |= {"past_len": self.position, **options}
        if self.states is not None:
            params["recurrent_states"] = self.states
        logits = forward(ids, params)
        self.states = params["recurrent_states"]
        self.position += ids.shape[1]
        return logits

    def _greedy(self, logits) -> list[int]:
        return logits[:, -1, : self.vocabulary].argmax(-1).tolist()


def main(folder: str, tokens_file: str, logits_file: str) -> int:
    if not is_installed():
        print(MISSING, file=sys.stderr)
        return 2
    tokens = np.load(tokens_file).tolist()
    np.save(logits_file, Exllamav3(Path(folder), len(tokens), lanes=1).logits(tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
