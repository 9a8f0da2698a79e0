"""Replies while another tensor holds nearly all of the GPU's memory: the same tokens, or a clear error.

python bench/cuda/short_memory.py DIR [--tokens 6144] [--free-mib 4096 1024 256 64 16]

DIR may be a recipe of `isobit synth --in-memory`. Exit code 1: a reply was another one, or the engine did not recover.
"""

import argparse
import queue
import sys
from pathlib import Path

import numpy as np
import torch

from isobit.engine.engine import Engine, EngineSettings
from isobit.engine.request import Event, Finished, Request, Sampling
from isobit.engine.shortage import Shortage

LANES = 3
SHORT_TOKENS = 200
REPLY_TOKENS = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--free-mib", type=int, nargs="+", default=[4096, 1024, 256, 64, 16])
    options = parser.parse_args()
    settings = EngineSettings(
        context=options.tokens + SHORT_TOKENS, device="cuda", parallel=LANES, prompt_cache_gib=0.0, memory_gib=None
    )
    engine = Engine(options.folder, settings)
    try:
        wrong = check(engine, options.tokens, options.free_mib)
    finally:
        engine.close()
    print("other replies:", wrong)
    return 1 if wrong else 0


def check(engine: Engine, tokens: int, free_mib: list[int]) -> int:
    """How many replies were neither the undisturbed ones nor errors for want of memory."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, engine.config.vocab_size, size).tolist()) for size in (tokens, SHORT_TOKENS, 9)]
    requests = [Request(prompt, REPLY_TOKENS, Sampling(seed=5)) for prompt in prompts]
    expected = together(engine, requests)
    wrong = 0
    for free in [*free_mib, None]:
        engine.rounds.shortage = Shortage()
        hog = None if free is None else hold_all_but(free << 20)
        found = together(engine, requests)
        del hog
        torch.cuda.empty_cache()
        for one, other in zip(found, expected, strict=True):
            short = free is not None and one.error_code == "out_of_memory"
            same = one.token_hash == other.token_hash and one.logits_hash == other.logits_hash
            wrong += not (same or short)
            verdict = "same" if same else f"error: {one.error}" if one.error else "ANOTHER REPLY"
            print(f"{'all' if free is None else free} MiB free: {verdict}; {one.notice}", flush=True)
    return wrong


def hold_all_but(free: int) -> torch.Tensor:
    """A tensor that leaves about so many bytes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.empty(max(0, torch.cuda.mem_get_info()[0] - free), dtype=torch.uint8, device="cuda")


def together(engine: Engine, requests: list[Request]) -> list[Finished]:
    """The ends of all requests, sent at once."""
    ends: list[queue.Queue[Event]] = [queue.Queue() for _ in requests]
    for request, events in zip(requests, ends, strict=True):
        engine.submit(request, events.put)
    return [last(events) for events in ends]


def last(events: queue.Queue[Event]) -> Finished:
    """The event that ends a request."""
    while not isinstance(event := events.get(), Finished):
        pass
    return event


if __name__ == "__main__":
    sys.exit(main())
