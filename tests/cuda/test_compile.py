"""Every kernel source compiles for every architecture that isobit supports; no GPU is needed."""

import pytest

from isobit.cuda import compile as compiler
from isobit.cuda.errors import KernelError

pytest.importorskip("cuda.core", reason="the extra 'cuda' is not installed")

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_dialect_compiles(capability):
    code = compiler.binary("cuda/probe.cu", {}, compiler.architecture_name(capability))
    assert code[:4] == b"\x7fELF"


def test_a_complaint_names_the_source_and_the_error(monkeypatch):
    texts = {"bad.cu": "__device__ void f() { nothing; }"}
    monkeypatch.setattr(compiler.sources, "text", lambda name: texts.get(name, ""))
    with pytest.raises(KernelError, match=r"bad.cu .*does not compile for sm_90a: .*nothing"):
        compiler.binary("bad.cu", {}, "sm_90a")
