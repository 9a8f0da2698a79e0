"""A Hugging Face folder of Flash Next to an EXL3 folder: what is quantized, what is copied, and the run itself.

A conversion is planned from the headers: *jobs* make quantized tensors, *outputs* say what the folder will hold. Jobs
run one after another, each result kept in a work folder; then the outputs are streamed into files, and the finished
folder is renamed into place.
"""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from isobit.checkpoint import exl3_folder
from isobit.checkpoint.groups import padded
from isobit.checkpoint.names import TensorGroup, published_name, required_tensors
from isobit.checkpoint.opening import open_checkpoint
from isobit.checkpoint.quantize import (
    QUANTIZER_VERSION,
    ordered_sum,
    quantize_linear,
    quantize_ngram_rows,
    stored_tensors,
)
from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.store import NUMPY_TYPES, TensorInfo, TensorWriter
from isobit.checkpoint.trellis import TILE, TILE_VALUES, check_width
from isobit.checkpoint.weights import CODEBOOKS, NgramTable
from isobit.checkpoint.work_folder import WorkFolder, work_path_of
from isobit.checkpoint.workbench import CpuWorkbench, Workbench, workbench
from isobit.errors import CheckpointError, IsobitError

COPY_BYTES = 1 << 24
TABLE_ROWS = 4096  # n-gram rows in one job

Progress = Callable[[int, int], None]  # weights done, weights in all
JobProgress = Callable[[int], None]  # weights done since the last call
Pieces = Callable[[WorkFolder], Iterator[np.ndarray]]


@dataclass(frozen=True)
class ConvertOptions:
    """Widths in bits a weight. head_bits, mtp_bits: None means `bits`; ngram_bits: None leaves the table plain."""

    bits: float
    head_bits: float | None = None
    mtp_bits: float | None = None
    ngram_bits: int | None = None
    codebook: str = "mul1"

    def check(self) -> None:
        """Raises IsobitError unless every width exists in the format, and in the codebook."""
        if self.codebook not in CODEBOOKS:
            raise IsobitError(f"--codebook is {self.codebook}: expected one of {', '.join(CODEBOOKS)}")
        for flag, width in (("--bits", self.bits), ("--head-bits", self.head_bits), ("--mtp-bits", self.mtp_bits)):
            try:
                check_width(self.bits if width is None else width, self.codebook)
            except ValueError as error:
                raise IsobitError(f"{flag}: {error}") from None
        if self.ngram_bits is not None and self.ngram_bits not in range(1, 9):
            raise IsobitError(f"--ngram-bits is {self.ngram_bits}: expected 1 to 8, or none for a plain table")

    def width(self, group: TensorGroup) -> float:
        """The width of a quantized linear layer."""
        own = {"head": self.head_bits, "mtp": self.mtp_bits}.get(group.tensor_class)
        return self.bits if own is None else own


@dataclass(frozen=True)
class Job:
    """Makes the arrays of one piece of the work folder, `weights` of them at `bits`."""

    key: str
    weights: int
    bits: float
    run: Callable[[JobProgress], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Output:
    """One tensor of the converted folder; `pieces` yields its data in order."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Pieces

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * NUMPY_TYPES[self.dtype].itemsize


@dataclass
class Plan:
    """All jobs and outputs of a conversion; the outputs of the n-gram tables, `tables`, have a file of their own.

    notes: what a user should know of the result, a line each. bench: where the jobs work.
    """

    bench: Workbench = field(default_factory=CpuWorkbench)
    jobs: list[Job] = field(default_factory=list)
    outputs: dict[str, Output] = field(default_factory=dict)
    tables: dict[str, Output] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def weights(self) -> int:
        return sum(job.weights for job in self.jobs)

    @property
    def nbytes(self) -> int:
        return sum(output.nbytes for output in (*self.outputs.values(), *self.tables.values()))

    def seconds(self, codebook: str) -> float:
        """About how long the jobs take here, from a short trial of each width."""
        by_width: dict[float, int] = {}
        for job in self.jobs:
            by_width[job.bits] = by_width.get(job.bits, 0) + job.weights
        return sum(weights / _trial_rate(self.bench, bits, codebook) for bits, weights in by_width.items())


def convert(
    source: str | Path,
    target: str | Path,
    options: ConvertOptions,
    *,
    device: str = "cpu",
    announce: Callable[[Plan], None] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Quantize the folder `source` to the new folder `target`, which appears whole or not at all.

    An interrupted conversion goes on from its finished tensors when it is called again with the same options and an
    unchanged source. device: "cpu" or "cuda", which changes no bit. announce is called with the plan before the first
    job, progress during the jobs. Raises IsobitError for options that no checkpoint can have, a target that exists, a
    source that is no plain Flash Next checkpoint, holds NaN or is edited meanwhile, a disk that is too small, a GPU
    that cannot be used.
    """
    options.check()
    bench = workbench(device)
    source, target = Path(source), Path(target)
    if target.exists() or target.is_symlink():
        work_path = work_path_of(target)
        left = f" ({work_path} is left from a conversion and may be removed)" if work_path.exists() else ""
        raise IsobitError(f"{target} exists already; name another folder, or remove it first{left}")
    with open_checkpoint(source) as checkpoint:
        plan = make_plan(checkpoint, options, bench)
        _make_parent(target)
        with WorkFolder(target, _record(checkpoint, options)) as work:
            _check_space(work, plan)
            if announce:
                announce(plan)
            _run_jobs(plan, checkpoint, work, progress or (lambda done, total: None))
            try:
                _write_output(checkpoint, options, plan, work)
                checkpoint.store.check_unedited()
                work.move_output(target)
            except OSError as error:
                raise IsobitError(
                    f"{target} cannot be written ({error.strerror}); finished tensors are kept in {work.path}: mend "
                    "that, then run the same command to go on"
                ) from None
            work.remove()
    return target


def make_plan(checkpoint: Checkpoint, options: ConvertOptions, bench: Workbench | None = None) -> Plan:
    """What a conversion of `checkpoint` does, from its headers; the small plain tensors are read to check them.

    bench: where the jobs will work, the CPU unless said.
    """
    if checkpoint.config.quantization is not None:
        raise CheckpointError(
            f"{checkpoint.folder} is quantized already (config.json has a quantization_config); start from the "
            "original Hugging Face folder"
        )
    if options.mtp_bits is not None and not checkpoint.has_mtp:
        raise IsobitError(f"{checkpoint.folder} has no MTP head; leave --mtp-bits out")
    if options.ngram_bits is not None and not checkpoint.config.ple_layers:
        raise IsobitError(f"{checkpoint.folder} has no n-gram table; leave --ngram-bits out")
    plan = Plan(bench or CpuWorkbench(), notes=_notes(checkpoint))
    groups = list(required_tensors(checkpoint.config))
    if checkpoint.config.tie_word_embeddings:
        groups.append(_head(checkpoint))
    for group in groups:
        if group.kind == "ngram":
            _plan_table(plan, checkpoint, group, options)
        elif group.kind == "linear" and group.quantizable:
            _plan_quantized(plan, checkpoint, group, options)
        else:
            _plan_copied(plan, checkpoint, group)
    return plan


def _notes(checkpoint: Checkpoint) -> list[str]:
    notes = []
    if not (checkpoint.folder / "tokenizer.json").is_file():
        notes.append(f"{checkpoint.folder} has no tokenizer.json; the result cannot be served until one is added.")
    if checkpoint.lacks_mtp:
        notes.append(f"{checkpoint.folder} holds no tensors of its MTP head; the result has none.")
    return notes


def _head(checkpoint: Checkpoint) -> TensorGroup:
    config = checkpoint.config
    return TensorGroup("lm_head", "linear", "head", config.hidden_size, config.vocab_size, quantizable=True)


def _plan_quantized(plan: Plan, checkpoint: Checkpoint, group: TensorGroup, options: ConvertOptions) -> None:
    name, bits = published_name(group.name), options.width(group)
    k, n = padded(group.in_features), padded(group.out_features)
    tied = group.name == "lm_head" and checkpoint.config.tie_word_embeddings and not checkpoint.has("lm_head")
    parts = {} if tied else checkpoint.linear_layout(group.name).parts
    if "trellis" in parts:
        raise CheckpointError(f"{checkpoint.folder}: {name} is quantized, expected a plain weight")

    def run(progress: JobProgress) -> dict[str, np.ndarray]:
        plain = checkpoint.source(group.name)
        quantized = quantize_linear(
            plain.weight, bits, options.codebook, name=name, bias=plain.bias, bench=plan.bench, progress=progress
        )
        return stored_tensors(quantized)

    plan.jobs.append(Job(name, k * n, bits, run))
    stored: dict[str, tuple[str, tuple[int, ...]]] = {
        "trellis": ("I16", (k // TILE, n // TILE, int(TILE * bits))),
        "suh": ("F16", (k,)),
        "svh": ("F16", (n,)),
    }
    if options.codebook != "3inst":
        stored[options.codebook] = ("I32", ())
    if "bias" in parts:
        stored["bias"] = ("F16", (n,))
    for part, (dtype, shape) in stored.items():
        plan.outputs[f"{name}.{part}"] = Output(dtype, shape, _from_job(name, part))


def _plan_copied(plan: Plan, checkpoint: Checkpoint, group: TensorGroup) -> None:
    if group.kind == "vector":
        checkpoint.vector(group.name)  # checks its shape
        infos = {group.suffix: checkpoint.store.info(checkpoint.file_name(group.tensor))}
    elif group.kind == "embedding":
        infos = {".weight": _plain_embedding(checkpoint)}
    else:
        infos = {f".{part}": info for part, info in checkpoint.linear_layout(group.name).parts.items()}
    for suffix, info in infos.items():
        plan.outputs[published_name(group.name) + suffix] = _copy(checkpoint, info)
        for _ in _checked_pieces(checkpoint, info):
            pass


def _plain_embedding(checkpoint: Checkpoint) -> TensorInfo:
    parts = checkpoint.embedding_layout().parts
    if "weight" not in parts:
        raise CheckpointError(f"{checkpoint.folder}: the token embeddings are quantized, expected plain ones")
    return parts["weight"]


def _plan_table(plan: Plan, checkpoint: Checkpoint, group: TensorGroup, options: ConvertOptions) -> None:
    layer = int(group.name.split(".")[1])
    layout, name = checkpoint.ngram_layout(layer), published_name(group.name)
    if layout.bits is not None:
        raise CheckpointError(f"{checkpoint.folder}: {name} is quantized, expected a plain table")
    owner, heads = (name, "head") if options.ngram_bits else (name.rpartition(".")[0], "ngram_heads")
    spelled = {
        "offsets": f"{owner}.{heads}_offsets",
        "sizes": f"{owner}.{heads}_vocab_sizes",
        "multipliers": f"{owner}.layer_multipliers",
    }
    for part, tensor in spelled.items():
        plan.tables[tensor] = _copy(checkpoint, layout.parts[part])
    suffixes = [""] if len(layout.shards) == 1 else [f".shard_{i}" for i in range(len(layout.shards))]
    if options.ngram_bits is None:
        for suffix, shard in zip(suffixes, layout.shards, strict=True):
            plan.tables[f"{name}{suffix}.weight"] = _copy(checkpoint, shard)
        return
    if group.in_features * options.ngram_bits % 16:
        raise IsobitError(
            f"--ngram-bits is {options.ngram_bits}: rows of {group.in_features} values then do not fill 16-bit words"
        )
    _plan_quantized_table(plan, checkpoint.ngram_table(layer), name, suffixes, options.ngram_bits)


def _plan_quantized_table(plan: Plan, table: NgramTable, name: str, suffixes: list[str], bits: int) -> None:
    bias: list[np.ndarray] = []

    def head_bias() -> np.ndarray:
        if not bias:
            bias.append(_head_means(table))
        return bias[0]

    def rows_job(shard: int, first: int, count: int) -> Job:
        def run(progress: JobProgress) -> dict[str, np.ndarray]:
            rows = _widen(table.shards[shard][first : first + count], table.bfloat16)
            of_rows = _bias_of_rows(table, head_bias(), shard * table.shard_rows + first, count)
            trellis = quantize_ngram_rows(rows, bits, of_rows, name=name, bench=plan.bench)
            progress(count * table.width)
            return {"trellis": trellis}

        return Job(f"{name}{suffixes[shard]}.{first}", count * table.width, bits, run)

    plan.jobs.append(Job(f"{name}.head_bias", 0, bits, lambda progress: {"head_bias": head_bias()}))
    shape = (table.heads, table.width)
    plan.tables[f"{name}.head_bias"] = Output("F16", shape, _from_job(f"{name}.head_bias", "head_bias"))
    for shard, suffix in enumerate(suffixes):
        rows = len(table.shards[shard])
        jobs = [rows_job(shard, at, min(TABLE_ROWS, rows - at)) for at in range(0, rows, TABLE_ROWS)]
        plan.jobs.extend(jobs)
        output = Output("I16", (rows, 1 + table.width * bits // 16), _from_jobs([job.key for job in jobs], "trellis"))
        plan.tables[f"{name}{suffix}.trellis"] = output


def _head_means(table: NgramTable) -> np.ndarray:
    """The mean row of each head, float16 [heads, width]: what is left to quantize is centred."""
    means = np.zeros((table.heads, table.width), np.float64)
    for head, (offset, size) in enumerate(zip(table.offsets.tolist(), table.sizes.tolist(), strict=True)):
        for first in range(offset, offset + size, TABLE_ROWS):
            means[head] += ordered_sum(_table_rows(table, first, min(TABLE_ROWS, offset + size - first)))
        means[head] /= size
    return np.clip(means, -65504, 65504).astype(np.float16)


def _table_rows(table: NgramTable, first: int, count: int) -> np.ndarray:
    """float64 [count, width], rows of any shards."""
    pieces = []
    while count:
        shard, at = divmod(first, table.shard_rows)
        piece = _widen(table.shards[shard][at : at + count], table.bfloat16).astype(np.float64)
        pieces.append(piece)
        first, count = first + len(piece), count - len(piece)
    return np.concatenate(pieces)


def _bias_of_rows(table: NgramTable, head_bias: np.ndarray, first: int, count: int) -> np.ndarray:
    """float16 [count, width], zero for rows that belong to no head."""
    rows = np.arange(first, first + count)
    bias = np.zeros((count, table.width), np.float16)
    for head in range(table.heads):
        bias[(rows >= table.offsets[head]) & (rows < table.offsets[head] + table.sizes[head])] = head_bias[head]
    return bias


def _from_job(key: str, part: str) -> Pieces:
    return _from_jobs([key], part)


def _from_jobs(keys: list[str], part: str) -> Pieces:
    def pieces(work: WorkFolder) -> Iterator[np.ndarray]:
        for key in keys:
            yield work.load(key, part)

    return pieces


def _copy(checkpoint: Checkpoint, info: TensorInfo) -> Output:
    return Output(info.dtype, info.shape, lambda work: _checked_pieces(checkpoint, info))


def _checked_pieces(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[np.ndarray]:
    """A tensor's values in order, as stored; CheckpointError at NaN or infinity."""
    flat = checkpoint.store.map(info.name).reshape(-1)
    step = COPY_BYTES // flat.itemsize
    for first in range(0, len(flat), step):
        piece = flat[first : first + step]
        if piece.dtype.kind == "f" or info.dtype == "BF16":
            _check_finite(_widen(piece, info.dtype == "BF16"), info)
        yield piece


def _widen(values: np.ndarray, bfloat16: bool) -> np.ndarray:
    """Owned float32, exact."""
    return (values.astype(np.uint32) << 16).view(np.float32) if bfloat16 else values.astype(np.float32)


def _check_finite(values: np.ndarray, info: TensorInfo) -> None:
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{info.file}: tensor {info.name} holds NaN or infinite values, expected finite ones; download it again"
        )


def _record(checkpoint: Checkpoint, options: ConvertOptions) -> dict[str, Any]:
    """What must be equal for finished tensors to be of use."""
    config = (checkpoint.folder / "config.json").read_bytes()
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in checkpoint.store.files}
    return {
        "quantizer": QUANTIZER_VERSION,
        **{name.replace("_", "-"): value for name, value in vars(options).items()},
        "source config.json": hashlib.sha256(config).hexdigest(),
        "source": files,
    }


def _make_parent(target: Path) -> None:
    try:
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IsobitError(f"{target}: its parent folder cannot be made ({error.strerror}); name another") from None


def _check_space(work: WorkFolder, plan: Plan) -> None:
    shutil.rmtree(work.output, ignore_errors=True)
    needed = plan.nbytes + max(0, _pieces_nbytes(plan) - work.nbytes)
    free = shutil.disk_usage(work.path).free
    if free < needed:
        raise IsobitError(
            f"{work.path}: the conversion needs {needed / 1e6:,.1f} MB of disk, {free / 1e6:,.1f} MB are free; make "
            "room for it"
        )


def _pieces_nbytes(plan: Plan) -> int:
    """About what the finished pieces take while the output is put together."""
    return sum(int(job.weights * job.bits / 8) for job in plan.jobs)


def _run_jobs(plan: Plan, checkpoint: Checkpoint, work: WorkFolder, progress: Progress) -> None:
    done, total = 0, plan.weights
    for job in plan.jobs:
        if not work.has(job.key):
            within = 0

            def advance(weights: int, before: int = done) -> None:
                nonlocal within
                within += weights
                progress(before + within, total)

            with plan.bench.working():
                arrays = job.run(advance)
            # No piece is kept that may be of other bytes than the record's.
            checkpoint.store.check_unedited()
            work.save(job.key, arrays)
        done += job.weights
        progress(done, total)


def _write_output(checkpoint: Checkpoint, options: ConvertOptions, plan: Plan, work: WorkFolder) -> None:
    folder = work.fresh_output()
    declared = {name: (output.dtype, output.shape, output.nbytes) for name, output in plan.outputs.items()}
    files = exl3_folder.split_files(declared)
    for file, names in files.items():
        _write_file(folder / file, {name: plan.outputs[name] for name in names}, work)
    if plan.tables:
        _write_file(folder / exl3_folder.TABLE_FILE, plan.tables, work)
    if len(files) > 1:
        exl3_folder.write_index(folder, files, declared)
    quantization = _quantization(options, plan, checkpoint)
    outer = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    config = exl3_folder.exl3_config(outer, checkpoint.config, quantization)
    exl3_folder.write_json(folder / "config.json", config)
    storage = exl3_folder.tensor_storage(declared)
    exl3_folder.write_json(folder / "quantization_config.json", {**quantization, "tensor_storage": storage})
    exl3_folder.copy_texts(checkpoint.folder, folder)
    if not (folder / "generation_config.json").exists() and checkpoint.stop_tokens:
        exl3_folder.write_json(folder / "generation_config.json", {"eos_token_id": sorted(checkpoint.stop_tokens)})


def _write_file(path: Path, outputs: dict[str, Output], work: WorkFolder) -> None:
    with TensorWriter(path, {name: (output.dtype, output.shape) for name, output in outputs.items()}) as writer:
        for name, output in outputs.items():
            for piece in output.pieces(work):
                writer.append(name, piece)


def _quantization(options: ConvertOptions, plan: Plan, checkpoint: Checkpoint) -> dict[str, Any]:
    quantization: dict[str, Any] = {
        "quant_method": "exl3",
        "version": exl3_folder.FORMAT_VERSION,
        "bits": options.bits,
        "head_bits": options.bits if options.head_bits is None else options.head_bits,
        "codebook": options.codebook,
    }
    if checkpoint.has_mtp:
        quantization["mtp_bits"] = options.bits if options.mtp_bits is None else options.mtp_bits
    return quantization


def _trial_rate(bench: Workbench, bits: float, codebook: str) -> float:
    """Weights a second of the search at this width."""
    count = bench.trial_tiles
    values = np.linspace(-1, 1, count * TILE_VALUES, dtype=np.float32)
    tiles = bench.placed(values.reshape(count, TILE_VALUES))
    bench.host(bench.search(tiles[:1], bits, codebook))
    begin = time.perf_counter()
    bench.host(bench.search(tiles, bits, codebook))
    return values.size / (time.perf_counter() - begin)
