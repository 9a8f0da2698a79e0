"""All of Flash Next in float64 NumPy: the plainest code that says what the network computes. For tests only.

Written from the architecture's description, not from isobit: it shares no code with what it checks. One stream, whole
sequences, no caches. Weights are float64 arrays named as Hugging Face names the text model's parameters, without
prefix (`layers.0.linear_attn.in_proj_qkv.weight`, `lm_head.weight`, `mtp.fc_hidden.weight`); experts are fused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]


@dataclass
class Choices:
    """What one layer chose. experts: a sorted id list a row; blocks: a sorted block list a row (attention only)."""

    router_logits: np.ndarray | None = None
    experts: list[list[int]] = field(default_factory=list)
    block_scores: list[np.ndarray] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


def softmax(x: np.ndarray) -> np.ndarray:
    shifted = np.exp(x - x.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS over the last axis, weights stored around 0."""
    return rms(x, eps) * (1 + weight)


def best(scores: np.ndarray, count: int) -> list[int]:
    """The ids of the `count` largest scores, ties to the lower id, in ascending id."""
    return sorted(np.argsort(-scores, kind="stable")[:count].tolist())


class ReferenceNetwork:
    """config: the text config of config.json as a plain dict."""

    def __init__(self, config: Mapping[str, Any], weights: Weights):
        self.config = config
        self.weights = weights
        self.hidden = config["hidden_size"]
        self.streams = config["hc_count"]
        self.eps = config["rms_norm_eps"]
        self.choices: dict[str, Choices] = {}

    def trunk(self, tokens: Sequence[int]) -> np.ndarray:
        """The residual streams after the last layer, [T, S, H]."""
        tokens = np.asarray(tokens, np.int64)
        embedded = self.weights["embed_tokens.weight"][tokens]
        streams = np.repeat(embedded[:, None, :], self.streams, axis=1)
        for index in range(self.config["num_hidden_layers"]):
            if index + 1 in (self.config.get("ple_layer_ids") or []):
                streams = streams + self._ngram_injection(f"layers.{index}.ple", streams, tokens, index)
            is_attention = self.config["layer_types"][index] != "linear_attention"
            streams = self._layer(f"layers.{index}", streams, is_attention)
        return streams

    def head(self, streams: np.ndarray, mixer: str = "hyper_connection_mixer") -> np.ndarray:
        """The logits of each row, [T, V]."""
        mixed, _ = self._read(mixer, streams)
        return mixed @ self.weights["lm_head.weight"].T

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        return self.head(self.trunk(tokens))

    def draft(self, tokens: Sequence[int], streams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The MTP head over rows 0..n-1: row i pairs `streams` row i with `tokens[i + 1]` at position i.

        tokens: n + 1 ids; streams: [n, S, H], the trunk's (or, for a further draft, this head's own). Returns the
        draft logits [n, V], row i predicting token i + 2, and the head's output streams [n, S, H].
        """
        w = self.weights
        following = np.asarray(tokens[1:], np.int64)
        rows = len(following)
        flat = rms_norm(streams.reshape(rows, -1), w["mtp.pre_fc_norm_hidden.weight"], self.eps)
        hidden = flat.reshape(streams.shape) @ w["mtp.fc_hidden.weight"].T
        embedded = rms_norm(w["embed_tokens.weight"][following], w["mtp.pre_fc_norm_embedding.weight"], self.eps)
        streams = hidden + (embedded @ w["mtp.fc_embedding.weight"].T)[:, None, :]
        for index in range(self.config["mtp_num_hidden_layers"]):
            streams = self._layer(f"mtp.layers.{index}", streams, is_attention=True)
        return self.head(streams, "mtp.hyper_connection_mixer"), streams

    def _layer(self, name: str, streams: np.ndarray, is_attention: bool) -> np.ndarray:
        self.choices[name] = Choices()
        x, injection = self._read(f"{name}.attn_hyper_connection", streams)
        y = self._attention(name, x) if is_attention else self._delta_net(f"{name}.linear_attn", x)
        streams = streams + injection[:, :, None] * y[:, None, :]
        x, injection = self._read(f"{name}.mlp_hyper_connection", streams)
        return streams + injection[:, :, None] * self._experts(name, x)[:, None, :]

    def _read(self, name: str, streams: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The gated residual: its mixed input [T, H] and, if it writes back, the injection weights [T, S]."""
        w = self.weights
        normed = self._stream_norm(streams, w[f"{name}.hc_norm.weight"])
        flat = normed.reshape(len(normed), -1)
        low = silu(flat @ w[f"{name}.input_mix_weight_down.weight"].T / self.streams)
        mix = sigmoid(low @ w[f"{name}.input_mix_weight_up.weight"].T).reshape(normed.shape)
        mixed = (mix * normed).mean(axis=1)
        inject = w.get(f"{name}.block_inject_weight.weight")
        return mixed, None if inject is None else 2 * sigmoid(flat @ inject.T / self.streams)

    def _stream_norm(self, streams: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return rms(streams, self.eps) * (1 + weight.reshape(self.streams, self.hidden))

    def _delta_net(self, name: str, x: np.ndarray) -> np.ndarray:
        c, w = self.config, self.weights
        key_heads, value_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        dk, dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
        rows = len(x)
        qkv = silu(causal_conv(x @ w[f"{name}.in_proj_qkv.weight"].T, w[f"{name}.conv1d.weight"], 1))
        q, k, v = np.split(qkv, [key_heads * dk, 2 * key_heads * dk], axis=1)
        q, k = (unit(t.reshape(rows, key_heads, dk)).repeat(value_heads // key_heads, axis=1) for t in (q, k))
        q = q / np.sqrt(dk)
        v = v.reshape(rows, value_heads, dv)
        a = x @ w[f"{name}.in_proj_a.weight"].T
        decay = np.exp(-np.exp(w[f"{name}.A_log"]) * softplus(a + w[f"{name}.dt_bias"]))
        beta = sigmoid(x @ w[f"{name}.in_proj_b.weight"].T)
        state = np.zeros((value_heads, dk, dv))
        out = np.empty((rows, value_heads, dv))
        for row in range(rows):
            state = state * decay[row][:, None, None]
            recalled = np.einsum("hkv,hk->hv", state, k[row])
            change = beta[row][:, None] * (v[row] - recalled)
            state = state + k[row][:, :, None] * change[:, None, :]
            out[row] = np.einsum("hkv,hk->hv", state, q[row])
        z = (x @ w[f"{name}.in_proj_z.weight"].T).reshape(out.shape)
        gate = {"sigmoid": sigmoid, "silu": silu}[c.get("output_gate_type") or c.get("hidden_act", "silu")]
        gated = w[f"{name}.norm.weight"] * rms(out, self.eps) * gate(z)
        return gated.reshape(rows, -1) @ w[f"{name}.out_proj.weight"].T

    def _attention(self, layer: str, x: np.ndarray) -> np.ndarray:
        c, w, name = self.config, self.weights, f"{layer}.self_attn"
        heads, kv_heads, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        rows = len(x)
        q_gate = self._project(x, f"{name}.q_proj").reshape(rows, heads, 2, width)
        q, gate = q_gate[:, :, 0], q_gate[:, :, 1]
        q = self._rotate(rms_norm(q, w[f"{name}.q_norm.weight"], self.eps), np.arange(rows))
        k = self._project(x, f"{name}.k_proj").reshape(rows, kv_heads, width)
        k = self._rotate(rms_norm(k, w[f"{name}.k_norm.weight"], self.eps), np.arange(rows))
        v = self._project(x, f"{name}.v_proj").reshape(rows, kv_heads, width)
        k, v = (t.repeat(heads // kv_heads, axis=1) for t in (k, v))
        out = np.empty((rows, heads, width))
        for row, positions in enumerate(self._selected(layer, x)):
            weights = softmax(np.einsum("hd,phd->hp", q[row], k[positions]) / np.sqrt(width))
            out[row] = np.einsum("hp,phd->hd", weights, v[positions])
        return self._project((out * sigmoid(gate)).reshape(rows, -1), f"{name}.o_proj")

    def _selected(self, layer: str, x: np.ndarray) -> list[np.ndarray]:
        """The positions each row reads: its best finished blocks and its unfinished tail."""
        c, w, name = self.config, self.weights, f"{layer}.self_attn.indexer"
        heads, width = c["indexer_n_heads"], c["indexer_head_dim"]
        block, kept = c["indexer_compress_ratio"], c["indexer_budget"] // c["indexer_compress_ratio"]
        rows = len(x)
        projected = x @ w[f"{name}.index_qk_proj.weight"].T
        q = projected[:, : heads * width].reshape(rows, heads, width)
        q = self._rotate(rms_norm(q, w[f"{name}.q_layernorm.weight"], self.eps), np.arange(rows))
        finished = rows // block
        raw = projected[: finished * block, heads * width :].reshape(finished, block, width)
        pooled = rms_norm(raw.mean(axis=1), w[f"{name}.k_layernorm.weight"], self.eps)
        pooled = self._rotate(pooled[:, None, :], np.arange(finished) * block)[:, 0]
        record = self.choices[layer]
        selected = []
        for row in range(rows):
            complete = (row + 1) // block
            scores = np.maximum(q[row] @ pooled[:complete].T, 0).sum(axis=0) / np.sqrt(width)
            blocks = best(scores, kept)
            record.block_scores.append(scores)
            record.blocks.append(blocks)
            read = [b * block + i for b in blocks for i in range(block)]
            selected.append(np.array([*read, *range(complete * block, row + 1)], np.int64))
        return selected

    def _rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rotary embedding of the leading dims of [T, heads, d] at each row's position."""
        rope = self.config.get("rope_parameters") or self.config
        factor = rope.get("partial_rotary_factor", 1.0)
        rotary = int(self.config["head_dim"] * factor)
        frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, rotary, 2) / rotary)
        angles = (positions[:, None] * frequencies)[:, None, :]
        first, second, rest = np.split(x, [rotary // 2, rotary], axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    def _project(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _experts(self, layer: str, x: np.ndarray) -> np.ndarray:
        c, w, name = self.config, self.weights, f"{layer}.mlp"
        record = self.choices[layer]
        record.router_logits = x @ w[f"{name}.gate.weight"].T
        shared = self._gated_mlp(
            x,
            w[f"{name}.shared_expert.gate_proj.weight"],
            w[f"{name}.shared_expert.up_proj.weight"],
            w[f"{name}.shared_expert.down_proj.weight"],
        )
        out = sigmoid(x @ w[f"{name}.shared_expert_gate.weight"].T) * shared
        for row, probabilities in enumerate(softmax(record.router_logits)):
            chosen = best(probabilities, c["num_experts_per_tok"])
            record.experts.append(chosen)
            total = probabilities[chosen].sum() if c.get("norm_topk_prob", True) else 1.0
            for expert in chosen:
                gate, up = np.split(w[f"{name}.experts.gate_up_proj"][expert], 2)
                y = self._gated_mlp(x[row : row + 1], gate, up, w[f"{name}.experts.down_proj"][expert])
                out[row] += probabilities[expert] / total * y[0]
        return out

    @staticmethod
    def _gated_mlp(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _ngram_injection(self, name: str, streams: np.ndarray, tokens: np.ndarray, layer: int) -> np.ndarray:
        c, w = self.config, self.weights
        ids = self.ngram_ids(f"{name}.ple_embedding", tokens)
        embedded = w[f"{name}.ple_embedding.ngram_embedding.weight"][ids].reshape(len(tokens), -1)
        key = (embedded @ w[f"{name}.key_proj.weight"].T).reshape(streams.shape)
        value = embedded @ w[f"{name}.value_proj.weight"].T
        key = self._stream_norm(key, w[f"{name}.norm_key.weight"])
        query = self._stream_norm(streams, w[f"{name}.norm_query.weight"])
        dot = (key * query).sum(-1) / np.sqrt(self.hidden)
        gate = sigmoid(np.sign(dot) * np.sqrt(np.maximum(np.abs(dot), 1e-6)))
        gated = gate[:, :, None] * value[:, None, :]
        normed = self._stream_norm(gated, w[f"{name}.norm_conv.weight"]).reshape(len(tokens), -1)
        local = silu(causal_conv(normed, w[f"{name}.conv1d.weight"], c["ngram_size"]))
        return gated + local.reshape(streams.shape)

    def ngram_ids(self, name: str, tokens: np.ndarray) -> np.ndarray:
        """The table row of each head, int64 [T, heads], in Python's own integers."""
        c, w = self.config, self.weights
        end = c["eos_token_id"]
        end = end[0] if isinstance(end, list) else end
        sizes = w[f"{name}.ngram_heads_vocab_sizes"].tolist()
        offsets = w[f"{name}.ngram_heads_offsets"].tolist()
        multipliers = w[f"{name}.layer_multipliers"].tolist()
        heads = c["heads_per_ngram"]
        ids = np.empty((len(tokens), len(sizes)), np.int64)
        for row in range(len(tokens)):
            history = ngram_history(tokens, row, len(multipliers), end)
            for order in range(2, len(multipliers) + 1):
                mixed = 0
                for token, multiplier in zip(history[:order], multipliers, strict=False):
                    mixed ^= wrapped(token * multiplier)
                for head in range((order - 2) * heads, (order - 1) * heads):
                    ids[row, head] = wrapped(mixed) % sizes[head] + offsets[head]
        return ids


def ngram_history(tokens: np.ndarray, row: int, order: int, end: int) -> list[int]:
    """The row's token and the order - 1 before it; what lies at or beyond a previous end token reads as `end`."""
    history = [int(tokens[row])]
    for back in range(1, order):
        source = row - back
        cut = source < 0 or any(int(t) == end for t in tokens[source:row])
        history.append(end if cut else int(tokens[source]))
    return history


def wrapped(value: int) -> int:
    """The value as a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def causal_conv(x: np.ndarray, weight: np.ndarray, dilation: int) -> np.ndarray:
    """Depthwise over rows, [T, C] and [C, 1, taps] or [C, taps] (oldest tap first), zeros before the start."""
    taps = weight.reshape(len(weight), -1).T
    span = (len(taps) - 1) * dilation
    padded = np.concatenate([np.zeros((span, x.shape[1])), x])
    return sum(tap * padded[i * dilation : i * dilation + len(x)] for i, tap in enumerate(taps))
