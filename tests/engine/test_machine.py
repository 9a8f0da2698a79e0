"""A state machine drives the engine; every reply that ends is the one that the oracle gives."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from isobit.engine.engine import Engine, EngineSettings
from isobit.engine.request import Request, Sampling
from tests.engine.listening import Listener, prompt, reply
from tests.short_memory import only, short_memory

SETTINGS = EngineSettings(
    context=220, parallel=3, segment_rows=48, decode_share=16, prompt_cache_gib=0.05, host_cache_gib=0.01
)
TRUNKS, LENGTHS = 3, (4, 40, 90, 150)


@pytest.fixture(scope="module")
def oracle(test_checkpoint):
    """A few requests whose prompts share trunks, with the replies they have alone."""
    alone = EngineSettings(context=220, parallel=1, drafts=False, prompt_cache_gib=0, segment_rows=1)
    engine = Engine(test_checkpoint, alone)
    made = []
    for seed in range(10):
        trunk = prompt(engine, 180, seed % TRUNKS)
        length = LENGTHS[seed % len(LENGTHS)]
        tokens = (*trunk[:length], *prompt(engine, 3 + seed, 100 + seed))
        request = Request(tokens, 5, Sampling(temperature=seed % 2, seed=seed), keep_rows=(length // 2,))
        made.append((request, reply(engine, request)[0].token_hash))
    yield made, engine.model
    engine.close()


def test_any_course_of_events_gives_the_oracles_replies(test_checkpoint, oracle, tmp_path_factory):
    requests, model = oracle

    class Machine(RuleBasedStateMachine):
        @initialize()
        def start(self):
            self.spill = tmp_path_factory.mktemp("spill")
            self.running = []
            self.engine = self.open()

        def open(self):
            return Engine(test_checkpoint, dataclasses.replace(SETTINGS, spill_dir=str(self.spill)), model=model)

        @rule(
            which=st.integers(0, len(requests) - 1),
            rows=st.sampled_from([None, 1, 7, 64]),
            background=st.booleans(),
            draft=st.booleans(),
            reuse=st.sampled_from([True, True, False]),
        )
        def submit(self, which, rows, background, draft, reuse):
            request, expected = requests[which]
            priority = "background" if background else "normal"
            request = dataclasses.replace(request, segment_rows=rows, priority=priority, draft=draft, reuse=reuse)
            listener = Listener()
            self.running.append((self.engine.submit(request, listener), listener, expected))

        @rule(which=st.integers(0, 99))
        def cancel(self, which):
            if self.running:
                self.running[which % len(self.running)][0].cancel()

        @rule()
        def finish(self):
            for ticket, listener, expected in self.running:
                end = listener.result()
                assert end.reason in ("length", "cancelled")
                assert ticket.cancelled or end.token_hash == expected
            self.running.clear()

        @rule(after=st.integers(1, 400))
        def run_out_of_memory(self, after):
            allocations.fails = only(allocations.count + after)

        @rule()
        def evict(self):
            self.finish()
            self.engine.rounds.cache.evict_all()

        @rule()
        def evict_from_the_host(self):
            self.finish()
            self.engine.rounds.cache.host.evict_while(lambda: True)

        @rule()
        def restart(self):
            self.finish()
            self.engine.close()
            self.engine = self.open()

        def teardown(self):
            self.finish()
            rounds = self.engine.rounds
            assert rounds.state.free_slots == SETTINGS.parallel
            self.engine.close()
            assert rounds.state.free_pages == rounds.state.pages

    with short_memory() as allocations:
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=8,
                stateful_step_count=14,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


def test_the_oracles_replies_differ(oracle):
    assert len({token_hash for _, token_hash in oracle[0]}) > 8
    assert np.all([len(request.tokens) < 220 for request, _ in oracle[0]])
