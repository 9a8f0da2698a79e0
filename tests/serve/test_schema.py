"""What requests are taken, and what is said about the others."""

import pytest

from isobit.serve.errors import ApiError
from isobit.serve.schema import parse_chat, parse_completion

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return parse_chat({"messages": MESSAGES, **fields})


def refusal(**fields) -> ApiError:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert refused.value.status == 400
    assert "\n" not in str(refused.value)
    return refused.value


def test_the_defaults_filter_nothing():
    sampling = chat().sampling()
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)


def test_a_request_without_a_seed_gets_its_own():
    assert len({chat().sampling().seed for _ in range(4)}) == 4
    assert all(0 <= chat().sampling().seed < 2**53 for _ in range(4))


@pytest.mark.parametrize(
    ("asked", "used"), [(0, 0), (7, 7), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1), (-(2**63), 2**63)]
)
def test_a_seed_is_taken_modulo_64_bits(asked, used):
    assert chat(seed=asked).sampling().seed == used


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"presence_penalty": 0, "frequency_penalty": 0.0},
        {"logit_bias": {}},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": False, "service_tier": "auto"},
        {"response_format": {"type": "text"}},
        {"stop": None, "seed": None, "temperature": None, "tools": None, "n": None, "reasoning_effort": None},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"top_k": -1},
        {"tools": [], "tool_choice": "auto"},
    ],
)
def test_what_ordinary_clients_send_is_taken(fields):
    chat(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"n": True},
        {"presence_penalty": 0.5},
        {"logit_bias": {"5": 1}},
        {"response_format": {"type": "json_object"}},
        {"reasoning_effort": "high"},
        {"functions": [{"name": "f"}]},
        {"service_tier": "flex"},
    ],
)
def test_what_is_not_supported_is_named(fields):
    error = refusal(**fields)
    assert error.param in fields
    assert repr(error.param) in str(error)
    assert error.code == "unsupported_value"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": 2.5},
        {"temperature": "1"},
        {"temperature": True},
        {"top_p": 1.5},
        {"top_k": -2},
        {"top_k": 1.5},
        {"min_p": -1},
        {"seed": 2**64},
        {"seed": 1.5},
        {"max_tokens": 0},
        {"max_completion_tokens": -5},
        {"stream": "yes"},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [1]},
        {"stop": ["x"] * 17},
        {"stop": "x" * 1025},
        {"prefill": "fast"},
        {"segment_rows": 0},
        {"priority": "urgent"},
        {"draft": "no"},
        {"reuse": 1},
        {"logprobs": 3},
        {"logprobs": True, "top_logprobs": 21},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [{"type": "retrieval"}]},
        {"ignore_eos": 1},
        {"model": 5},
        {"messages": []},
        {"messages": "hi"},
    ],
)
def test_a_wrong_value_names_its_field(fields):
    error = refusal(**fields)
    assert (error.param or "").split("[")[0] in fields
    assert error.param in str(error)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": 0}, "field 'max_tokens': expected 1 or more, got 0"),
        ({"max_tokens": 10**9}, "field 'max_tokens': expected 1,048,576 or less, got 1000000000"),
        ({"max_tokens": 1.0}, "field 'max_tokens': expected a whole number, got 1.0"),
        ({"temperature": 3}, "field 'temperature': expected 2 or less, got 3"),
        ({"temperature": float("nan")}, "field 'temperature': expected 2 or less, got nan"),
        ({"temperature": "hot"}, "field 'temperature': expected a number, got 'hot'"),
        ({"stream": "yes"}, "field 'stream': expected true or false, got 'yes'"),
        ({"prefill": "fast"}, "field 'prefill': expected 'deep', 'batched' or 'serial', got 'fast'"),
        ({"messages": []}, "field 'messages': expected at least 1, got a list of 0"),
        ({"messages": ["hi"]}, "field 'messages[0]': expected an object, got 'hi'"),
        (
            {"messages": [{"role": "user", "content": "hi", "refusal": "no"}]},
            "field 'messages[0].refusal': expected null, got 'no'",
        ),
    ],
)
def test_a_wrong_value_is_told_in_words_for_people(fields, said):
    assert str(refusal(**fields)) == said


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "system", "content": None}, "messages[0].content"),
        ({"role": "tool", "tool_call_id": "c1"}, "messages[0].content"),
        ({"role": "robot", "content": "hi"}, "messages[0].role"),
        ({"role": "user", "content": "hi", "colour": "red"}, "messages[0].colour"),
        ({"content": "hi"}, "messages[0].role"),
        ("hi", "messages[0]"),
    ],
)
def test_a_wrong_message_names_its_place(message, field):
    assert refusal(messages=[message]).param == field


def test_an_unknown_field_is_named():
    error = refusal(temprature=1)
    assert (error.param, error.code) == ("temprature", "unknown_parameter")


def test_fields_that_need_another_say_so():
    assert refusal(top_logprobs=3).param == "top_logprobs"
    assert refusal(stream_options={"include_usage": True}).param == "stream_options"


def test_an_earlier_reply_can_be_sent_back_as_clients_hold_it():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    held = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "annotations": [],
        "tool_calls": [call],
    }
    parsed = chat(messages=[*MESSAGES, held, {"role": "tool", "tool_call_id": "c1", "content": "2"}])
    assistant, tool = (message.for_template() for message in parsed.messages[1:])
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "c1"}


def test_tool_arguments_are_an_object_or_text():
    call = {"id": "c1", "function": {"name": "f", "arguments": 5}}
    refused = refusal(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert refused.param == "messages[0].tool_calls[0].function.arguments"


def test_developer_messages_are_system_messages():
    parsed = chat(messages=[{"role": "developer", "content": "be brief"}])
    assert parsed.messages[0].for_template()["role"] == "system"


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [("hi", "hi"), (["hi"], "hi"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ([], ())],
)
def test_a_prompt_is_one_text_or_one_list_of_ids(prompt, taken):
    assert parse_completion({"prompt": prompt}).prompt == taken


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [1, "a"], 5, [1.0], [True], {"text": "a"}])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(ApiError) as refused:
        parse_completion({"prompt": prompt})
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([True, -1], "field 'prompt[0]': expected a token id, a whole number of 0 or more, got true"),
        ([4, -1], "field 'prompt[1]': expected a token id, a whole number of 0 or more, got -1"),
        ([[4, 5, None]], "field 'prompt[2]': expected a token id, a whole number of 0 or more, got null"),
        ([0, 1.5], "field 'prompt[1]': expected a token id, a whole number of 0 or more, got 1.5"),
        ([{}], "field 'prompt[0]': expected a token id, a whole number of 0 or more, got an object"),
        ([2**40], "field 'prompt[0]': expected a token id, a whole number of 0 or more, got 1099511627776"),
    ],
)
def test_what_is_no_token_id_is_told_with_its_place(prompt, said):
    with pytest.raises(ApiError) as refused:
        parse_completion({"prompt": prompt})
    assert str(refused.value) == said
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "prompt", "invalid_value")


def test_a_missing_prompt_is_named():
    with pytest.raises(ApiError, match="'prompt' is missing"):
        parse_completion({})
