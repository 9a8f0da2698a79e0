"""Fixed requests have fixed hashes, so that the arithmetic version cannot change by accident.

To write the goldens anew, after a version was raised: python -m tests.engine.test_arithmetic_version
"""

import json
import tempfile
from pathlib import Path

from isobit.checkpoint.synth import synthesize
from isobit.engine.engine import Engine, EngineSettings
from isobit.engine.request import Request, Sampling
from isobit.ops.version import ARITHMETIC_VERSION
from tests.engine.listening import together

FILE = Path(__file__).parents[1] / "goldens" / "arithmetic_version.json"
VERSION_PAGE = Path(__file__).parents[2] / "docs" / "arithmetic.md"
PROMPT = tuple((7 * i + i * i // 5) % 256 for i in range(150))
REQUESTS = [
    Request(PROMPT, 24, Sampling(temperature=0.0)),
    Request(PROMPT[:70], 24, Sampling(seed=2**63 + 5)),
    Request(PROMPT[:1], 40, Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, seed=3)),
]
RAISE = (
    "the bits of replies have changed while the arithmetic version is still {version}: if that is meant, raise "
    "ARITHMETIC_VERSION in src/isobit/ops/version.py and in docs/arithmetic.md, then write the goldens anew "
    "(python -m tests.engine.test_arithmetic_version); if it is not, find the op that changed (isobit contract)"
)
OTHER_CHECKPOINT = (
    "the test checkpoint is no longer the one that the goldens are of: if synth is meant to write another, write them "
    "anew (python -m tests.engine.test_arithmetic_version)"
)


def computed(checkpoint: Path) -> dict:
    engine = Engine(checkpoint, EngineSettings(context=256, parallel=len(REQUESTS), prompt_cache_gib=0))
    try:
        replies = together(engine, REQUESTS)
        return {
            "arithmetic": engine.origin.arithmetic,
            "checkpoint": engine.origin.checkpoint,
            "replies": [{"token_hash": end.token_hash, "logits_hash": end.logits_hash} for end in replies],
        }
    finally:
        engine.close()


def test_the_bits_of_replies_change_only_with_the_arithmetic_version(test_checkpoint):
    golden, now = json.loads(FILE.read_text()), computed(test_checkpoint)
    assert now["arithmetic"] == golden["arithmetic"], "the version was raised: write the goldens anew"
    assert now["checkpoint"] == golden["checkpoint"], OTHER_CHECKPOINT
    assert now["replies"] == golden["replies"], RAISE.format(version=ARITHMETIC_VERSION)


def test_the_page_names_the_version():
    assert f"Arithmetic version: `{ARITHMETIC_VERSION}`." in VERSION_PAGE.read_text(encoding="utf-8")


def write_anew() -> None:
    """Write the goldens, unless they changed under the same version."""
    golden = json.loads(FILE.read_text()) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        now = computed(synthesize(Path(folder) / "checkpoint", "test"))
    same_origin = all(now[part] == golden.get(part) for part in ("arithmetic", "checkpoint"))
    if same_origin and now["replies"] != golden["replies"]:
        raise SystemExit(RAISE.format(version=ARITHMETIC_VERSION))
    FILE.write_text(json.dumps(now, indent=2) + "\n")


if __name__ == "__main__":
    write_anew()
