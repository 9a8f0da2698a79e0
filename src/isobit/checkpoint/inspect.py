"""What a checkpoint folder holds: read from the headers and the codebook markers, no weights."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobit.checkpoint.groups import (
    EmbeddingLayout,
    LinearLayout,
    MissingTensorError,
    NgramLayout,
    embedding_layout,
    linear_layout,
    ngram_layout,
    vector_layout,
)
from isobit.checkpoint.names import CLASSES, TensorGroup
from isobit.checkpoint.opening import open_checkpoint
from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.store import TensorInfo
from isobit.checkpoint.synth_memory import MemoryStore
from isobit.checkpoint.synth_recipe import RECIPE_FILE
from isobit.checkpoint.tokenizer import Tokenizer
from isobit.errors import CheckpointError, IsobitError, counted

Layout = LinearLayout | EmbeddingLayout | NgramLayout | TensorInfo
Progress = Callable[[int, int], None]

TEXT_FILES = "tokenizer or chat template"  # what a problem of these is called
GROUPS_A_STEP = 256  # between two reports of progress


@dataclass
class ClassReport:
    """One tensor class. Sizes in bytes: as stored, in memory once loaded, and memory-mapped.

    widths: how many weights are stored in each width, "3" for three bits or the dtype of plain ones ("F16").
    codebooks: how many quantized layers use each.
    """

    name: str
    groups: int = 0
    weights: int = 0
    stored_bytes: int = 0
    resident_bytes: int = 0
    mapped_bytes: int = 0
    widths: Counter[str] = field(default_factory=Counter)
    codebooks: Counter[str] = field(default_factory=Counter)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.stored_bytes / self.weights if self.weights else 0.0


@dataclass
class Inspection:
    """A folder's report. `missing` and `problems` name tensor groups, or the tokenizer, that cannot be used, and why.

    synthetic: whether the weights are random and made in memory, from a recipe; nothing is stored or mapped then, and
    the stored bytes are those of the tensors as files would hold them.
    """

    folder: str
    files: int
    synthetic: bool
    layers: dict[str, int]
    window: int
    declared: dict[str, Any] | None
    classes: list[ClassReport]
    missing: dict[str, str]
    problems: dict[str, str]
    notes: list[str]

    @property
    def usable(self) -> bool:
        return not self.missing and not self.problems

    @property
    def stored_bytes(self) -> int:
        return sum(report.stored_bytes for report in self.classes)

    @property
    def resident_bytes(self) -> int:
        return sum(report.resident_bytes for report in self.classes)

    @property
    def mapped_bytes(self) -> int:
        return sum(report.mapped_bytes for report in self.classes)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: all of the above, the derived sums included."""
        totals = {name: getattr(self, name) for name in ("stored_bytes", "resident_bytes", "mapped_bytes", "usable")}
        classes = [{**vars(report), "bits_per_weight": round(report.bits_per_weight, 4)} for report in self.classes]
        return {**vars(self), **totals, "classes": classes}


def inspect_folder(folder: str | Path, progress: Progress | None = None) -> Inspection:
    """Report on a checkpoint; CheckpointError when the folder, its config or a file's header cannot be read at all.

    progress: told now and then how many tensor groups are read, of how many.
    """
    with open_checkpoint(folder) as checkpoint:
        synthetic = isinstance(checkpoint.store, MemoryStore)
        reports = {name: ClassReport(name) for name in CLASSES}
        missing: dict[str, str] = {}
        problems: dict[str, str] = {}
        used: set[str] = set()
        for number, group in enumerate(checkpoint.groups.values()):
            if progress is not None and number % GROUPS_A_STEP == 0:
                progress(number, len(checkpoint.groups))
            try:
                layout = _layout(checkpoint, group)
            except MissingTensorError as error:
                missing[group.name] = str(error)
            except CheckpointError as error:
                problems[group.name] = str(error)
            else:
                _count(reports[group.tensor_class], group, layout, mapped=not synthetic)
                used.update(info.name for info in _tensors(layout))
        has_template = True
        try:
            has_template = Tokenizer(checkpoint.folder).has_chat_template
        except IsobitError as error:
            problems[TEXT_FILES] = str(error)
        failed = [group for group in checkpoint.groups.values() if group.name in missing or group.name in problems]
        unread = tuple(checkpoint.file_name(group.name) + end for group in failed for end in {"", group.suffix})
        used.update(name for name in checkpoint.store.names if is_below(name, unread))
        config = checkpoint.config
        return Inspection(
            folder=str(folder),
            files=len(checkpoint.store.files),
            synthetic=synthetic,
            layers={
                "delta": len(config.delta_layers),
                "attention": len(config.attention_layers),
                "ngram": len(config.ple_layers),
                "mtp": config.mtp_num_hidden_layers,
            },
            window=config.max_position_embeddings,
            declared=config.quantization,
            classes=[report for report in reports.values() if report.groups],
            missing=missing,
            problems=problems,
            notes=list(_notes(checkpoint, used, has_template)),
        )


def is_below(name: str, groups: tuple[str, ...]) -> bool:
    """Whether a tensor is one of these groups, or part of one."""
    return name in groups or name.startswith(tuple(f"{group}." for group in groups))


def _layout(checkpoint: Checkpoint, group: TensorGroup) -> Layout:
    store, name = checkpoint.store, checkpoint.file_name(group.name)
    if group.kind == "linear":
        return linear_layout(store, name, group)
    if group.kind == "vector":
        return vector_layout(store, name + group.suffix, group.shape)
    if group.kind == "embedding":
        return embedding_layout(store, name, group)
    return ngram_layout(store, name, group, checkpoint.config)


def _count(report: ClassReport, group: TensorGroup, layout: Layout, mapped: bool) -> None:
    """Add a group. mapped: whether an n-gram table stays in its file."""
    report.groups += 1
    if isinstance(layout, TensorInfo):
        weights, width = math.prod(layout.shape), layout.dtype
        report.stored_bytes += layout.nbytes
        report.resident_bytes += 4 * weights
    elif isinstance(layout, LinearLayout):
        weights = group.in_features * group.out_features
        width = layout.parts["weight"].dtype if layout.bits is None else f"{layout.bits:g}"
        report.stored_bytes += layout.stored_bytes
        report.resident_bytes += layout.resident_bytes
        if layout.codebook is not None:
            report.codebooks[layout.codebook] += 1
    else:
        table = layout.shards[0] if isinstance(layout, NgramLayout) else next(iter(layout.parts.values()))
        rows = layout.rows if isinstance(layout, NgramLayout) else group.out_features
        weights = rows * group.in_features
        width = table.dtype if layout.bits is None else f"{layout.bits:g}"
        report.stored_bytes += layout.stored_bytes
        if mapped and isinstance(layout, NgramLayout):
            report.mapped_bytes += layout.stored_bytes
        else:
            report.resident_bytes += layout.stored_bytes
        if layout.bits is not None:
            report.codebooks["mul1"] += 1
    report.weights += weights
    report.widths[width] += weights


def _tensors(layout: Layout) -> Iterator[TensorInfo]:
    if isinstance(layout, TensorInfo):
        yield layout
        return
    yield from layout.parts.values()
    if isinstance(layout, NgramLayout):
        yield from layout.shards


def _notes(checkpoint: Checkpoint, used: set[str], has_template: bool) -> Iterator[str]:
    if isinstance(checkpoint.store, MemoryStore):
        options = checkpoint.store.options
        yield (
            f"the weights are random ({RECIPE_FILE}: preset {options.preset}, seed {options.seed}) and made in memory "
            "when they are loaded; no file holds them"
        )
    if checkpoint.lacks_mtp:
        yield "config.json names an MTP head, but the files hold none: replies are the same, without drafts"
    if not has_template:
        yield "there is no chat template: plain texts can be continued, conversations cannot"
    beyond = sorted(token for token in checkpoint.stop_tokens if not 0 <= token < checkpoint.config.vocab_size)
    if beyond:
        yield f"eos_token_id names ids that no reply ends with, as the vocabulary has none of them: {beyond}"
    if checkpoint.config.unknown_keys:
        yield f"config.json has keys that isobit does not know: {', '.join(checkpoint.config.unknown_keys)}"
    markers = (".mcg", ".mul1")
    unused = [name for name in checkpoint.store.names if name not in used and not name.endswith(markers)]
    if unused:
        nbytes = sum(checkpoint.store.info(name).nbytes for name in unused)
        tensors = counted(len(unused), "tensor is", "tensors are")
        yield f"{tensors} not part of the text model ({nbytes:,} bytes), such as {unused[0]}"
