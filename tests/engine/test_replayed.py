"""Which forwards of an engine are replayed: those of replies, not those of prompts, whatever their size."""

from isobit.engine.engine import Engine, EngineSettings
from isobit.engine.request import Request
from tests.engine.listening import reply


def tapes(engine: Engine) -> int:
    return len(engine.model.ops.passes._tapes)


def test_replies_are_replayed_and_prompts_are_not(test_checkpoint):
    engine = Engine(test_checkpoint, EngineSettings(context=256, parallel=1, drafts=False, prompt_cache_gib=0.0))
    try:
        for max_tokens, recorded in ((1, False), (12, True)):
            reply(engine, Request(tuple(range(1, 20)), max_tokens, prefill="serial"))
            assert (tapes(engine) > 0) == recorded
    finally:
        engine.close()
