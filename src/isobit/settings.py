"""Every setting of a user, once: its name, default, bounds and help. The CLI, the server and the docs read it here."""

import math
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One setting. name: as a request field; the command line writes it --with-dashes.

    kind: int, float, str or bool; a bool of the command line is a switch, off unless given. default: None means unset,
    and `unset` then says what happens. minimum, maximum: inclusive bounds of a number; above: an exclusive lower bound.
    choices: the allowed strings.
    """

    name: str
    kind: type
    default: Any
    help: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    unset: str = ""

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def bounds(self) -> str:
        """The allowed values in words, "" when anything of the kind is allowed."""
        if self.kind is bool:
            return "true, false"
        if self.choices:
            return ", ".join(self.choices)
        if self.above is not None:
            return f"above {self.above:g}" + ("" if self.maximum is None else f", at most {self.maximum:,}")
        if self.minimum is not None and self.maximum is not None:
            return f"{self.minimum:,} to {self.maximum:,}"
        return "" if self.minimum is None else f"{self.minimum:,} or more"

    @property
    def default_text(self) -> str:
        """The default in words."""
        if self.default is None:
            return self.unset
        return str(self.default).lower() if self.kind is bool else str(self.default)

    def allows(self, value: Any) -> bool:
        """Whether `value`, of the right kind, is within the bounds."""
        if self.choices:
            return value in self.choices
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if self.above is not None and not value > self.above:
            return False
        return (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)


PREFILL_MODES = ("deep", "batched", "serial")
PRIORITIES = ("normal", "background")
BATCHED_ROWS = 64
MOST_LANES = 8  # that are allotted unasked
SEED_LIMIT = 2**64
COMPLETION_TOKENS = 16  # the reply limit that OpenAI's completions route has when a request names none
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20

HOST = Setting("host", str, "127.0.0.1", "Address to listen on; 0.0.0.0 for every network interface.")
PORT = Setting("port", int, 8000, "Port to listen on; 0 takes a free one, which is printed.", 0, 65535)
NAME = Setting("name", str, None, "Model name that requests use.", unset="the name of the folder")
CONTEXT = Setting(
    "context", int, None, "Rows of one request, prompt and reply together.", 2, 2**20, unset="the checkpoint's window"
)
MAX_TOKENS = Setting(
    "max_tokens",
    int,
    None,
    "Reply limit of requests that name none, in tokens.",
    1,
    2**20,
    unset=f"up to the end of the context; {COMPLETION_TOKENS} for /v1/completions",
)
MEMORY_GIB = Setting(
    "memory_gib",
    float,
    None,
    "Memory to stay within, in GiB; segments shrink to fit, with the same replies.",
    maximum=65536,
    above=0,
    unset="what the machine has free",
)
DEVICES = ("auto", "cpu", "cuda")
DEVICE = Setting(
    "device", str, "auto", "What computes: the GPU where there is a usable one, or as said.", choices=DEVICES
)
THREADS = Setting("threads", int, None, "CPU threads of the kernels.", 1, 1024, unset="one for each core")
SEGMENT_ROWS = Setting(
    "segment_rows",
    int,
    None,
    "Prompt rows that one forward of deep prefill runs at most.",
    1,
    65536,
    unset="1,024 on a CPU, 8,192 on a GPU",
)
PARALLEL = Setting(
    "parallel",
    int,
    None,
    "Requests that are served at the same time; further ones wait.",
    1,
    256,
    unset=f"what memory allows, at most {MOST_LANES}",
)
DECODE_SHARE = Setting(
    "decode_share", int, 256, "Prompt rows that one forward runs at most while other requests' replies go on.", 1, 65536
)
MTP_DRAFTS = Setting("mtp_drafts", int, 7, "Longest draft of the MTP head, in tokens; 0 for none of them.", 0, 12)
NO_DRAFTS = Setting("no_drafts", bool, False, "Draft nothing: one row a reply token, the same replies.")
PROFILE = Setting(
    "profile",
    bool,
    False,
    "Print time per op, of prompt rounds and decode rounds apart, after a first run that is not counted; never changes "
    "a reply.",
)
PROMPT_CACHE_GIB = Setting(
    "prompt_cache_gib",
    float,
    1.0,
    "Memory of the device for states of earlier prompts and replies, to go on from, in GiB; 0 keeps none.",
    0,
    65536,
)
HOST_CACHE_GIB = Setting(
    "host_cache_gib",
    float,
    None,
    "Host memory for states that the prompt cache has no room for, in GiB; 0 for none.",
    0,
    65536,
    unset="on a GPU a quarter of what is free, at most 64; on a CPU 0",
)
SPILL_DIR = Setting(
    "spill_dir",
    str,
    None,
    "Folder for kept states that memory has no room for, and for all of them at the end.",
    unset="none",
)
SPILL_GIB = Setting(
    "spill_gib", float, 8.0, "Disk space that kept states may take in that folder, in GiB.", maximum=65536, above=0
)
QUEUE = Setting("queue", int, 64, "Requests that may wait; one more is answered with 503.", 1, 100_000)
BODY_MIB = Setting("body_mib", int, 8, "Largest request body, in MiB; a larger one is answered with 413.", 1, 1024)
GRACE = Setting("grace", float, 30.0, "Seconds that running replies get to finish after Ctrl-C or SIGTERM.", 0, 86_400)

TEMPERATURE = Setting("temperature", float, 1.0, "Sampling temperature; 0 always takes the likeliest token.", 0, 2)
TOP_K = Setting("top_k", int, 0, "Sample among the k likeliest tokens; 0 keeps all.", 0, 2**31 - 1)
TOP_P = Setting("top_p", float, 1.0, "Sample among the likeliest tokens that together reach this probability.", 0, 1)
MIN_P = Setting("min_p", float, 0.0, "Drop tokens less likely than this times the likeliest.", 0, 1)
SEED = Setting(
    "seed",
    int,
    None,
    "Seed of the sampling; the same seed and request give the same reply.",
    -(2**63),
    SEED_LIMIT - 1,
    unset="a random one, which the response names",
)
PREFILL = Setting("prefill", str, "deep", "How the prompt is computed; never changes the reply.", choices=PREFILL_MODES)
REQUEST_SEGMENT_ROWS = replace(
    SEGMENT_ROWS,
    default=None,
    help="Prompt rows that one forward of this request runs at most; never changes the reply.",
    unset=f"the server's for deep, {BATCHED_ROWS} for batched",
)
PRIORITY = Setting(
    "priority",
    str,
    "normal",
    "A background request runs only while no normal one does.",
    choices=PRIORITIES,
)
DRAFT = Setting("draft", bool, True, "Whether drafts may speed the reply up; never changes it.")
REUSE = Setting(
    "reuse",
    bool,
    None,
    "Whether to go on from a kept state instead of computing every prompt row; never changes the reply.",
    unset="true, but false in a request that names `prefill` or `segment_rows`",
)
REPLY_TOKENS = replace(MAX_TOKENS, default=256, help="Longest reply, in tokens.", unset="")

SERVER = (
    HOST,
    PORT,
    NAME,
    CONTEXT,
    MAX_TOKENS,
    DEVICE,
    MEMORY_GIB,
    THREADS,
    PARALLEL,
    SEGMENT_ROWS,
    DECODE_SHARE,
    MTP_DRAFTS,
    NO_DRAFTS,
    PROMPT_CACHE_GIB,
    HOST_CACHE_GIB,
    SPILL_DIR,
    SPILL_GIB,
    QUEUE,
    BODY_MIB,
    GRACE,
)
REQUEST = (TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, PREFILL, REQUEST_SEGMENT_ROWS, PRIORITY, DRAFT, REUSE)


def markdown_table(settings: tuple[Setting, ...], as_flags: bool) -> str:
    """The settings as a Markdown table, one a line; `as_flags` names them as on the command line."""
    lines = [f"| {'option' if as_flags else 'field'} | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for setting in settings:
        name = setting.flag if as_flags else setting.name
        default = "off" if as_flags and setting.kind is bool else setting.default_text
        lines.append(f"| `{name}` | {default} | {setting.bounds or 'any'} | {setting.help} |")
    return "\n".join(lines)
