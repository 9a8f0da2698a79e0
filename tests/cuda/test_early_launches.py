"""How a kernel is launched on a GPU: early in graphs only, and only where it says that it awaits its inputs."""

from unittest.mock import patch

import pytest

driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda.bindings: pip install 'isobit[cuda]'")
pytest.importorskip("torch", reason="needs PyTorch: pip install 'isobit[cuda]'")

from isobit.cuda import kernels  # noqa: E402

STREAM = 77


class FakeDriver:
    """The driver's types, and launches that are only noted."""

    def __init__(self) -> None:
        self.launches: list[tuple] = []

    def __getattr__(self, name: str):
        return getattr(driver, name)

    def cuLaunchKernel(self, function, *sizes_and_rest) -> tuple:
        assert function == "late"
        self.launches.append(("late", sizes_and_rest[:6], sizes_and_rest[6], sizes_and_rest[7]))
        return (0,)

    def cuLaunchKernelEx(self, config, function, arguments, extra) -> tuple:
        assert function == "early"
        (attribute,) = config.attrs
        assert config.numAttrs == 1
        assert attribute.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert attribute.value.programmaticStreamSerializationAllowed == 1
        sizes = config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.blockDimY, config.blockDimZ
        self.launches.append(("early", sizes, config.sharedMemBytes, int(config.hStream)))
        return (0,)


def launched(early: bool, capturing: bool, able: bool = True, allowed: bool = True) -> tuple:
    """What the driver is asked for."""
    kernel = object.__new__(kernels._GpuKernel)
    fake = FakeDriver()
    kernel._driver, kernel._name = fake, "kernel"
    kernel._late, kernel._early = (kernels._Function(None, handle, 1 << 14) for handle in ("late", "early"))
    kernel._stream, kernel._is_capturing = lambda: STREAM, lambda: capturing
    kernel._can_be_early = able
    with patch.object(kernels, "EARLY_IN_GRAPHS", allowed):
        kernel((5, 4), 96, 1, 2.0, None, shared=1024, early=early)
    (launch,) = fake.launches
    return launch


def test_an_early_kernel_of_a_graph_may_begin_before_the_one_before_has_ended():
    assert launched(early=True, capturing=True) == ("early", (5, 4, 1, 96, 1, 1), 1024, STREAM)


@pytest.mark.parametrize(
    ("early", "capturing", "able"), [(True, False, True), (False, True, True), (True, True, False)]
)
def test_other_launches_wait_for_the_one_before(early, capturing, able):
    assert launched(early, capturing, able) == ("late", (5, 4, 1, 96, 1, 1), 1024, STREAM)


def test_no_kernel_begins_early_where_none_may():
    assert launched(early=True, capturing=True, allowed=False)[0] == "late"
