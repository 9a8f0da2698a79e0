"""Who is closer to the float32 reference: `python bench/fidelity_peers.py DIR [--tokens N] [--seed S] [--json]`.

The same random tokens go through isobit, through exllamav3 (in a process of its own) and through transformers in
float32 with the dequantized weights (docs/fidelity.md), on one GPU, one after the other. Top-1 agreement with the
reference, KL divergence from it in nats, and the relative error of the logits, as in the first row of `isobit
fidelity`. Exit code 1 unless isobit is closer by both means, 2 if exllamav3 or memory is missing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

import peer_exllamav3
from isobit.checkpoint.opening import open_checkpoint
from isobit.errors import IsobitError
from isobit.fidelity.agreement import Agreement, agreement
from isobit.fidelity.check import fitting_reference, load_reference, random_tokens, token_count
from isobit.fidelity.choices import Run
from isobit.fidelity.isobit_run import run_isobit


def compared(folder: Path, count: int | None, seed: int, device: str) -> dict[str, Agreement]:
    """isobit's and exllamav3's agreement with the reference."""
    checkpoint = open_checkpoint(folder)
    tokens = random_tokens(checkpoint.config, token_count(checkpoint.config, count), seed)
    reference = fitting_reference(folder, checkpoint, len(tokens), device=device)
    peer = Run(peer_logits(folder, tokens).astype(np.float32), {})
    mine = run_isobit(checkpoint, tokens, device)
    load_reference(reference, checkpoint)
    free = reference.run(tokens)
    return {"isobit": agreement(mine, free), "exllamav3": agreement(peer, free)}


def peer_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """float16 [T, V], computed in a process that gives its memory back."""
    with tempfile.TemporaryDirectory() as kept:
        given, taken = (Path(kept) / name for name in ("tokens.npy", "logits.npy"))
        np.save(given, tokens)
        command = [sys.executable, peer_exllamav3.__file__, str(folder), str(given), str(taken)]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            said = [line for line in ended.stderr.splitlines() if line.strip()] or ["it said nothing"]
            raise IsobitError(f"exllamav3 ended with code {ended.returncode}: {said[-1]}")
        return np.load(taken)


def show(found: dict[str, Agreement]) -> None:
    titles = "top-1", "KL mean", "median", "worst", "error mean", "median", "worst"
    print(f"{'to the float32 reference':26}" + "".join(f"{title:>12}" for title in titles))
    for name, one in found.items():
        kl, error = (one.kl_mean, one.kl_median, one.kl_max), (one.error_mean, one.error_median, one.error_max)
        print(f"{name:26}{f'{one.top1}/{one.positions}':>12}" + "".join(f"{number:12.2e}" for number in (*kl, *error)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--tokens", type=int, help="positions (default: 96 past the indexer's budget)")
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens (default 0)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="isobit's and the reference's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    lacking = peer_exllamav3.what_lacks(options.folder)
    if lacking:
        print(lacking, file=sys.stderr)
        return 2
    try:
        found = compared(options.folder, options.tokens, options.seed, options.device)
    except IsobitError as error:
        print(error, file=sys.stderr)
        return 2
    mine, peer = found["isobit"], found["exllamav3"]
    closer = mine.error_mean < peer.error_mean and mine.kl_mean < peer.kl_mean
    if options.json:
        print(json.dumps({"closer": closer} | {name: asdict(one) for name, one in found.items()}))
    else:
        show(found)
        print("isobit is closer to the reference" if closer else "isobit is NOT closer to the reference")
    return 0 if closer else 1


if __name__ == "__main__":
    sys.exit(main())
