"""Safetensors in and out: agreement with the safetensors package, and one clear error for each malformed file."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isobit.checkpoint import store as store_module
from isobit.checkpoint.store import HEADER_LIMIT, NUMPY_TYPES, TensorStore, TensorWriter, write_tensors
from isobit.errors import CheckpointError

DTYPES = [np.bool_, np.uint8, np.int8, np.int16, np.uint16, np.float16, np.int32, np.float32, np.int64, np.float64]


def raw_file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin, end, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def fill(seed, dtype, shape):
    rng = np.random.default_rng(seed)
    return (
        np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), np.uint8)
        .copy()
        .view(dtype)
        .reshape(shape)
        if dtype is not np.bool_
        else rng.integers(0, 2, shape).astype(bool)
    )


arrays_strategy = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12).filter(
        lambda name: name != "__metadata__"
    ),
    st.builds(
        fill,
        st.integers(0, 1 << 20),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrays=arrays_strategy)
def test_what_is_written_reads_back_here_and_in_the_safetensors_package(tmp_path, arrays):
    numpy_files = pytest.importorskip("safetensors.numpy")
    write_tensors(tmp_path / "a.safetensors", arrays)
    theirs = numpy_files.load_file(tmp_path / "a.safetensors")
    with TensorStore(tmp_path) as store:
        assert store.names == tuple(sorted(arrays))
        for name, array in arrays.items():
            for read in (theirs[name], store.read(name), store.map(name)):
                assert read.dtype == array.dtype
                assert read.shape == array.shape
                assert read.tobytes() == array.tobytes()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrays=arrays_strategy)
def test_files_of_the_safetensors_package_read_back(tmp_path, arrays):
    numpy_files = pytest.importorskip("safetensors.numpy")
    numpy_files.save_file(arrays, tmp_path / "a.safetensors", metadata={"format": "pt"})
    with TensorStore(tmp_path) as store:
        for name, array in arrays.items():
            assert store.read(name).tobytes() == array.tobytes()
            assert store.info(name).shape == array.shape


def test_bfloat16_is_held_as_uint16_and_written_as_bfloat16(tmp_path):
    bits = np.array([[0x3F80, 0xC000]], np.uint16)
    write_tensors(tmp_path / "a.safetensors", {"w": bits}, bfloat16=("w",))
    with TensorStore(tmp_path) as store:
        assert store.info("w").dtype == "BF16"
        np.testing.assert_array_equal(store.read("w"), bits)
    torch_files = pytest.importorskip("safetensors.torch")
    pytest.importorskip("torch")
    assert torch_files.load_file(tmp_path / "a.safetensors")["w"].tolist() == [[1.0, -2.0]]


def test_a_store_is_the_union_of_its_files_whatever_the_index_says(tmp_path):
    write_tensors(tmp_path / "a.safetensors", {"one": np.zeros(1, np.int16)})
    write_tensors(tmp_path / "b.safetensors", {"two": np.zeros(2, np.int16)})
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"three": "c.safetensors"}}')
    with TensorStore(tmp_path) as store:
        assert store.names == ("one", "two")
        assert "two" in store
        assert "three" not in store
        assert store.names_under("t") == ("two",)
        assert store.info("two").file.name == "b.safetensors"


def test_a_map_is_read_only_and_a_copy_is_not(tmp_path):
    values = np.arange(6, dtype=np.int16).reshape(2, 3)
    write_tensors(tmp_path / "a.safetensors", {"x": values})
    before = (tmp_path / "a.safetensors").read_bytes()
    store = TensorStore(tmp_path)
    mapped, copy = store.map("x"), store.read("x")
    with pytest.raises(ValueError):
        mapped[0, 0] = 9
    copy[0, 0] = 9
    assert copy.flags.owndata
    assert copy.flags.aligned
    store.close()
    np.testing.assert_array_equal(mapped, values)
    assert (tmp_path / "a.safetensors").read_bytes() == before
    with pytest.raises(CheckpointError, match="closed"):
        store.read("x")


def test_files_are_opened_once(tmp_path):
    write_tensors(tmp_path / "a.safetensors", {"x": np.arange(3, dtype=np.int16)})
    with TensorStore(tmp_path) as store:
        (tmp_path / "a.safetensors").unlink()
        assert store.read("x").tolist() == [0, 1, 2]
        assert store.map("x").tolist() == [0, 1, 2]


def test_rows_of_a_tensor_are_read_alone(tmp_path):
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    write_tensors(tmp_path / "a.safetensors", {"x": values})
    with TensorStore(tmp_path) as store:
        np.testing.assert_array_equal(store.read_rows("x", 2, 3), values.reshape(6, 4)[2:5])
        with pytest.raises(CheckpointError, match="has 6 rows"):
            store.read_rows("x", 4, 3)


MALFORMED = {
    "empty": (b"", "0 bytes, too few for a header"),
    "shorter than its length field": (b"\x05\x00", "2 bytes, too few"),
    "header longer than the file": (raw_file(b"{}", length=100), "truncated"),
    "header longer than the limit": (raw_file(b"{}", length=HEADER_LIMIT + 1), "expected at most"),
    "header length of 2^64 - 1": (b"\xff" * 8 + b"{}", "expected at most"),
    "no JSON": (raw_file(b"{hello}"), "not valid JSON"),
    "no UTF-8": (raw_file(b'{"\xff": 1}'), "not valid JSON"),
    "deeply nested": (raw_file(b"[" * 200_000), "not valid JSON"),
    "no object": (raw_file([1, 2]), "not a JSON object"),
    "a name twice": (raw_file(b'{"a": 1, "a": 2}'), "occurs twice"),
    "no shape": (raw_file({"a": {"dtype": "U8", "data_offsets": [0, 0]}}), "without dtype, shape"),
    "entry is a number": (raw_file({"a": 3}), "without dtype, shape"),
    "65 axes": (raw_file({"a": entry(0, 1, shape=[1] * 65)}, b"x"), "expected up to 64 sizes"),
    "unknown dtype": (raw_file({"a": entry(0, 1, "F4")}, b"x"), "unknown dtype 'F4'"),
    "dtype is a list": (raw_file({"a": entry(0, 1, ["U8"])}, b"x"), "unknown dtype"),
    "negative size": (raw_file({"a": entry(0, 1, shape=[-1])}, b"x"), "expected up to 64 sizes"),
    "fractional size": (raw_file({"a": entry(0, 1, shape=[1.0])}, b"x"), "expected up to 64 sizes"),
    "true as a size": (raw_file({"a": entry(0, 1, shape=[True])}, b"x"), "expected up to 64 sizes"),
    "offsets backwards": (raw_file({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 0]}}, b"x"), "data_offsets"),
    "three offsets": (raw_file({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"x"), "data_offsets"),
    "shape and offsets disagree": (raw_file({"a": entry(0, 3, "I16", [2])}, b"xyz"), "takes 4 bytes"),
    "huge shape": (raw_file({"a": entry(0, 1, shape=[1 << 62, 1 << 62])}, b"x"), "takes"),
    "overlap": (raw_file({"a": entry(0, 2), "b": entry(1, 3)}, b"xyz"), "a and b overlap"),
    "hole": (raw_file({"a": entry(0, 1), "b": entry(2, 3)}, b"xyz"), "nothing claims"),
    "data cut off": (raw_file({"a": entry(0, 4)}, b"xy"), "truncated"),
    "data left over": (raw_file({"a": entry(0, 1)}, b"xy"), "nothing claims"),
}


def test_a_pipe_or_folder_in_place_of_a_file_is_refused_without_waiting(tmp_path):
    for make in (os.mkfifo, os.mkdir):
        path = tmp_path / f"{make.__name__}.safetensors"
        make(path)
        with pytest.raises(CheckpointError, match="is no regular file"):
            TensorStore(tmp_path)
        path.rename(tmp_path / make.__name__)


def test_a_long_wrong_shape_is_cut_in_the_message(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(raw_file({"a": entry(0, 1, shape=[1] * 100_000)}, b"x"))
    with pytest.raises(CheckpointError) as caught:
        TensorStore(tmp_path)
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_by_name(tmp_path, case):
    content, problem = MALFORMED[case]
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        TensorStore(tmp_path)
    message = str(caught.value)
    assert problem in message
    assert "bad.safetensors" in message
    assert "\n" not in message


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_or_changed_anywhere_is_refused_or_reads_its_declared_sizes(tmp_path, data):
    write_tensors(tmp_path / "a.safetensors", {"x": np.arange(5, dtype=np.int16), "y": np.zeros((2, 2), np.float32)})
    content = bytearray((tmp_path / "a.safetensors").read_bytes())
    if data.draw(st.booleans(), label="cut"):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
        (tmp_path / "a.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError):
            TensorStore(tmp_path)
        return
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "a.safetensors").write_bytes(content)
    try:
        store = TensorStore(tmp_path)
    except CheckpointError:
        return
    with store:
        for name in store.names:
            assert store.read(name).nbytes == store.info(name).nbytes


def test_a_folder_that_is_missing_or_empty_or_a_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        TensorStore(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no \*.safetensors files"):
        TensorStore(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is not a folder"):
        TensorStore(tmp_path / "file")


def test_a_name_in_two_files_is_refused_with_both_names(tmp_path):
    write_tensors(tmp_path / "a.safetensors", {"x": np.zeros(1, np.int16)})
    write_tensors(tmp_path / "b.safetensors", {"x": np.zeros(1, np.int16)})
    with pytest.raises(CheckpointError, match=r"x is in both a\.safetensors and b\.safetensors"):
        TensorStore(tmp_path)


def test_an_unknown_tensor_is_named(tmp_path):
    write_tensors(tmp_path / "a.safetensors", {"x": np.zeros(1, np.int16)})
    with TensorStore(tmp_path) as store, pytest.raises(CheckpointError, match="no tensor nothing"):
        store.read("nothing")


def test_pieces_and_order_do_not_change_the_bytes(tmp_path):
    table, other = np.arange(700, dtype=np.int16).reshape(100, 7), np.ones(3, np.float32)
    write_tensors(tmp_path / "whole.safetensors", {"table": table, "other": other})
    declared = {"other": ("F32", (3,)), "table": ("I16", (100, 7))}
    with TensorWriter(tmp_path / "pieces.safetensors", declared) as writer:
        for first in range(0, 100, 33):
            writer.append("table", table[first : first + 33])
            if first == 33:
                writer.write("other", other)
    assert (tmp_path / "pieces.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_tensors_lie_aligned_to_their_items(tmp_path):
    arrays = {"a": np.zeros(3, np.int8), "b": np.zeros(3, np.int64), "c": np.zeros(1, np.float16)}
    write_tensors(tmp_path / "a.safetensors", arrays)
    with TensorStore(tmp_path) as store:
        for name in arrays:
            assert store.info(name).offset % NUMPY_TYPES[store.info(name).dtype].itemsize == 0
            assert store.map(name).flags.aligned


def test_a_writer_that_fails_leaves_nothing_and_keeps_what_was_there(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"x": np.zeros(1, np.int16)})
    before = path.read_bytes()

    def write_half():
        with TensorWriter(path, {"x": ("I16", (2,))}) as writer:
            writer.append("x", np.zeros(1, np.int16))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert path.read_bytes() == before


def test_a_file_appears_only_when_it_is_whole(tmp_path):
    writer = TensorWriter(tmp_path / "a.safetensors", {"x": ("I16", (2,))})
    writer.append("x", np.zeros(2, np.int16))
    assert not (tmp_path / "a.safetensors").exists()
    assert not list(tmp_path.glob("*.safetensors"))
    writer.commit()
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        (lambda writer: None, "not fully written"),
        (lambda writer: writer.write("y", np.zeros(2, np.int16)), "not declared"),
        (lambda writer: writer.write("x", np.zeros(2, np.int32)), "got int32 data, declared as I16"),
        (lambda writer: writer.write("x", np.zeros((2, 1), np.int16)), "has shape"),
        (lambda writer: writer.append("x", np.zeros(3, np.int16)), "more data"),
        (lambda writer: [writer.append("x", np.zeros(1, np.int16)), writer.write("x", np.zeros(2, np.int16))], "begun"),
        (lambda writer: writer.append("x", np.zeros(1, np.int16)), "not fully written"),
    ],
)
def test_misuse_of_a_writer_is_named_and_leaves_nothing(tmp_path, use, problem):
    with (
        pytest.raises(CheckpointError, match=problem),
        TensorWriter(tmp_path / "a.safetensors", {"x": ("I16", (2,))}) as writer,
    ):
        use(writer)
    assert os.listdir(tmp_path) == []


def test_declarations_are_checked(tmp_path):
    with pytest.raises(CheckpointError, match="declared as F4"):
        TensorWriter(tmp_path / "a.safetensors", {"x": ("F4", (2,))})
    with pytest.raises(CheckpointError, match="shape"):
        TensorWriter(tmp_path / "a.safetensors", {"x": ("F32", (-2,))})
    with pytest.raises(CheckpointError, match="more than its disk has free"):
        TensorWriter(tmp_path / "a.safetensors", {"x": ("F32", (1 << 50,))})
    with pytest.raises(CheckpointError, match="cannot be written"):
        TensorWriter(tmp_path / "nowhere" / "a.safetensors", {"x": ("F32", (1,))})
    with pytest.raises(CheckpointError, match="cannot hold complex64"):
        write_tensors(tmp_path / "a.safetensors", {"x": np.zeros(1, np.complex64)})
    assert os.listdir(tmp_path) == []


def test_noncontiguous_data_are_written_in_row_major_order(tmp_path):
    values = np.arange(12, dtype=np.int16).reshape(3, 4).T
    write_tensors(tmp_path / "a.safetensors", {"x": values})
    with TensorStore(tmp_path) as store:
        np.testing.assert_array_equal(store.read("x"), values)


@pytest.fixture
def three_files(tmp_path):
    """A folder of tensors of many sizes, the last of a file often empty or odd."""
    arrays = {}
    for number in range(3):
        sizes = {f"{number}.{place}": 7 * place for place in range(9)} | {f"{number}.large": 1000}
        arrays |= {name: fill(number, np.uint8, (size,)) for name, size in sizes.items()}
        arrays[f"{number}.wide"] = fill(number, np.float32, (3, 5))
        mine = {name: array for name, array in arrays.items() if name.startswith(f"{number}.")}
        write_tensors(tmp_path / f"{number}.safetensors", mine)
    return tmp_path, arrays


@pytest.mark.parametrize(("run_bytes", "run_tensors"), [(64, 512), (64, 2), (1 << 20, 512)])
@pytest.mark.parametrize("in_block", [False, True])
def test_fetched_tensors_are_what_reading_gives(three_files, monkeypatch, run_bytes, run_tensors, in_block):
    monkeypatch.setattr(store_module, "RUN_BYTES", run_bytes)
    monkeypatch.setattr(store_module, "RUN_TENSORS", run_tensors)
    folder, arrays = three_files
    with TensorStore(folder) as store, ThreadPoolExecutor(3) as threads:
        names = [name for name in arrays if not name.endswith(".3")]
        block = np.full(store.block_bytes(names), 0xA5, np.uint8) if in_block else None
        store.fetch(names, threads.map, block)
        assert not store.map("1.wide").flags.writeable
        for name, expected in arrays.items():
            array = store.read(name)
            assert array.tobytes() == expected.tobytes()
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            assert array.flags.writeable
            assert array.flags.aligned
            in_it = in_block and name in names and array.nbytes > 0 and name != "1.wide"
            assert (block is not None and np.shares_memory(array, block)) == in_it


def test_neighbours_are_fetched_in_one_call_and_given_away_once(three_files, monkeypatch):
    folder, arrays = three_files
    calls, read = [], os.preadv
    with TensorStore(folder) as store:
        monkeypatch.setattr(os, "preadv", lambda *arguments: calls.append(arguments) or read(*arguments))
        store.fetch(arrays, map)
        assert len(calls) == 3
        first, again = store.read("0.large"), store.read("0.large")
        assert len(calls) == 4
        assert not np.shares_memory(first, again)
        store.drop_fetched()
        store.read("0.8")
        assert len(calls) == 5


@pytest.mark.parametrize("most", [1, 5, 100])
def test_reads_that_give_less_than_asked_go_on(three_files, monkeypatch, most):
    def short(descriptor, targets, offset):
        left, cut = most, []
        for target in targets:
            cut.append(target[:left])
            left -= len(cut[-1])
        return read(descriptor, cut, offset)

    folder, arrays = three_files
    read = os.preadv
    monkeypatch.setattr(os, "preadv", short)
    with TensorStore(folder) as store:
        store.fetch(arrays, map)
        for name, expected in arrays.items():
            assert store.read(name).tobytes() == expected.tobytes()


def test_a_file_that_became_shorter_is_told_when_fetched(three_files):
    folder, arrays = three_files
    with TensorStore(folder) as store:
        end = (folder / "1.safetensors").stat().st_size - 100
        os.truncate(folder / "1.safetensors", end)
        with pytest.raises(CheckpointError, match=rf"1\.safetensors is truncated: it ends at byte {end};"):
            store.fetch(arrays, map)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's list of open files")
def test_maps_outlive_the_store_and_close_their_files_in_the_end(three_files):
    folder, arrays = three_files
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with TensorStore(folder) as store:
            assert store.mapped_files == ()
            views = {name: store.map(name) for name in arrays}
            files = store.mapped_files
        assert len(files) == 3
        for file in files:
            file.check()
        for name, view in views.items():
            assert view.tobytes() == arrays[name].tobytes()
        del views, files, file, view, store
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_the_system_no_longer_tells_of_is_named(three_files, monkeypatch):
    folder, arrays = three_files
    with TensorStore(folder) as store:
        store.map(max(arrays, key=lambda name: arrays[name].nbytes))
        (file,) = store.mapped_files
        monkeypatch.setattr(os, "stat", stale)
        with pytest.raises(CheckpointError, match=rf"{file.path}: cannot be read any more \(Stale file handle\)"):
            file.check()


def stale(file):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
