"""How an engine runs."""

from dataclasses import dataclass

from isobit import settings


@dataclass(frozen=True)
class EngineSettings:
    """How an engine runs; nothing here changes a reply. `isobit.settings` declares what each means and its bounds."""

    context: int | None = settings.CONTEXT.default
    device: str = settings.DEVICE.default
    memory_gib: float | None = settings.MEMORY_GIB.default
    segment_rows: int | None = settings.SEGMENT_ROWS.default
    threads: int | None = settings.THREADS.default
    queue: int = settings.QUEUE.default
    parallel: int | None = settings.PARALLEL.default
    decode_share: int = settings.DECODE_SHARE.default
    mtp_drafts: int = settings.MTP_DRAFTS.default
    drafts: bool = not settings.NO_DRAFTS.default
    prompt_cache_gib: float = settings.PROMPT_CACHE_GIB.default
    host_cache_gib: float | None = settings.HOST_CACHE_GIB.default
    spill_dir: str | None = settings.SPILL_DIR.default
    spill_gib: float = settings.SPILL_GIB.default
