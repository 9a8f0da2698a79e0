"""`isobit synth`: a random but valid checkpoint."""

from pathlib import Path
from typing import Annotated, Any

import typer

from isobit.cli.common import Bar
from isobit.errors import IsobitError

Target = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder to make; it must not exist yet, or be empty.", show_default=False)
]
PresetOption = Annotated[
    str,
    typer.Option(
        metavar="demo|test|full",
        help="Sizes: demo is small and quick, test is tiny, full has the real model's widths.",
    ),
]
LayersOption = Annotated[
    int | None,
    typer.Option(min=1, max=512, help="Decoder layers, every fourth one attention. Default: 4.", show_default=False),
]
ExpertsOption = Annotated[
    int | None,
    typer.Option(min=1, max=4096, help="Routed experts of a layer. Default: the preset's.", show_default=False),
]
IndexerBudgetOption = Annotated[
    int | None,
    typer.Option(
        min=4,
        help="Keys that a row of attention selects, a multiple of 4. Default: the preset's.",
        show_default=False,
    ),
]
SeedOption = Annotated[int, typer.Option(help="Every value follows from it: same seed, same bytes.")]
CodebookOption = Annotated[
    str, typer.Option(metavar="3inst|mcg|mul1|mixed", help="Codebook of the quantized linears; mixed: one a tensor.")
]
BitsOption = Annotated[
    str | None,
    typer.Option(
        metavar="WIDTH|mixed",
        help="Width of the quantized linears: 1 to 8, or 1.5, 2.5, 3.5 with mul1; mixed: one a tensor. "
        "Default: the preset's.",
        show_default=False,
    ),
]
HeadBitsOption = Annotated[
    str | None, typer.Option(metavar="WIDTH", help="Width of the output head. Default: as --bits.", show_default=False)
]
MtpBitsOption = Annotated[
    str | None, typer.Option(metavar="WIDTH", help="Width of the MTP head. Default: as --bits.", show_default=False)
]
NgramBitsOption = Annotated[
    int | None,
    typer.Option(help="Width of the n-gram table: 1 to 8, or 16 for plain. Default: the preset's.", show_default=False),
]
NgramRowsOption = Annotated[
    int | None,
    typer.Option(help="About how many rows the n-gram table has. Default: the preset's.", show_default=False),
]
NgramShardsOption = Annotated[int, typer.Option(min=1, help="Tensors that the n-gram table is split into.")]
EmbeddingBitsOption = Annotated[
    int | None,
    typer.Option(help="Quantize the token embeddings to this width, 1 to 8. Default: fp16.", show_default=False),
]
BiasesOption = Annotated[bool, typer.Option("--biases", help="Give the attention projections a bias.")]
PackedSignsOption = Annotated[
    bool, typer.Option("--packed-signs", help="Store one scale of each linear as packed signs, as old checkpoints do.")
]
PredictableOption = Annotated[
    bool, typer.Option("--predictable", help="Tokens follow mostly from the last one, so that MTP drafts are accepted.")
]
InMemoryOption = Annotated[
    bool,
    typer.Option(
        "--in-memory",
        help="Write a recipe instead of weights: who opens the folder makes them in memory, in seconds, with the same "
        "distributions but other values than a written checkpoint of that seed.",
    ),
]
MtpOption = Annotated[bool, typer.Option("--mtp/--no-mtp", help="Whether there is an MTP head.")]


def synth(
    folder: Target,
    preset: PresetOption = "demo",
    layers: LayersOption = None,
    experts: ExpertsOption = None,
    indexer_budget: IndexerBudgetOption = None,
    seed: SeedOption = 0,
    codebook: CodebookOption = "mul1",
    bits: BitsOption = None,
    head_bits: HeadBitsOption = None,
    mtp_bits: MtpBitsOption = None,
    ngram_bits: NgramBitsOption = None,
    ngram_rows: NgramRowsOption = None,
    ngram_shards: NgramShardsOption = 1,
    embedding_bits: EmbeddingBitsOption = None,
    biases: BiasesOption = False,
    packed_signs: PackedSignsOption = False,
    mtp: MtpOption = True,
    predictable: PredictableOption = False,
    in_memory: InMemoryOption = False,
) -> None:
    """Write a random but valid checkpoint, to try things out: its replies are noise.

    With --preset full, four layers and the default n-gram table take about 7 GB, all 48 layers more than 50. With
    --in-memory the folder takes no more than a few kilobytes.
    """
    from isobit.checkpoint.synth import synthesize
    from isobit.checkpoint.synth_recipe import write_recipe

    options: dict[str, Any] = {
        "preset": preset,
        "layers": layers,
        "seed": seed,
        "codebook": codebook,
        "bits": _width(bits, "--bits"),
        "head_bits": _width(head_bits, "--head-bits"),
        "mtp_bits": _width(mtp_bits, "--mtp-bits"),
        "ngram_bits": ngram_bits,
        "ngram_rows": ngram_rows,
        "ngram_shards": ngram_shards,
        "embedding_bits": embedding_bits,
        "biases": biases,
        "packed_signs": packed_signs,
        "mtp": mtp,
        "predictable": predictable,
        "overrides": _overrides(num_experts=experts, indexer_budget=indexer_budget),
    }
    with Bar("writing") as progress:
        if in_memory:
            weights = write_recipe(folder, **options)
            made = f"a recipe: {weights / 1e6:,.0f} MB of weights, made in memory when the folder is opened"
        else:
            written = synthesize(folder, **options, progress=progress)
            made = f"{sum(file.stat().st_size for file in written.iterdir()) / 1e6:,.0f} MB"
    typer.echo(f"Wrote {folder} ({made}). See what it holds: isobit inspect {folder}")


def _overrides(**fields: int | None) -> dict[str, int]:
    """The fields of the text config that were given."""
    return {name: value for name, value in fields.items() if value is not None}


def _width(text: str | None, flag: str) -> float | str | None:
    if text is None or text == "mixed":
        return text
    try:
        width = float(text)
    except ValueError:
        raise IsobitError(f"{flag} is {text}: expected a width such as 3 or 3.5, or mixed") from None
    return int(width) if width.is_integer() else width
