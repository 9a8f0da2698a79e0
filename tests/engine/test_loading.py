"""Starting where memory is short: one line with the numbers and what to set; and reading ahead of the device."""

import dataclasses
import shutil

import numpy as np
import pytest

from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.weights import Exl3Linear
from isobit.engine.engine import Engine, EngineSettings
from isobit.engine.loading import least_bytes
from isobit.engine.memory import GIB
from isobit.engine.placement import GPU_RESERVE, Placement
from isobit.errors import CheckpointError, IsobitError
from isobit.model import read_ahead
from isobit.model.load import load_model, parts_of
from isobit.model.read_ahead import ReadAhead, stored_bytes
from isobit.model.state import pages_for
from isobit.ops import load_ops

MIB = 1 << 20
CONTEXT = 400


@pytest.fixture
def sizes(monkeypatch):
    """sizes(limit, loaded): a device of so many bytes, of which so many are taken once the weights are there."""

    def set_sizes(limit: int, loaded: int = 0) -> None:
        monkeypatch.setattr(Placement, "limit", lambda placement, memory_gib: limit)
        monkeypatch.setattr(Placement, "loaded", lambda placement: loaded)
        monkeypatch.setattr(Placement, "free_text", lambda placement: "the GPU has 0.50 GiB of 1.00 GiB free")

    return set_sizes


def refused(folder, model=None, **settings) -> str:
    chosen = EngineSettings(**{"context": CONTEXT, "prompt_cache_gib": 0.0, **settings})
    with pytest.raises(IsobitError) as caught:
        Engine(folder, chosen, model=model).close()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_weights_that_cannot_fit_are_refused_before_they_are_read(test_checkpoint, sizes, monkeypatch):
    monkeypatch.setattr(Checkpoint, "linear", lambda *arguments: pytest.fail("a weight was read"))
    sizes(limit=3 * MIB, loaded=MIB)
    message = refused(test_checkpoint)
    assert "the memory limit is 3.0 MiB, but 1.0 MiB are taken before the weights" in message
    assert f"take at least {least_bytes(Checkpoint(test_checkpoint)) / MIB:.1f} MiB" in message
    assert "the GPU has 0.50 GiB of 1.00 GiB free" in message
    assert "raise --memory-gib" in message


def test_more_memory_than_there_is_is_told_and_not_used(test_checkpoint, monkeypatch, caplog):
    monkeypatch.setattr("isobit.engine.memory.available", lambda: 40 * MIB)
    monkeypatch.setattr("isobit.engine.memory.anonymous_resident", lambda: 60 * MIB)
    settings = EngineSettings(context=CONTEXT, prompt_cache_gib=0.0, memory_gib=512.0, device="cpu", parallel=1)
    engine = Engine(test_checkpoint, settings)
    engine.close()
    assert caplog.messages == [
        "--memory-gib is 512.00 GiB, but the machine has 40.0 MiB free: going on with 100.0 MiB, with the same replies"
    ]
    assert 0 < engine.budget.buffer_bytes < 40 * MIB
    caplog.clear()
    Engine(test_checkpoint, dataclasses.replace(settings, memory_gib=80 / 1024)).close()
    assert not caplog.messages


def test_on_a_gpu_what_is_free_there_counts(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (6 * GIB, 9 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3 * GIB)
    placement = Placement("cuda")
    assert (placement.limit(4.0), placement.beyond_reach(4.0)) == (4 * GIB, None)
    assert placement.limit(9.0) == 9 * GIB
    assert placement.limit(80.0) == placement.limit(None) == 9 * GIB - GPU_RESERVE
    assert placement.beyond_reach(80.0) == (
        "--memory-gib is 80.00 GiB, but the GPU has 6.00 GiB of 9.00 GiB free: going on with 8.00 GiB, with the same "
        "replies"
    )
    assert placement.beyond_reach(None) is None


def test_the_least_bytes_are_those_of_what_every_device_holds(test_checkpoint):
    store = Checkpoint(test_checkpoint).store
    sizes = {name: store.info(name).nbytes for name in store.names}
    tiles = sum(size for name, size in sizes.items() if name.endswith(".trellis") and ".ple_embedding." not in name)
    left_out = sum(size for name, size in sizes.items() if ".ple_embedding." in name or "embed_tokens" in name)
    assert tiles < least_bytes(Checkpoint(test_checkpoint)) <= sum(sizes.values()) - left_out


def test_memory_that_runs_out_while_loading_is_told_with_the_numbers(test_checkpoint, sizes, monkeypatch):
    def short(*arguments):
        raise MemoryError("9 GiB")

    sizes(limit=GIB)
    monkeypatch.setattr("isobit.engine.loading.load_model", short)
    message = refused(test_checkpoint)
    assert message.startswith("memory ran out: the GPU has 0.50 GiB of 1.00 GiB free, but the weights of ")
    assert message.endswith("or more: free memory, or take a checkpoint of fewer bits")


def test_one_lane_or_a_context_that_does_not_fit_is_told(test_checkpoint, sizes, model):
    keys = pages_for(model.context) * model.page_bytes()
    sizes(limit=20 * MIB, loaded=20 * MIB - keys)
    message = refused(test_checkpoint, model, context=model.context)
    assert "the memory limit is 20.0 MiB" in message
    assert f"1 lane {model.slot_bytes() / MIB:.1f} MiB" in message
    assert f"the keys and values of {model.context} tokens {keys / MIB:.1f} MiB" in message
    assert "--context, --parallel or --prompt-cache-gib" in message


def test_a_host_tier_that_does_not_fit_is_told_apart_from_the_weights(test_checkpoint, sizes, model):
    sizes(limit=GIB, loaded=20 * MIB)
    settings = {"context": model.context, "device": "cpu", "prompt_cache_gib": 0.01, "host_cache_gib": 2.0}
    message = refused(test_checkpoint, model, **settings)
    assert "process and weights take 20.0 MiB, the prompt cache 10.2 MiB, its host tier 2.00 GiB, 1 lane" in message
    assert message.endswith("lower --context, --parallel, --prompt-cache-gib or --host-cache-gib")


def test_states_that_cannot_be_had_are_told(test_checkpoint, sizes, monkeypatch):
    def short(*arguments):
        raise MemoryError("2 GiB")

    sizes(limit=GIB)
    monkeypatch.setattr("isobit.model.flash_next.FlashNext.new_state", short)
    message = refused(test_checkpoint, parallel=3)
    assert "3 lanes of 400 tokens and the prompt cache take" in message
    assert message.endswith("lower --memory-gib, --context, --parallel or --prompt-cache-gib")


def test_the_next_layer_is_read_while_one_is_prepared(test_checkpoint, monkeypatch):
    checkpoint, order = Checkpoint(test_checkpoint), []
    layers = [f"layers.{i}" for i in range(checkpoint.config.num_hidden_layers)]
    read = Checkpoint.experts

    def noted(self, layer, each=map):
        order.append(layer)
        return read(self, layer, each)

    monkeypatch.setattr(Checkpoint, "experts", noted)
    with ReadAhead(checkpoint, layers) as ahead:
        for place, layer in enumerate(layers):
            got = ahead.experts(layer)
            expected = read(checkpoint, f"{layer}.mlp")
            for projection in ("gate", "up", "down"):
                for one, other in zip(getattr(got, projection), getattr(expected, projection), strict=True):
                    assert type(one) is type(other)
                    assert one.name == other.name
                    assert all(np.array_equal(vars(one)[key], vars(other)[key]) for key in vars(one))
            assert len(order) <= place + 2
    # Two layers that are begun at once may be made in either order.
    assert sorted(order) == sorted(f"{layer}.mlp" for layer in layers)


def test_experts_read_where_memory_is_used_again_are_what_the_files_hold(test_checkpoint):
    checkpoint = Checkpoint(test_checkpoint)
    layers = [f"layers.{i}" for i in range(checkpoint.config.num_hidden_layers)]
    in_blocks = set()
    with ReadAhead(checkpoint, layers, copies=True) as ahead:
        for place, layer in enumerate(layers):
            ahead.wait(layer)
            got = ahead.experts(layer)
            for linear in (*got.gate, *got.up, *got.down):
                stored = linear.trellis if isinstance(linear, Exl3Linear) else linear.weight
                assert np.shares_memory(stored, ahead._blocks[place % 2]) == (stored.dtype != np.float32)
                in_blocks.add(stored.dtype != np.float32)
            with Checkpoint(test_checkpoint) as other:
                expected = other.experts(f"{layer}.mlp")
            for projection in ("gate", "up", "down"):
                for one, other in zip(getattr(got, projection), getattr(expected, projection), strict=True):
                    assert all(np.array_equal(vars(one)[key], vars(other)[key]) for key in vars(one))
        embedding = ahead.embedding()
        assert embedding.rows.flags.owndata
        with Checkpoint(test_checkpoint) as other:
            assert np.array_equal(embedding.rows, other.embedding().rows)
        assert any("lm_head" in name for name in checkpoint.store._fetched)
    assert len(layers) > 2
    assert True in in_blocks
    assert not checkpoint.store._fetched


def test_a_damaged_layer_is_told_and_no_thread_is_left(test_checkpoint, tmp_path, monkeypatch):
    folder = shutil.copytree(test_checkpoint, tmp_path / "copy")
    pools = []

    class Pool(read_ahead.ThreadPoolExecutor):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            pools.append(self)

    def damaged(self, name, *sizes):
        if name == "layers.1.mlp.experts.2.up_proj":
            raise CheckpointError("layer 1 is damaged")
        return linear(self, name, *sizes)

    linear = Checkpoint.linear
    monkeypatch.setattr(read_ahead, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(Checkpoint, "linear", damaged)
    with pytest.raises(CheckpointError, match="layer 1 is damaged"):
        load_model(Checkpoint(folder), load_ops("cpu"), context=64)
    assert len(pools) == 2
    assert not any(thread.is_alive() for pool in pools for thread in pool._threads)


def test_progress_is_told_in_bytes_up_to_all_of_them(test_checkpoint):
    checkpoint, told = Checkpoint(test_checkpoint), []
    load_model(checkpoint, load_ops("cpu"), 64, lambda done, total: told.append((done, total)))
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(set(done))
    assert set(totals) == {done[-1]}
    layers = [f"layers.{i}" for i in range(checkpoint.config.num_hidden_layers)]
    assert parts_of(checkpoint) == (*layers, "mtp", "embed_tokens", "lm_head")
    assert done[-1] == sum(stored_bytes(checkpoint, part) for part in parts_of(checkpoint))


def test_what_a_gpu_has_is_counted_with_what_pytorch_keeps(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 12 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * GIB, 24 * GIB))
    gpu = Placement("cuda")
    assert gpu.loaded() == 10 * GIB
    assert gpu.limit(None) == (10 + 2 + 5) * GIB - GPU_RESERVE
    assert gpu.limit(6.0) == 6 * GIB
    assert gpu.free_text() == "the GPU has 5.00 GiB of 24.00 GiB free"

    def full(*arguments, **named):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    monkeypatch.setattr(torch, "empty", full)
    assert not gpu.can_allocate(GIB)


@pytest.mark.parametrize("how", ["edited", "replaced"])
def test_files_that_are_edited_while_they_are_loaded_are_refused_and_replaced_ones_are_not(
    test_checkpoint, tmp_path, how
):
    folder = shutil.copytree(test_checkpoint, tmp_path / "checkpoint")

    def change(loaded, total):
        if loaded == total:
            content = path.read_bytes()
            target = path if how == "edited" else path.with_name("new")
            target.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            target.rename(path)

    with Checkpoint(folder) as checkpoint:
        path = checkpoint.store.files[-1]
        load_model(checkpoint, load_ops("cpu"), CONTEXT)
        if how == "edited":
            with pytest.raises(CheckpointError, match=f"{path.name} was edited since it was opened.*: start again"):
                load_model(checkpoint, load_ops("cpu"), CONTEXT, change)
        else:
            load_model(checkpoint, load_ops("cpu"), CONTEXT, change).check_files()
