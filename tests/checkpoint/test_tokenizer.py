"""The tokenizer against Hugging Face's own code and against plain UTF-8, and what it refuses."""

import json
import os
import shutil
from datetime import datetime
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from isobit.checkpoint.synth_text import ADDED_IDS, text_files
from isobit.checkpoint.tokenizer import FIRST_BORDERS, LAST_BORDERS, Tokenizer
from isobit.errors import CheckpointError, RequestError

CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é <|im_end|> ü"}],
    "turns": [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and\n\n3?"},
    ],
    "tool results": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bühl <&>"}}},
                {"id": "b", "type": "function", "function": {"name": "time", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
        {"role": "assistant", "reasoning_content": "hm", "content": "It rains."},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def tokenizer(test_checkpoint) -> Tokenizer:
    return Tokenizer(test_checkpoint)


@pytest.fixture
def folder(tmp_path, test_checkpoint) -> Path:
    """A folder of its own with the text files of a checkpoint, to break."""
    for name in (*text_files(), "config.json"):
        shutil.copy(test_checkpoint / name, tmp_path / name)
    return tmp_path


@pytest.fixture(scope="module")
def merged(tmp_path_factory) -> Path:
    """A tokenizer of Qwen's structure with merges: NFC, a splitting pattern, byte-level BPE, added tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    pattern = tokenizers.Regex(r"\p{N}|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+| ?[^\s\p{L}\p{N}]+|\s+")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=byte_level.alphabet(), show_progress=False)
    made.train_from_iterator([Path(__file__).read_text(encoding="utf-8"), "süß Größe 日本語 日本 😀😀"], trainer)
    made.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    made.add_tokens(["<think>", "naïve token"])
    folder = tmp_path_factory.mktemp("merged")
    made.enable_truncation(5)
    made.enable_padding(length=50)
    made.save(str(folder / "tokenizer.json"))
    return folder


@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_text_survives_the_way_to_tokens_and_back(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokens == list(text.encode())


@given(tokens=st.lists(st.integers(-3, 500), max_size=60))
@settings(max_examples=300, deadline=None)
def test_detokenizer_equals_decoding_at_once(tokenizer, tokens):
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token) for token in tokens]
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(tokens)


@given(text=st.text(alphabet=st.characters(min_codepoint=0x20, exclude_categories=["Cs"], exclude_characters="�")))
@settings(max_examples=200, deadline=None)
def test_detokenizer_never_splits_a_character(tokenizer, text):
    detokenizer = tokenizer.detokenizer()
    shown = ""
    for token in tokenizer.encode(text):
        shown += detokenizer.push(token)
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.finish() == ""


def test_an_unfinished_character_shows_at_the_end(tokenizer):
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(byte) for byte in "😀".encode()[:3]] == ["", "", ""]
    assert detokenizer.finish() == "�"


def test_special_and_unknown_tokens_have_no_bytes(tokenizer):
    assert tokenizer.special_ids == {ADDED_IDS[t] for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}
    for token in (*tokenizer.special_ids, 265, 383, 248319, -1, 1 << 40):
        assert tokenizer.token_bytes(token) == b""
    assert tokenizer.token_bytes(ADDED_IDS["<think>"]) == b"<think>"
    assert [tokenizer.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_spelled_out_special_tokens_become_tokens(tokenizer):
    assert tokenizer.encode("a<|im_end|><think>b") == [97, ADDED_IDS["<|im_end|>"], ADDED_IDS["<think>"], 98]


def test_stop_ids_are_the_generation_configs_and_the_tokenizers(folder):
    assert Tokenizer(folder).stop_ids == {ADDED_IDS["<|im_end|>"], ADDED_IDS["<|endoftext|>"]}
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer(folder).stop_ids == {ADDED_IDS["<|endoftext|>"]}


@given(text=st.text(max_size=30) | st.text(alphabet="Größe süß 日本語😀e\u0301 \n<think>", max_size=30))
@settings(max_examples=100, deadline=None)
def test_merged_tokens_are_those_of_the_tokenizers_library(merged, text):
    ours = Tokenizer(merged)
    library = tokenizers.Tokenizer.from_file(str(merged / "tokenizer.json"))
    library.no_padding()
    library.no_truncation()
    tokens = ours.encode(text)
    assert tokens == library.encode(text).ids
    assert ours.decode(tokens) == library.decode(tokens)


def test_added_tokens_keep_characters_beyond_ascii(merged):
    ours = Tokenizer(merged)
    (token,) = ours.encode("naïve token")
    assert ours.token_bytes(token) == "naïve token".encode()


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_chat_is_what_transformers_makes_of_the_template(tokenizer, messages, tools):
    transformers = pytest.importorskip("transformers", reason="the fidelity extra is not installed")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer.folder)
    for options in ({}, {"add_generation_prompt": False}, {"enable_thinking": False}):
        expected = theirs.apply_chat_template(
            messages, tools=tools, tokenize=False, **({"add_generation_prompt": True} | options)
        )
        assert tokenizer.render(messages, tools, **options) == expected
        assert tokenizer.chat(messages, tools, **options) == theirs(expected, add_special_tokens=False).input_ids


def test_the_synthetic_template_is_chatml(tokenizer):
    assert tokenizer.render(CONVERSATIONS["turns"]) == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nand\n\n3?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tokens = tokenizer.chat(CONVERSATIONS["one turn"])
    assert tokens[0] == ADDED_IDS["<|im_start|>"]
    assert tokens.count(ADDED_IDS["<|im_end|>"]) == 1


def borders_by_tokens(tokenizer, messages, tools, ids) -> tuple[int, ...]:
    """The ends of messages by encoding every beginning of the conversation."""
    parts = [tokenizer.chat(messages[:count], tools, add_generation_prompt=False) for count in range(len(messages) + 1)]
    return tuple(sorted({len(part) for part in parts if part and part == ids[: len(part)] and part != ids}))


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_borders_are_where_messages_end(tokenizer, messages, tools):
    ids, borders = tokenizer.chat_with_borders(messages, tools)
    assert ids == tokenizer.chat(messages, tools)
    assert borders == borders_by_tokens(tokenizer, messages, tools, ids)
    assert len(borders) >= len(messages) - 2


def test_borders_of_a_long_conversation_are_the_first_and_the_last(tokenizer):
    turns = [{"role": "user", "content": str(turn)} for turn in range(60)]
    ids, borders = tokenizer.chat_with_borders(turns)
    every = borders_by_tokens(tokenizer, turns, None, ids)
    assert borders == every[:FIRST_BORDERS] + every[-LAST_BORDERS:]


def test_a_template_that_wants_a_user_still_shows_where_the_system_message_ends(folder):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' + m.content }}{% endfor %}"
        "{% if not messages or messages[-1].role != 'user' %}{{ raise_exception('no user') }}{% endif %}"
    )
    tokenizer = use_template(folder, template)
    ids, borders = tokenizer.chat_with_borders(CONVERSATIONS["system"])
    assert [tokenizer.decode(ids[:border]) for border in borders] == ["system:Be brief.user:"]


def test_a_border_within_a_token_is_left_out(merged, folder):
    shutil.copy(merged / "tokenizer.json", folder)
    tokenizer = use_template(folder, "{% for m in messages %}{{ m.content }}{% endfor %}")
    ids, borders = tokenizer.chat_with_borders([{"role": "user", "content": text} for text in ("x", "na", "ïve token")])
    assert [tokenizer.decode(ids[:border]) for border in borders] == ["x"]


def test_text_parts_are_joined(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b\n"}]
    expected = tokenizer.chat([{"role": "user", "content": "ab\n"}])
    assert tokenizer.chat([{"role": "user", "content": parts}]) == expected


def test_arguments_of_calls_may_be_json_text(tokenizer):
    messages = CONVERSATIONS["tool results"]
    as_text = json.loads(json.dumps(messages))
    for call in as_text[2]["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    assert tokenizer.chat(as_text) == tokenizer.chat(messages)
    assert isinstance(as_text[2]["tool_calls"][0]["function"]["arguments"], str)


def call_with(arguments: object) -> list[dict]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


REFUSED = {
    "image": (
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
        r"messages\[0\].content\[1\] is of type 'image_url'; isobit takes text parts only",
    ),
    "string part": ([{"role": "user", "content": ["x"]}], "is of type 'str'"),
    "part without text": ([{"role": "user", "content": [{"type": "text"}]}], "no string in its field text"),
    "number": ([{"role": "user", "content": 3}], "content is int, expected a string or a list of text parts"),
    "role": ([{"role": "wizard", "content": "x"}], 'Unknown role "wizard"'),
    "late system": ([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], "must come first"),
    "arguments": (call_with("{"), "arguments that are not valid JSON"),
    "argument list": (call_with("[1]"), "arguments that are no JSON object"),
    "call": ([{"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}], "call without a function"),
    "surrogate": ([{"role": "user", "content": "x\ud83d"}], "half of a surrogate pair"),
}


@pytest.mark.parametrize(("messages", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_chat_cannot_hold_is_refused_by_name(tokenizer, messages, message):
    with pytest.raises(RequestError, match=message) as caught:
        tokenizer.chat(messages)
    assert "\n" not in str(caught.value)


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(RequestError, match="half of a surrogate pair at character 2"):
        tokenizer.encode("ab\udc00")


def use_template(folder: Path, template: object) -> Tokenizer:
    """The folder's tokenizer with a template of its own in tokenizer_config.json."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return Tokenizer(folder)


def test_a_template_sees_what_hugging_face_gives_it(folder):
    template = (
        "{{ eos_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
        "{{ tools is none }}{{ documents is none }}{{ flavour }}\n"
        "   {% if add_generation_prompt %}\n{{ {'a': '<é>'} | tojson }}{{ strftime_now('%Y') }}\n   {% endif %}\n"
    )
    tokenizer = use_template(folder, template)
    messages = [{"role": "user", "content": text} for text in "xyz"]
    expected = f'<|im_end|>xyTrueTruesweet\n{{"a": "<é>"}}{datetime.now():%Y}\n'
    assert tokenizer.render(messages, flavour="sweet") == expected


def test_named_templates(folder):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = use_template(folder, named)
    assert (tokenizer.render([]), tokenizer.render([], TOOLS)) == ("D", "T")
    assert use_template(folder, named[:1]).render([], TOOLS) == "D"


def test_the_template_file_goes_before_the_config(folder):
    use_template(folder, "from the config")
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer(folder).render([]) == "from the file"


ESCAPES = {
    "attributes": "{{ ''.__class__.__mro__ }}",
    "change": "{{ messages.append(1) }}",
    "undefined": "{{ nothing.at.all }}",
    "python error": "{{ 1 / 0 }}",
    "raised": "{{ raise_exception('first\n  second') }}",
}


@pytest.mark.parametrize("template", ESCAPES.values(), ids=ESCAPES)
def test_what_goes_wrong_in_a_template_is_the_requests_error(folder, template):
    with pytest.raises(RequestError, match=r"the chat template refuses these messages: .") as caught:
        use_template(folder, template).chat([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_an_empty_template_is_named(folder, name):
    if name == "chat_template.jinja":
        (folder / name).write_text("\n")
    with pytest.raises(CheckpointError, match=f"{name}: the chat template is empty"):
        use_template(folder, "") if name == "tokenizer_config.json" else Tokenizer(folder)


def test_without_a_template_only_plain_prompts_work(folder):
    (folder / "chat_template.jinja").unlink()
    tokenizer = Tokenizer(folder)
    assert not tokenizer.has_chat_template
    assert tokenizer.encode("x") == [120]
    with pytest.raises(RequestError, match=r"has no chat template; send a plain prompt \(--raw, "):
        tokenizer.chat([{"role": "user", "content": "x"}])


def word_level() -> str:
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    made.decoder = decoders.WordPiece()
    return made.to_str()


BROKEN = {
    "missing": ("tokenizer.json", None, "holds no tokenizer.json"),
    "cut off": ("tokenizer.json", '{"version": "1.0", "mod', "is no tokenizer that can be read"),
    "no tokenizer": ("tokenizer.json", "[]", "is no tokenizer that can be read"),
    "no byte level": ("tokenizer.json", word_level(), "has no ByteLevel decoder"),
    "bad config": ("tokenizer_config.json", "{", "tokenizer_config.json: is not valid JSON"),
    "config list": ("tokenizer_config.json", "[1]", "holds list, expected a JSON object"),
    "template form": ("tokenizer_config.json", '{"chat_template": [3]}', "chat_template has another form"),
    "template syntax": ("chat_template.jinja", "ok\n{% if %}", "line 2 of the chat template: .*Expected"),
}


@pytest.mark.parametrize(("name", "content", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_files_are_named(folder, name, content, message):
    if name == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink()
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_not_said_to_be_missing(folder, make):
    (folder / "tokenizer.json").unlink()
    make(folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: is no regular file"):
        Tokenizer(folder)


def test_a_template_that_is_no_utf8_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: is not UTF-8 text \(.* at byte 2\)"):
        Tokenizer(folder)


def test_a_tokenizer_that_cannot_be_read_is_not_said_to_be_broken(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CheckpointError, match=r"tokenizer.json: cannot be read \(Permission denied\)$"):
        Tokenizer(folder)
