"""The quantizer on a GPU gives the CPU's bytes: the search in every shape, packing, layers, rows, conversions."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

torch = pytest.importorskip("torch")

from isobit.checkpoint import quantize, search_cuda, trellis, workbench_cuda  # noqa: E402
from isobit.checkpoint.convert import ConvertOptions, convert  # noqa: E402
from isobit.checkpoint.search import search  # noqa: E402
from isobit.checkpoint.search_cuda import SearchShape  # noqa: E402
from isobit.checkpoint.weights import CODEBOOKS, WIDTHS, Exl3Linear  # noqa: E402
from isobit.checkpoint.workbench import CpuWorkbench, workbench  # noqa: E402
from isobit.checkpoint.workbench_cuda import GpuWorkbench  # noqa: E402
from isobit.cuda import kernels, memory  # noqa: E402
from isobit.cuda.errors import DeviceError  # noqa: E402
from isobit.errors import IsobitError  # noqa: E402
from tests.checkpoint.test_convert import SMALL, contents, source_tensors, write_source  # noqa: E402
from tests.checkpoint.test_quantize import bell  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulated_cuda")

SOME_WIDTHS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 6, 8) if os.environ.get("ISOBIT_TEST_GPU") != "1" else WIDTHS
OTHER_SHAPES = (
    SearchShape((3, 3), 1, 2, False),
    SearchShape((3, 3), 1, 2, True),
    SearchShape((3, 3), 2, 1, True, 1024),
    SearchShape((4, 4), 4, 1, True),
    SearchShape((6, 6), 1, 1, True, 1024),
)


def found(targets: np.ndarray, bits: float, codebook: str, shape: SearchShape | None = None) -> np.ndarray:
    states = search_cuda.search(memory.to_device(targets), bits, codebook, shape)
    return memory.to_host(states).view(np.uint16)


@pytest.mark.parametrize("bits", SOME_WIDTHS)
def test_the_search_finds_the_cpus_paths(bits):
    targets = bell(int(100 * bits), 3, 24)
    for codebook in CODEBOOKS if bits == 3 else ("mul1",):
        assert np.array_equal(found(targets, bits, codebook), search(targets, bits, codebook))


@pytest.mark.parametrize("shape", OTHER_SHAPES, ids=str)
def test_every_shape_finds_the_same_paths(shape):
    bits = sum(shape.fresh) / 2
    targets = bell(31, shape.rings + 1, 16)
    assert np.array_equal(found(targets, bits, "mul1", shape), search(targets, bits, "mul1"))


def test_blocks_take_ring_after_ring(monkeypatch):
    monkeypatch.setattr(memory, "multiprocessors", lambda: 2)
    targets = bell(32, 11, 18)
    assert np.array_equal(found(targets, 3, "mul1"), search(targets, 3, "mul1"))


@pytest.mark.parametrize(("length", "bits"), [(256, 3), (256, 6), (160, 2.5)])
def test_whole_rings_have_a_seam_of_their_own(length, bits):
    targets = bell(33, 1, length)
    assert np.array_equal(found(targets, bits, "mul1"), search(targets, bits, "mul1"))


@pytest.mark.parametrize("bits", [1.5, 2, 3.5, 6, 8])
def test_ties_and_far_targets_are_decided_as_on_the_cpu(bits):
    targets = np.zeros((4, 20), np.float32)
    targets[1] = 1e4
    targets[2, ::3] = -3e18
    targets[3] = np.float32(2**-140)
    assert np.array_equal(found(targets, bits, "mul1"), search(targets, bits, "mul1"))


def test_no_rings_are_no_work():
    assert found(np.zeros((0, 256), np.float32), 4, "mul1").shape == (0, 256)


@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("bits", WIDTHS)
def test_the_kernels_compile_for_hopper(bits):
    with kernels.rehearsal((9, 0)):
        search_cuda.search(torch.zeros(1, 32), bits, "mul1")
        workbench_cuda.GpuWorkbench().packed_tiles(torch.zeros((1, 256), dtype=torch.int16), bits)


@pytest.mark.parametrize("bits", WIDTHS)
def test_states_are_packed_as_on_the_cpu(bits):
    states = np.random.default_rng(34).integers(0, 1 << 16, (2, 3, 256)).astype(np.uint16)
    bench = GpuWorkbench()
    placed = bench.placed(states.view(np.int16))
    assert np.array_equal(bench.packed_tiles(placed, bits), trellis.pack_states(states, bits))
    if bits == int(bits):
        rings = np.ascontiguousarray(states[0, :, :160])
        packed = bench.packed_rings(bench.placed(rings.view(np.int16)), int(bits))
        assert np.array_equal(packed, trellis.pack_ring(rings, int(bits)))


@pytest.fixture
def cpu_search(monkeypatch) -> None:
    """The CPU's paths in place of the emulator's, which take too long for whole layers; on a GPU, the GPU's own."""
    if os.environ.get("ISOBIT_TEST_GPU") == "1":
        return

    def of_cpu(targets: Any, bits: float, codebook: str) -> Any:
        assert targets.dtype == torch.float32
        return torch.from_numpy(search(targets.numpy(), bits, codebook).view(np.int16))

    monkeypatch.setattr(workbench_cuda, "search", of_cpu)


def layer_bytes(linear: Exl3Linear) -> dict[str, bytes]:
    return {name: np.asarray(array).tobytes() for name, array in quantize.stored_tensors(linear).items()}


@pytest.mark.parametrize(
    ("at_once", "bits", "codebook"), [(1, 4, "mcg"), (1 << 23, 3.5, "mul1")], ids=["strip by strip", "whole"]
)
def test_a_layer_has_the_cpus_bytes(cpu_search, monkeypatch, at_once, bits, codebook):
    monkeypatch.setattr(GpuWorkbench, "weights_at_once", at_once)
    weight, bias = bell(35, 100, 200) * np.exp2(np.arange(200) / 16).astype(np.float32), bell(36, 100)
    weight[5:9] = 0
    weight[:, 130:140] = 0
    on_gpu, on_cpu = (
        layer_bytes(quantize.quantize_linear(weight, bits, codebook, name="a", bias=bias, bench=bench))
        for bench in (GpuWorkbench(), CpuWorkbench())
    )
    assert on_gpu == on_cpu


@pytest.mark.parametrize("bias", [None, bell(38, 3, 160).astype(np.float16)], ids=["plain", "centred"])
def test_ngram_rows_have_the_cpus_bytes(bias):
    rows = bell(39, 3, 160) * np.float32(0.05)
    rows[1] = 0
    rows[2, 7] = 3
    on_gpu, on_cpu = (quantize.quantize_ngram_rows(rows, 6, bias, bench=b) for b in (GpuWorkbench(), CpuWorkbench()))
    assert np.array_equal(on_gpu, on_cpu)


def test_embeddings_have_the_cpus_bytes(cpu_search):
    weight = bell(40, 5, 300)
    made = [quantize.quantize_embedding(weight, 5, name="e", bench=bench) for bench in (GpuWorkbench(), CpuWorkbench())]
    assert np.array_equal(made[0].trellis, made[1].trellis)
    assert np.array_equal(made[0].signs, made[1].signs)


def test_an_interrupted_conversion_goes_on_with_another_device(cpu_search, monkeypatch, tmp_path):
    source = write_source(tmp_path / "model", source_tensors(**SMALL), **SMALL)
    whole = convert(source, tmp_path / "whole", ConvertOptions(8))
    done = 0

    def stop_in_the_middle(weights: int, total: int) -> None:
        nonlocal done
        done = weights
        if weights > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "both", ConvertOptions(8), progress=stop_in_the_middle)
    assert done
    assert contents(convert(source, tmp_path / "both", ConvertOptions(8), device="cuda")) == contents(whole)


def convert_command(source: Path, target: Path, *arguments: str) -> Result:
    import typer

    from isobit.cli.convert import convert as command

    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(source), str(target), "--bits", "8", *arguments])


def test_the_command_writes_the_cpus_files(cpu_search, monkeypatch, tmp_path):
    monkeypatch.setattr("isobit.engine.placement.gpu_problem", lambda: None)
    changes = {**SMALL, "ple_layer_ids": [1]}
    source = write_source(tmp_path / "model", source_tensors(**changes), **changes)
    result = convert_command(source, tmp_path / "gpu", "--ngram-bits", "4")
    assert result.exit_code == 0, result.output
    assert "weights on the GPU: about" in result.output
    assert "small models" not in result.output
    on_cpu = convert(source, tmp_path / "cpu", ConvertOptions(8, ngram_bits=4), device="cpu")
    assert contents(tmp_path / "gpu") == contents(on_cpu)


def test_a_missing_gpu_is_one_line(monkeypatch, tmp_path):
    source = write_source(tmp_path / "model", source_tensors(**SMALL), **SMALL)
    monkeypatch.setattr("isobit.engine.placement.gpu_problem", lambda: "none is there")
    result = convert_command(source, tmp_path / "exl3", "--device", "cuda")
    assert isinstance(result.exception, IsobitError)
    assert str(result.exception) == "--device cuda: none is there"
    assert list(tmp_path.iterdir()) == [source]
    with pytest.raises(IsobitError, match="device is tpu"):
        workbench("tpu")


def test_too_little_memory_is_one_line(monkeypatch, tmp_path):
    def exhausted(*arguments: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(workbench_cuda, "search", exhausted)
    source = write_source(tmp_path / "model", source_tensors(**SMALL), **SMALL)
    with pytest.raises(DeviceError, match="too little free memory to quantize"):
        convert(source, tmp_path / "exl3", ConvertOptions(8), device="cuda")
    assert not (tmp_path / "exl3").exists()


def test_too_little_shared_memory_is_one_line(monkeypatch):
    monkeypatch.setattr(search_cuda, "_shared_bytes", lambda: 100 << 10)
    assert search_cuda.best_shape(3) == SearchShape((3, 3), 1, 2, False)
    with pytest.raises(DeviceError, match=r"at 1 bits needs 128 KiB.* have 97; use --device cpu"):
        search_cuda.best_shape(1)
