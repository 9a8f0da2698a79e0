"""Stands for exllamav3 in tests: its calls and the rules that they must follow, isobit's CPU model behind them."""

import os

import numpy as np
import torch

from isobit.checkpoint.reader import Checkpoint
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.ops import load_ops

PAGE_ROWS = 256
NOISE = float(os.environ.get("FAKE_PEER_NOISE", "0"))


class Config:
    def __init__(self, folder):
        self.checkpoint = Checkpoint(folder)
        self.vocab_size = self.checkpoint.config.vocab_size

    @staticmethod
    def from_directory(directory):
        assert isinstance(directory, str)
        return Config(directory)


class State:
    def __init__(self, cache):
        assert cache.free_slots, "no slot is free"
        self.cache, self.slot, self.position = cache, cache.free_slots.pop(), 0
        self.stream = None

    def free(self):
        self.cache.free_slots.append(self.slot)
        if self.stream is not None:
            self.cache.model.state.close(self.stream)


class Cache:
    def __init__(self, model, max_num_tokens, max_batch_size):
        assert not model.loaded, "the cache has to be there before the model is loaded"
        assert max_num_tokens % PAGE_ROWS == 0
        self.model, self.max_num_tokens = model, max_num_tokens
        model.caches.append(self)
        self.free_slots = list(range(max_batch_size))

    def get_new_state(self):
        assert self.model.loaded
        return State(self)


class Model:
    def __init__(self, config):
        self.config, self.caches, self.loaded = config, [], False

    @staticmethod
    def from_config(config):
        return Model(config)

    def load(self, device, max_chunk_size):
        assert isinstance(device, torch.device)
        (cache,) = self.caches
        self.model = load_model(self.config.checkpoint, load_ops("cpu"), cache.max_num_tokens)
        self.state = self.model.new_state(len(cache.free_slots), cache.max_num_tokens // 16)
        self.loaded, self.chunk = True, max_chunk_size

    def prefill(self, input_ids, params):
        self.forward(input_ids, params)

    def forward(self, input_ids, params):
        tables, past, states = (params[key] for key in ("block_table", "cache_seqlens", "recurrent_states"))
        assert params["attn_mode"] == "flash_attn"
        assert (input_ids.dtype, tables.dtype, past.dtype) == (torch.long, torch.int32, torch.int32)
        assert len(input_ids) == len(tables) == len(past) == len(states)
        assert input_ids.shape[1] <= self.chunk
        assert len(tables.unique()) == tables.numel(), "streams share a page"
        assert 0 <= tables.min() <= tables.max() < params["cache"].max_num_tokens // PAGE_ROWS
        assert int(past.max()) + input_ids.shape[1] <= tables.shape[1] * PAGE_ROWS
        assert [state.position for state in states] == past.tolist()
        rows = [self._rows(state, ids.tolist()) for state, ids in zip(states, input_ids, strict=True)]
        logits = torch.stack(rows)[:, -params.get("last_tokens_only", input_ids.shape[1]) :]
        return torch.nn.functional.pad(logits, (0, 8), value=1e4)

    def _rows(self, state, tokens):
        state.stream = self.state.open() if state.stream is None else state.stream
        logits = self.model.forward(self.state, Plan((Segment(state.stream, tuple(tokens), logits="all"),)))
        state.position += len(tokens)
        noise = NOISE * np.random.default_rng(0).standard_normal(logits.shape)
        return torch.from_numpy((logits + noise).astype(np.float32))
