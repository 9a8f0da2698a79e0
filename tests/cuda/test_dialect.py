"""The kernels' dialect: the same bits as the CPU's scalar functions, and an emulator that sees wrong uses."""

import numpy as np
import pytest
from numba import njit

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'isobit[cuda]'")

from isobit.cuda import kernels, memory, sources, store  # noqa: E402
from isobit.cuda.errors import KernelError  # noqa: E402
from isobit.ops import scalar  # noqa: E402
from tests.ops.tensor_core import in_steps, need_known_steps  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulated_cuda")

PROBE = "cuda/probe.cu"
FUNCTIONS = (scalar.exp32, scalar.sigmoid32, scalar.silu32, scalar.softplus32, scalar.rsqrt32, scalar.round_to_half)


@njit
def cpu_scalars(x, y):
    for i in range(x.size):
        y[i, 0] = scalar.exp32(x[i])
        y[i, 1] = scalar.sigmoid32(x[i])
        y[i, 2] = scalar.silu32(x[i])
        y[i, 3] = scalar.softplus32(x[i])
        y[i, 4] = scalar.rsqrt32(x[i])
        y[i, 5] = scalar.round_to_half(x[i])


@njit
def cpu_doubles(x, y):
    for i in range(x.size):
        y[i, 0] = scalar.exp64(x[i])
        y[i, 1] = scalar.log64(x[i])


def awkward_floats() -> np.ndarray:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = rng.normal(0, 30, 20_000).astype(np.float32)
    edges = np.array(
        [0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 88.8, -103.9, -104.1, 120, -120, 65504, 65520], np.float32
    )
    return np.concatenate([bits[~np.isnan(bits)], near, edges])


def same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), nan)
    whole = np.uint32 if found.dtype == np.float32 else np.uint64
    assert np.array_equal(found.view(whole)[~nan], expected.view(whole)[~nan])


def test_scalar_functions_have_the_cpus_bits():
    x = awkward_floats()
    expected = np.empty((x.size, 6), np.float32)
    cpu_scalars(x, expected)
    y = memory.empty((x.size, 6))
    kernels.load(PROBE, "scalars")(-(-x.size // 256), 256, memory.to_device(x), y, x.size)
    same_bits(memory.to_host(y), expected)


def test_double_functions_have_the_cpus_bits():
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(0, 200, 5000), np.exp(rng.normal(0, 200, 5000)), [0, -1, np.inf, 5e-324]])
    expected = np.empty((x.size, 2))
    cpu_doubles(x, expected)
    y = memory.empty((x.size, 2), torch.float64)
    kernels.load(PROBE, "doubles")(-(-x.size // 256), 256, memory.to_device(x), y, x.size)
    same_bits(memory.to_host(y), expected)


def test_the_lane_sum_adds_in_halves():
    x = np.random.default_rng(2).normal(size=(9, 32)).astype(np.float32)
    y = memory.empty((9, 32))
    kernels.load(PROBE, "sums")(9, 32, memory.to_device(x), y)
    expected = x.copy()
    for half in (16, 8, 4, 2, 1):
        expected = expected[:, :half] + expected[:, half : 2 * half]
    same_bits(memory.to_host(y), np.broadcast_to(expected, (9, 32)).copy())


def test_matrix_loads_and_products_follow_the_fragment_layout():
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 9, (rows, 16)).astype(np.float16) for rows in (16, 8))
    c = memory.empty((16, 8))
    kernels.load(PROBE, "product")(1, 32, memory.to_device(a), memory.to_device(b), c)
    assert np.array_equal(memory.to_host(c), a.astype(np.float32) @ b.astype(np.float32).T)


@pytest.mark.parametrize("spread", [0, 4, 9])
def test_a_step_adds_as_is_defined(spread):
    """spread: how many powers of 2 the factors' sizes lie up and down from 1, at most."""
    need_known_steps()
    rng = np.random.default_rng(spread)
    kernel, c = kernels.load(PROBE, "product"), memory.empty((16, 8))

    def halves(rows: int) -> np.ndarray:
        sizes = np.exp2(rng.integers(-spread, spread + 1, (rows, 16)))
        return (rng.standard_normal((rows, 16)) * sizes).astype(np.float16)

    for _ in range(20):
        a, b = halves(16), halves(8)
        kernel(1, 32, memory.to_device(a), memory.to_device(b), c)
        same_bits(memory.to_host(c), in_steps(a.astype(np.float32), b.astype(np.float32).T))


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("early_exit", "left the kernel"),
        ("lost_barrier", "never reach|left"),
        ("waits_out_of_turn", "waits for a pass before the one before it"),
        ("reads_past_the_end", "shared memory is used past its end"),
    ],
)
def test_wrong_uses_are_errors(kernel, message):
    if not memory.is_emulated():
        pytest.skip("a GPU does not see wrong uses")
    with pytest.raises(KernelError, match=message):
        kernels.load(PROBE, kernel)(1, 64, memory.empty((64,)), shared=128)


def test_warps_fall_behind_each_other():
    if not memory.is_emulated():
        pytest.skip("a GPU's warps need not")
    y = memory.zeros((64,))
    kernels.load(PROBE, "races")(64, 64, y, shared=4)
    seen = memory.to_host(y) == 1.0
    assert seen.any()
    assert not seen.all()


def early_sum(kernel: str, blocks: int = 1) -> np.ndarray:
    constant, x, y = memory.to_device(np.ones(32, np.float32)), memory.zeros((32,)), memory.zeros((32,))
    kernels.load(PROBE, kernel)(blocks, 32, kernels.Constant(constant), x, y, early=True)
    return memory.to_host(y)


def test_an_early_kernel_reads_constants_before_it_awaits_its_inputs():
    same_bits(early_sum("awaits", blocks=2), np.ones(32, np.float32))


@pytest.mark.parametrize("kernel", ["reads_too_soon", "writes_too_soon"])
def test_what_an_early_kernel_does_too_soon_changes_what_it_gives(kernel):
    if not memory.is_emulated():
        pytest.skip("a GPU does it or not, as time has it")
    assert not np.array_equal(early_sum(kernel), np.ones(32, np.float32))


def test_an_early_kernel_awaits_its_inputs_in_every_block():
    if not memory.is_emulated():
        pytest.skip("a GPU does not see wrong uses")
    early_sum("never_awaits")
    with pytest.raises(KernelError, match="before it awaited its inputs"):
        early_sum("never_awaits", blocks=2)


def test_a_source_that_does_not_compile_names_its_first_error(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOBIT_CUDA_CACHE", str(tmp_path))
    (tmp_path / "bad.cu").write_text('#include "device.cuh"\nextern "C" __global__ void bad() { no_such_thing(); }\n')
    monkeypatch.setattr(sources, "text", lambda name: (tmp_path / "bad.cu").read_text() if name == "bad.cu" else "")
    monkeypatch.setattr(sources, "included", lambda name: (name,))
    with pytest.raises(KernelError, match=r"bad\.cu.*does not compile"):
        kernels.load("bad.cu", "bad")(1, 32)


def test_the_digest_changes_with_an_included_file(monkeypatch):
    before = sources.digest(PROBE)
    original = sources.text
    monkeypatch.setattr(sources, "text", lambda name: original(name) + ("//" if name == "cuda/functions.cuh" else ""))
    assert "cuda/functions.cuh" in sources.included(PROBE)
    assert sources.digest(PROBE) != before


class TestStore:
    def test_a_binary_comes_back(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ISOBIT_CUDA_CACHE", str(tmp_path / "new"))
        store.write("a", b"code")
        assert store.read("a") == b"code"
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["a"]

    @pytest.mark.parametrize("damage", [lambda body: body[:-1], lambda body: b"", lambda body: body[:-1] + b"x"])
    def test_a_damaged_binary_counts_as_none(self, tmp_path, monkeypatch, damage):
        monkeypatch.setenv("ISOBIT_CUDA_CACHE", str(tmp_path))
        store.write("a", b"code")
        (tmp_path / "a").write_bytes(damage((tmp_path / "a").read_bytes()))
        assert store.read("a") is None

    def test_a_folder_that_cannot_be_made_is_bypassed(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("ISOBIT_CUDA_CACHE", str(tmp_path / "file" / "cache"))
        store.write("a", b"code")
        assert store.read("a") is None
