"""Every kernel of the package compiles for every architecture that isobit supports; no GPU is needed."""

import sys
from unittest.mock import patch

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from isobit.checkpoint import search_cuda  # noqa: E402
from isobit.checkpoint.synth_memory import SyntheticCheckpoint  # noqa: E402
from isobit.checkpoint.workbench_cuda import GpuWorkbench  # noqa: E402
from isobit.contract.plans import together  # noqa: E402
from isobit.cuda import compile as compiler  # noqa: E402
from isobit.cuda import kernels, sources  # noqa: E402
from isobit.cuda.errors import DeviceError, KernelError  # noqa: E402
from isobit.model.drafting import propose_mtp  # noqa: E402
from isobit.model.load import load_model  # noqa: E402
from isobit.model.plan import Plan, Segment  # noqa: E402
from isobit.ops import load_ops  # noqa: E402
from isobit.ops.contract import registered  # noqa: E402
from isobit.ops.gated_residual import cuda as gated_residual  # noqa: E402
from isobit.ops.linear import cuda as linear  # noqa: E402
from isobit.ops.linear.contract import random_plain, random_trellis  # noqa: E402
from isobit.ops.sample import Draw  # noqa: E402

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
MANY_ROWS, SOME_ROWS, WINDOW_ROWS = 100, 40, 3
WIDE_INPUTS, WIDE_OUTPUTS = 256, 1024  # as many as give every warp of the emulator's multiprocessors its own
WIDE_ROWS = (1, 17)  # of the kernel that deals columns, and of the one whose warps have their own
DRAWS = (Draw(), Draw(temperature=0.0), Draw(top_k=5, top_p=0.9, min_p=0.1))


@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles(capability, monkeypatch):
    compiled: set[str] = set()
    binary = compiler.binary

    def noted(name: str, defines: dict[str, int], architecture: str) -> bytes:
        code = binary(name, defines, architecture)
        assert code[:4] == b"\x7fELF"
        compiled.add(name)
        return code

    monkeypatch.setattr(compiler, "binary", noted)
    kernels._kernel.cache_clear()  # what earlier tests compiled
    noted("cuda/probe.cu", {}, compiler.architecture_name(capability))
    with kernels.rehearsal(capability):
        run_model()
        run_layers()
        search_cuda.search(torch.zeros(1, 32), 3, "mul1")
        GpuWorkbench().packed_tiles(torch.zeros((1, 256), dtype=torch.int16), 3)
    assert compiled == {str(path.relative_to(sources.ROOT)) for path in sources.ROOT.rglob("*.cu")}


def run_model() -> None:
    """Prompts, a row, a window of drafts, draws and a proposal by the test preset."""
    model = load_model(SyntheticCheckpoint("test"), load_ops("cuda"), context=1024)
    state = model.new_state(slots=1, pages=8)
    stream = state.open()
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, MANY_ROWS).tolist()
    for rows in (MANY_ROWS, SOME_ROWS, 1):
        model.forward(state, Plan((Segment(stream, tuple(tokens[:rows]), "last"),)))
    window = Segment(stream, tuple(tokens[:WINDOW_ROWS]), "all", journal=True)
    logits = model.forward(state, Plan((window,)))
    state.settle(stream, WINDOW_ROWS)
    model.ops.sample(logits, DRAWS)
    model.ops.top_logprobs(logits[:1], 5)
    propose_mtp(model, state, [stream], [5], 1)


def run_layers() -> None:
    """Layers that the test preset lacks: as wide as a head, of float32 weights, a gated residual's whole."""
    rng = np.random.default_rng(2)
    linear.linear(torch.zeros(1, 64), linear.prepare_linear(random_plain(rng, 64, 64, "float32")))
    wide = linear.prepare_linear(random_trellis(rng, WIDE_INPUTS, WIDE_OUTPUTS, "mul1", 3))
    for rows in WIDE_ROWS:
        linear.linear(torch.zeros(rows, WIDE_INPUTS), wide)
    op = registered("cuda")["gated_read"]
    case = next(case for case in op.cases(rng, full=False) if case.label.endswith("halves, writes: True"))
    for implementation in op.implementations:
        op.call(implementation, case, op.begin(case), together(case)[0])
    op.call("few_rows", case, op.begin(case), together(case)[0][:1])
    for shape in gated_residual.DOWN_SHAPES:
        with patch.object(gated_residual, "down_shape", return_value=shape):
            op.call("many_rows", case, op.begin(case), together(case)[0])


@pytest.mark.usefixtures("cuda_compiler")
def test_kernels_that_racecheck_can_follow_are_kept_beside_the_others(monkeypatch, tmp_path):
    monkeypatch.setenv("ISOBIT_CUDA_CACHE", str(tmp_path))
    defines = {"CODEBOOK": 2, "TWICE_BITS": 8, "ROW_TILES": 1, "FUSED": 1, "SHARED_OPERAND": 1}
    usual = compiler.binary("ops/linear/few_rows.cu", defines, "sm_90a")
    monkeypatch.setenv(compiler.CHECKING_VARIABLE, "1")
    assert compiler.binary("ops/linear/few_rows.cu", defines, "sm_90a") != usual
    monkeypatch.delenv(compiler.CHECKING_VARIABLE)
    assert compiler.binary("ops/linear/few_rows.cu", defines, "sm_90a") == usual
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.usefixtures("cuda_compiler")
def test_a_complaint_names_the_source_and_the_error(monkeypatch):
    texts = {"bad.cu": "__device__ void f() { nothing; }"}
    monkeypatch.setattr(compiler.sources, "text", lambda name: texts.get(name, ""))
    with pytest.raises(KernelError, match=r"bad.cu .*does not compile for sm_90a: .*nothing"):
        compiler.binary("bad.cu", {}, "sm_90a")


@pytest.mark.usefixtures("cuda_compiler")
def test_a_missing_compiler_is_said_in_one_line(monkeypatch):
    from cuda.bindings import nvrtc

    def fail() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so.13"')

    monkeypatch.setattr(compiler, "_made", [])
    monkeypatch.setattr(nvrtc, "nvrtcVersion", fail)
    with pytest.raises(DeviceError, match="pip install nvidia-cuda-nvrtc"):
        compiler.check_installed()
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(DeviceError, match=r"pip install 'isobit\[cuda\]'"):
        compiler.check_installed()
