"""How a kernel's arguments lie in memory for a launch."""

import ctypes

import pytest

torch = pytest.importorskip("torch")

from isobit.cuda import kernels  # noqa: E402


def read(room: kernels.Arguments, *kinds: type) -> list:
    """What void*[n] points to, each as one of ctypes' kinds."""
    places = (ctypes.c_void_p * len(kinds)).from_address(room.address)
    return [kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)]


def test_every_argument_is_found_where_its_address_points():
    tensor = torch.zeros(4)
    given = (
        tensor,
        kernels.Constant(tensor),
        kernels.Settled(None),
        None,
        3,
        -1,
        True,
        2.5,
        -(2**40),
        kernels.Double(0.1),
    )
    room, _ = kernels.take_arguments(given)
    pointer, integer = ctypes.c_void_p, ctypes.c_int32
    kinds = pointer, pointer, pointer, pointer, integer, integer, integer, ctypes.c_float
    at = tensor.data_ptr()
    assert read(room, *kinds, ctypes.c_int64, ctypes.c_double) == [
        at, at, None, None, 3, -1, 1, 2.5, -(2**40), 0.1
    ]  # fmt: skip


def test_a_struct_lies_in_one_piece_between_its_neighbours():
    tensor = torch.zeros(4)
    fields = kernels.Fields(kernels.Constant(tensor), None, 7, tensor)
    room, _ = kernels.take_arguments((1, fields, 2))
    places = (ctypes.c_void_p * 3).from_address(room.address)
    at = tensor.data_ptr()
    assert list((ctypes.c_uint64 * 4).from_address(places[1])) == [at, 0, 7, at]
    assert [ctypes.c_int32.from_address(place).value for place in (places[0], places[2])] == [1, 2]


def test_launches_at_the_same_time_have_rooms_of_their_own():
    first, free = kernels.take_arguments((1, 2.0))
    second, _ = kernels.take_arguments((3, 4.0))
    assert first is not second
    free.append(first)
    third, _ = kernels.take_arguments((5, 6.0))
    assert third is first
    assert read(third, ctypes.c_int32, ctypes.c_float) == [5, 6.0]
    assert read(second, ctypes.c_int32, ctypes.c_float) == [3, 4.0]


def test_what_no_kernel_takes_is_refused():
    with pytest.raises(TypeError, match="takes no str"):
        kernels.take_arguments(("three",))
