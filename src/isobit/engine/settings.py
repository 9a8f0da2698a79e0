"""How an engine runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSettings:
    """How an engine runs; nothing here changes a reply. `isobit.settings` declares what each means and its bounds."""

    context: int | None = None
    memory_gib: float | None = None
    segment_rows: int = 1024
    threads: int | None = None
    queue: int = 64
    parallel: int | None = None
    decode_share: int = 256
    mtp_drafts: int = 3
    drafts: bool = True
    prompt_cache_gib: float = 1.0
    spill_dir: str | None = None
    spill_gib: float = 8.0
