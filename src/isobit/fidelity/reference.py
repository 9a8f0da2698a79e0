"""transformers' own Flash Next text model as the reference: float32, ties to the lower id, choices forced.

The model's code is used as it is. Its two calls of `topk` are answered here: scores and choices are recorded, ties go
to the lower id (PyTorch's own order is not defined), and a choice may be forced.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import unwrap
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch.overrides import TorchFunctionMode
from transformers.models.qwen4_exp import modeling_qwen4_exp
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpTextRotaryEmbedding
from transformers.utils import logging

from isobit.errors import CheckpointError
from isobit.fidelity.choices import ChoiceKind, Forced, LayerChoices, Place, Recording, Run, best

logging.set_verbosity_error()  # it would advise installing GPU kernels

# What transformers lets other packages replace.
REPLACEABLE = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")

GatherRows = Callable[[np.ndarray], np.ndarray]


class NgramRows(torch.nn.Module):
    """Stands for the n-gram table's nn.Embedding, which would not fit into memory: only the needed rows are read."""

    def __init__(self, gather: GatherRows):
        super().__init__()
        self.gather = gather
        self.register_buffer("weight", torch.empty(0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [..., heads] -> float32 [..., heads, width]."""
        rows = np.ascontiguousarray(self.gather(ids.cpu().numpy()), np.float32)
        return torch.from_numpy(rows).to(ids.device)


class Reference:
    """A Flash Next text model of transformers whose parameters are yet to come (`load`)."""

    def __init__(
        self, text_config: Mapping[str, Any], tables: Mapping[int, GatherRows], device: torch.device | str = "cpu"
    ):
        """text_config: that of config.json; tables: a gather of n-gram rows for each PLE layer; device: where it runs.

        Raises CheckpointError when transformers refuses the config.
        """
        self.device = torch.device(device)
        self.model = _empty_model(text_config)
        for layer, gather in tables.items():
            self.model.model.layers[layer].ple.ple_embedding.ngram_embedding = NgramRows(gather)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter that `load` expects, by transformers' name."""
        state = self.model.state_dict()
        if self.model.config.tie_word_embeddings:
            del state["lm_head.weight"]
        return {name: tuple(tensor.shape) for name, tensor in state.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, those of the n-gram tables left out."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.model.state_dict().values())

    def load(self, parameters: Iterable[tuple[str, Any]]) -> None:
        """Take the parameters, arrays or tensors (float32, or int64 for the n-gram constants), one by one.

        Raises CheckpointError if some misfit.
        """
        shapes, tensors = self.shapes, {}
        for name, array in parameters:
            if shapes.get(name) != tuple(array.shape):
                expected = shapes.get(name, "no such tensor")
                raise CheckpointError(f"{name}: shape {tuple(array.shape)}, but transformers expects {expected}")
            tensors[name] = torch.as_tensor(array).to(self.device)
        missing = sorted(shapes.keys() - tensors.keys())
        if missing:
            raise CheckpointError(f"{missing[0]}: transformers needs it, but the checkpoint gives no such tensor")
        self.model.load_state_dict(tensors, strict=False, assign=True)
        self.model.tie_weights()
        self.model.model.rotary_emb = Qwen4ExpTextRotaryEmbedding(self.model.config)
        self.model.eval()

    def run(
        self,
        tokens: np.ndarray,
        forced: Forced | None = None,
        given: list[np.ndarray] | None = None,
        record_boundaries: bool = False,
    ) -> Run:
        """Teacher-force the tokens, int [T], from the start of a stream.

        forced: replaces choices. given: values that replace the reference's own at each cut of boundaries.py, once
        those are recorded.
        """
        choices, tap = TopkPatch(forced or {}), BoundaryTap(given)
        with (
            torch.no_grad(),
            whole_float32(),
            as_published(),
            self._places_told_to(choices),
            choices,
            ExitStack() as stack,
        ):
            if record_boundaries or given is not None:
                stack.enter_context(tap.attached(self.model))
            ids = torch.from_numpy(np.asarray(tokens, np.int64))[None].to(self.device)
            output = self.model(input_ids=ids, use_cache=False)
        return Run(to_host(output.logits[0]), choices.recording, tap.taken)

    @contextmanager
    def _places_told_to(self, choices: "TopkPatch") -> Iterator[None]:
        """While in this context, `choices` knows which router or indexer is at work."""
        hooks = []
        for name, module in self.model.named_modules():
            match = re.fullmatch(r"model\.layers\.(\d+)\.(mlp\.gate|self_attn\.indexer)", name)
            if match:
                kind: ChoiceKind = "router" if match[2] == "mlp.gate" else "blocks"
                hooks += choices.watch(module, kind, int(match[1]))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def whole_float32() -> Iterator[None]:
    """While in this context, float32 products and convolutions are not cut to fewer bits (TF32)."""
    convolutions: Any = torch.backends.cudnn
    precision = torch.get_float32_matmul_precision()
    before = convolutions.allow_tf32, convolutions.deterministic
    try:
        torch.set_float32_matmul_precision("highest")
        convolutions.allow_tf32, convolutions.deterministic = False, True
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        convolutions.allow_tf32, convolutions.deterministic = before


@contextmanager
def as_published() -> Iterator[None]:
    """While in this context, the model's own functions run, also where packages with faster ones are installed."""
    with ExitStack() as stack:
        for name in REPLACEABLE:
            stack.enter_context(patch.object(modeling_qwen4_exp, name, unwrap(getattr(modeling_qwen4_exp, name))))
        yield


def to_host(values: torch.Tensor) -> np.ndarray:
    """A tensor's values in float32, on the host."""
    return values.float().cpu().numpy()


class TopkPatch(TorchFunctionMode):
    """Answers `topk` inside routers and indexers: recorded, ties to the lower id, forced where asked."""

    def __init__(self, forced: Forced):
        super().__init__()
        self.forced = forced
        self.recording: Recording = {}
        self._at: tuple[ChoiceKind, int] | None = None

    def watch(self, module: torch.nn.Module, kind: ChoiceKind, layer: int) -> list[Any]:
        """Hooks that announce when `module` begins and ends; positions without a finished block call no `topk`."""

        record = self.recording[kind, layer] = LayerChoices()
        block = getattr(module, "compress_ratio", 1)

        def begin(_module: Any, inputs: Any) -> None:
            self._at = kind, layer
            for _ in range(min(inputs[0].shape[1], block - 1)):
                record.add(np.empty(0, np.float32), np.empty(0, np.int64))

        def end(_module: Any, _inputs: Any, output: Any) -> None:
            self._at = None
            if kind == "router":
                record.scores = list(to_host(output[0]))

        return [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._at is None or func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        if self._at[0] == "router":
            return self._route(*args[:2])
        return self._select(*args[:2])

    def _route(self, probabilities: torch.Tensor, count: int) -> Any:
        chosen = np.stack([self._choose(row, count) for row in to_host(probabilities)])
        ids = torch.from_numpy(chosen).to(probabilities.device)
        return torch.return_types.topk((probabilities.gather(-1, ids), ids))

    def _select(self, scores: torch.Tensor, count: int) -> Any:
        ids = torch.from_numpy(self._choose(to_host(scores), count)).to(scores.device)
        return torch.return_types.topk((scores[ids], ids))

    def _choose(self, scores: np.ndarray, count: int) -> np.ndarray:
        assert self._at is not None
        record = self.recording[self._at]
        forced = self.forced.get(Place(*self._at, len(record.chosen)))
        record.add(scores.copy(), best(scores, count), forced)
        return record.chosen[-1]


class BoundaryTap:
    """Records the values at every cut of boundaries.py, and replaces them there by `given` ones."""

    def __init__(self, given: list[np.ndarray] | None):
        self.given = given
        self.taken: list[np.ndarray] = []

    @contextmanager
    def attached(self, model: Qwen4ExpForCausalLM) -> Iterator[None]:
        """While in this context, the model's cuts are tapped."""
        count = model.config.hc_count
        hooks = []
        for layer in model.model.layers:
            hooks.append(layer.register_forward_pre_hook(lambda _, inputs: self._streams(count, *inputs)))
            sites = [layer.attn_hyper_connection, layer.mlp_hyper_connection]
            for site in sites[layer.ple is None :]:
                hooks.append(site.register_forward_pre_hook(lambda _, inputs: self._streams(count, *inputs)))
            hooks += [
                site.register_forward_hook(lambda _, __, output: (self._read(output[0]), *output[1:])) for site in sites
            ]
        last = model.model.hyper_connection_mixer
        hooks.append(last.register_forward_pre_hook(lambda _, inputs: self._streams(count, *inputs)))
        hooks.append(last.register_forward_hook(lambda _, __, output: self._read(output)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _streams(self, count: int, hidden: torch.Tensor, *others: Any) -> Any:
        return self._pass(hidden[0].unflatten(-1, (count, -1))).flatten(-2)[None], *others

    def _read(self, mixed: torch.Tensor) -> torch.Tensor:
        return self._pass(mixed[0])[None]

    def _pass(self, values: torch.Tensor) -> torch.Tensor:
        self.taken.append(to_host(values).copy())
        return values if self.given is None else torch.from_numpy(self.given[len(self.taken) - 1]).to(values.device)


def _empty_model(text_config: Mapping[str, Any]) -> Qwen4ExpForCausalLM:
    """The model on PyTorch's meta device: shapes without memory."""
    known = {key: value for key, value in text_config.items() if key not in ("model_type", "quantization_config")}
    known.update(attn_implementation="eager", experts_implementation="eager")
    if known.get("layer_types"):
        linear = "linear_attention"
        known["layer_types"] = [kind if kind == linear else "full_attention" for kind in known["layer_types"]]
    try:
        config = Qwen4ExpTextConfig(**known)
        with torch.device("meta"):
            return Qwen4ExpForCausalLM(config)
    except (ValueError, TypeError, StrictDataclassError) as error:
        message = " ".join(str(error).split())
        raise CheckpointError(f"transformers refuses the checkpoint's text config: {message}") from error
