"""A reply's text never shows a stop string, and never depends on the pieces it came in."""

from hypothesis import given
from hypothesis import strategies as st

from isobit.serve.text import ReplyText, StopMatcher
from tests.serve.fake_engine import END, ByteDecoder

letters = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def read(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.finish(), matcher.matched


def cut_plainly(text: str, stops: list[str]) -> str:
    """The definition: the shortest beginning that ends with a stop string is cut before the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(letters, stop_lists)
def test_the_text_is_cut_before_the_first_stop_string(text, stops):
    assert read([text], stops)[0] == cut_plainly(text, stops)


@given(st.lists(letters, max_size=8), stop_lists)
def test_pieces_do_not_matter(pieces, stops):
    assert read(pieces, stops) == read(list("".join(pieces)), stops)


@given(st.lists(letters, max_size=8), stop_lists)
def test_released_text_is_never_taken_back(pieces, stops):
    matcher = StopMatcher(stops)
    whole = cut_plainly("".join(pieces), stops)
    text = ""
    for piece in pieces:
        text += matcher.push(piece)
        assert whole.startswith(text)


def test_text_that_may_begin_a_stop_string_is_held_back():
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("say E", "N", "S", " EN")] == ["say ", "", "ENS", " "]
    assert matcher.finish() == "EN"


def reply(tokens: list[int], stops: list[str]) -> tuple[str, bool]:
    text = ReplyText(ByteDecoder(), frozenset({END, 33}), stops)
    pieces = [text.push(token) for token in tokens]
    return "".join(pieces) + text.finish(), text.stopped


def test_a_stop_token_has_no_text():
    assert reply([*b"hi", 33, END], []) == ("hi", False)


def test_a_stop_string_may_begin_inside_the_bytes_of_a_character():
    assert reply(list("a é b".encode()), ["é "]) == ("a ", True)


def test_an_unfinished_character_at_the_end_is_replaced():
    assert reply([*b"a", 0xC3], []) == ("a\ufffd", False)


def test_an_unfinished_character_at_the_end_may_complete_a_stop_string():
    assert reply([*b"a", 0xC3], ["\ufffd"]) == ("a", True)
