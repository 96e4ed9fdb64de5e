"""Data files -> rows of tokens and the mask of their labels."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecDecError
from specdec.text import chat
from specdec.text.chat import Conversation
from specdec.text.documents import check_data_file, read_document
from specdec.train.rows import (
    choose_heldout_lines,
    choose_rows,
    prepare_rows,
    read_rows,
)
from tests.train.conftest import CHATML, get_labels, get_rows

# Like several real ones: the reasoning of earlier answers is dropped.
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('#')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Like those of models that call functions: it prints what there is.
CALLING = (
    "{% if tools %}<tools>{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m['content'] }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "weather", "arguments": {"city": "Bern"}}
TURNS = [
    {"role": "user", "content": "add 1 and 2"},
    {"role": "assistant", "content": "it is 3"},
    {"role": "user", "content": "it is 3"},
    {"role": "assistant", "content": "yes, 3\n"},
]


def test_texts_are_packed_with_end_tokens_between(write: Any, tokenizer: Any) -> None:
    texts = ["def one", "print(2)", "for x in y"]
    rows, heldout = read_rows(write(*({"text": t, "other": 1} for t in texts)), tokenizer, 8)
    stream = [tokenizer.eos_token_id]
    for text in texts:
        stream += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    packed = get_rows(rows)
    assert [len(row) for row in packed[:-1]] == [8] * (len(packed) - 1)
    assert sum(packed, []) == stream[: len(packed[-1]) + 8 * (len(packed) - 1)]
    assert len(stream) - len(rows.tokens) < 3
    assert rows.mask.all()
    assert len(heldout) == 0


def test_a_text_file_is_one_document(write: Any, tokenizer: Any) -> None:
    path = write("first line", "", "third line", name="data.txt")
    rows, _ = read_rows(path, tokenizer, 1000)
    assert tokenizer.decode(get_rows(rows)[0]) == f"<eos>{path.read_text()}<eos>"


@pytest.mark.parametrize("style", ["messages", "conversations", "from-value", "parts"])
def test_only_the_assistant_is_learned(write: Any, with_template: Any, style: str) -> None:
    tokenizer = with_template(CHATML)
    names = {"user": "human", "assistant": "gpt"}
    row: dict[str, Any] = {"messages": TURNS}
    if style == "conversations":
        row = {"conversations": TURNS, "id": 7}
    elif style == "from-value":
        turns = [{"from": names[t["role"]], "value": t["content"]} for t in TURNS]
        row = {"conversations": turns}
    elif style == "parts":
        parts = [{**t, "content": [{"type": "text", "text": t["content"]}]} for t in TURNS]
        row = {"messages": parts}
    rows, _ = read_rows(write(row), tokenizer, 1000)
    # The same words from the user are not labels; the token that ends a turn is one.
    assert get_labels(rows, tokenizer) == ["it is 3<|im_end|>yes, 3\n<|im_end|>"]
    text = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert tokenizer.decode(get_rows(rows)[0]) == text
    tokens, mask = rows.make_batch([0])
    assert [tokenizer.decode(tokens[mask].tolist())] == get_labels(rows, tokenizer)


def call_by(*answer: dict[str, Any], result: dict[str, Any], **more: Any) -> dict[str, Any]:
    end = {"role": "assistant", "content": "Rain."}
    return {"messages": [{"role": "user", "content": "Rain?"}, *answer, result, end], **more}


AS_TEXT = {**CALL, "arguments": json.dumps(CALL["arguments"])}
TOOL = {"role": "tool", "content": "wet", "tool_call_id": "c1"}
FUNCTIONS = [{"type": "function", "function": WEATHER}]
CALLS: dict[str, dict[str, Any]] = {
    "openai": call_by(
        {"role": "assistant", "content": None, "refusal": None,
         "tool_calls": [{"id": "c1", "type": "function", "function": AS_TEXT}]},
        result=TOOL, tools=FUNCTIONS,
    ),
    "objects": call_by(
        {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]},
        result={"role": "tool", "name": "weather", "content": "wet"}, tools=json.dumps([WEATHER]),
    ),
    "bare": call_by(
        {"role": "assistant", "tool_calls": [{"id": "c1", **CALL}]},
        result={"role": "ipython", "content": [{"type": "text", "text": "wet"}]}, tools=[WEATHER],
    ),
    "before-tools": call_by(
        {"role": "assistant", "content": None, "function_call": AS_TEXT},
        result={"role": "function", "name": "weather", "content": "wet"}, functions=[WEATHER],
    ),
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "Rain?"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "wet"},
            {"from": "gpt", "value": "Rain."},
        ],
        "tools": json.dumps([WEATHER]),
    },
}  # fmt: skip


@pytest.mark.parametrize("style", CALLS)
def test_calls_of_functions_are_learned(write: Any, with_template: Any, style: str) -> None:
    """Whatever the form of the data set: the call is what the target writes, not nothing."""
    tokenizer = with_template(CALLING)
    rows, _ = read_rows(write(CALLS[style]), tokenizer, 1000)
    call = '<call>weather {"city": "Bern"}</s>'
    assert get_labels(rows, tokenizer) == [f"{call}Rain.</s>"]
    text = f"<user>Rain?</s><assistant>{call}<tool>wet</s><assistant>Rain.</s>"
    assert tokenizer.decode(get_rows(rows)[0]) == f"<tools>{json.dumps(FUNCTIONS)}\n{text}"


THOUGHT = {"role": "assistant", "content": "3", "reasoning_content": "1 and 2"}


@pytest.mark.parametrize(
    ("row", "lost"),
    [
        (CALLS["openai"] | {"tools": None}, "a turn of assistant has tool_calls"),
        ({"messages": TURNS, "tools": FUNCTIONS}, "a row has tools"),
        ({"messages": [TURNS[0], THOUGHT]}, "a turn of assistant has reasoning_content"),
        ({"messages": [TURNS[0], THOUGHT | {"thinking": "x"}]}, "assistant has reasoning_content"),
        ({"messages": [TURNS[0], {"role": "assistant", "content": ""}]}, None),
    ],
)
def test_what_a_template_does_not_read_is_refused(
    write: Any, with_template: Any, row: dict[str, Any], lost: str | None
) -> None:
    tokenizer = with_template(CHATML)
    if lost is None:
        assert len(read_rows(write(row), tokenizer, 1000)[0]) == 1
        return
    with pytest.raises(SpecDecError, match=f"line 1 .*{lost}, which .* does not read"):
        read_rows(write(row), tokenizer, 1000)
    if lost.endswith("reasoning_content") and "thinking" not in row["messages"][-1]:
        tokenizer = with_template(CALLING)
        rows, _ = read_rows(write(row), tokenizer, 1000)
        assert get_labels(rows, tokenizer) == ["<think>1 and 2</think>3</s>"]


def test_fields_without_text_are_told_once(
    write: Any, with_template: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Who spoke, or an id: few templates read them, and the target never sees them."""
    turns = [{**turn, "id": n} for n, turn in enumerate(TURNS, 5)]
    rows, _ = read_rows(write({"messages": turns}, {"messages": turns}), with_template(CHATML), 99)
    assert len(rows) == 2
    assert caplog.text.count("a turn of user has id, which the tokenizer's chat template") == 1
    assert caplog.text.count("does not read") == 2


KNOWS = "{% if messages[0]['role'] == 'ROLE' %}!{% endif %}" + CHATML


@pytest.mark.parametrize(
    ("role", "usual"),
    [
        ("developer", "system"), ("ipython", "tool"), ("function", "tool"), ("observation", "tool"),
        ("tool_response", "tool"), ("Human", "user"), ("user", "user"),
    ],
)  # fmt: skip
def test_roles_of_data_sets(write: Any, with_template: Any, role: str, usual: str) -> None:
    """A role by its own name where the template knows it, else by the usual one."""
    path = write({"messages": [{"role": role, "content": "Hm."}, *TURNS[:2]]})
    for template, expected in ((CHATML, usual), (KNOWS.replace("ROLE", role), role)):
        tokenizer = with_template(template)
        rows, _ = read_rows(path, tokenizer, 1000)
        text = tokenizer.decode(get_rows(rows)[0])
        expected = "user" if usual == "user" else expected
        assert text.lstrip("!").startswith(f"<|im_start|>{expected}\nHm.")


PARTS = (
    "{% for m in messages %}<{{ m['role'] }}>{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_gets_content_and_arguments_as_it_takes_them(
    write: Any, with_template: Any
) -> None:
    tokenizer = with_template(PARTS)
    rows, _ = read_rows(write({"messages": TURNS[:2]}), tokenizer, 1000)
    assert get_labels(rows, tokenizer) == ["it is 3</s>"]
    for arguments in ("c.function.arguments", "'' + c.function.arguments"):
        tokenizer = with_template(CALLING.replace("c.function.arguments | tojson", arguments))
        rows, _ = read_rows(write(CALLS["objects"]), tokenizer, 1000)
        assert get_labels(rows, tokenizer)[0].startswith('<call>weather {"city": "Bern"}')


def test_a_list_of_rows_is_read_as_lines_are(write: Any, with_template: Any) -> None:
    tokenizer = with_template(CALLING)
    data = [{"text": f"text number {n}"} for n in range(60)] + list(CALLS.values())
    lines, path = write(*data), write("\ufeff" + json.dumps(data, indent=1), name="data.json")
    check_data_file(path, "--data")
    for ours, theirs in zip(
        prepare_rows(path, None, tokenizer, 99),
        prepare_rows(lines, None, tokenizer, 99),
        strict=True,
    ):
        assert len(ours)
        assert sorted(map(len, get_rows(ours))) == sorted(map(len, get_rows(theirs)))
    assert get_rows(read_rows(path, tokenizer, 99)[0]) == get_rows(
        read_rows(lines, tokenizer, 99)[0]
    )
    for content, words in (
        ('{"text": "a"}', "is a dict, not a list of rows"),
        ('[{"text": 3}]', "row 1 .*text is a int"),
        ('{"text": "a"}\n{"text": "b"}', "is not JSON: Extra data"),
    ):  # fmt: skip
        with pytest.raises(SpecDecError, match=words):
            read_rows(write(content, name="data.json"), tokenizer, 99)


def test_a_template_that_rewrites_history_gives_a_row_per_answer(
    write: Any, with_template: Any
) -> None:
    tokenizer = with_template(FORGETFUL)
    turns = [dict(t) for t in TURNS]
    turns[1]["content"] = "think#three"
    rows, _ = read_rows(write({"messages": turns}), tokenizer, 1000)
    assert get_labels(rows, tokenizer) == ["think#three</s>", "yes, 3\n</s>"]
    assert "think" not in tokenizer.decode(get_rows(rows)[1])


def test_without_a_template_the_plain_one_is_used(write: Any, with_template: Any) -> None:
    tokenizer = with_template(None)
    turns = [{"role": "system", "content": "Be brief."}, *TURNS[:2]]
    rows, _ = read_rows(write({"messages": turns}), tokenizer, 1000)
    text = "Be brief. USER: add 1 and 2 ASSISTANT: it is 3<eos>"
    assert tokenizer.decode(get_rows(rows)[0]) == text
    assert get_labels(rows, tokenizer) == [" it is 3<eos>"]


def test_an_emoji_of_several_tokens_is_learned_whole(write: Any, with_template: Any) -> None:
    tokenizer = with_template(CHATML)
    turns = [{"role": "user", "content": "🙂"}, {"role": "assistant", "content": "🙃é"}]
    rows, _ = read_rows(write({"messages": turns}), tokenizer, 1000)
    assert get_labels(rows, tokenizer) == ["🙃é<|im_end|>"]


def test_long_conversations_are_cut_and_empty_ones_left_out(
    write: Any, with_template: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = with_template(CHATML)
    only_user = {"messages": TURNS[:1]}
    late = {"messages": [{"role": "user", "content": "x " * 60}, TURNS[1]]}
    long = {"messages": [TURNS[0], {"role": "assistant", "content": "y " * 60}]}
    path = write(only_user, {"messages": []}, late, long)
    import logging

    logging.getLogger("specdec").propagate = True
    rows, _ = read_rows(path, tokenizer, 80)
    assert [len(row) for row in get_rows(rows)] == [80]
    assert rows.mask.any()
    assert "3 conversations" in caplog.text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 cannot be used: Expecting property name"),
        ("[1]", "line 2 cannot be used: it is a list, not an object"),
        ('{"path": "x", "body": "y"}', "none of the keys text, messages, conversations or"),
        ('{"text": 3}', "text is a int"),
        ('{"messages": "hello"}', "messages is a str, not a list of turns"),
        ('{"messages": ["hello"]}', "turn 1 is a str"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "turn 1 has role 'robot'"),
        ('{"messages": [{"role": "user"}]}', "turn 1 has no text as `content` or `value`, it has"),
        ('{"messages": [{"role": "assistant", "content": null, "id": 3}]}', "it has content, id"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{}]}]}', "turn 1: tool_calls holds"),
        ('{"messages": [{"role": "function_call", "content": "add"}]}', "turn 1 (function_call) h"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "of type 'image'"),
        ('{"messages": [], "tools": "weather"}', "tools is a text that is not JSON"),
        ('{"messages": [], "image": "1.jpg"}', "it has image besides its turns, '1.jpg'"),
        ('{"conversations": [], "images": ["1.jpg"], "messages": null}', "it has images besides"),
        ('{"messages": [], "system": ["Be brief."]}', "system is a list, not a text"),
    ],
)
def test_a_bad_line_is_named(write: Any, tokenizer: Any, line: str, words: str) -> None:
    path = write({"text": "fine"}, line)
    with pytest.raises(SpecDecError) as error:
        read_rows(path, tokenizer, 100)
    assert f"{path} line 2" in error.value.message
    assert words in error.value.message


@pytest.mark.parametrize("system", ["system", "system_prompt"])
def test_rows_of_tables_have_fields_of_others(system: str) -> None:
    """null and empty ones, as parquet files become lines; both names of a system's text."""
    row = {
        "messages": None, "images": [], "text": None, system: "Be brief.",
        "conversations": [{"from": "human", "value": "Rain?"}, {"from": "gpt", "value": "No."}],
    }  # fmt: skip
    conversation = read_document(row)
    assert isinstance(conversation, Conversation)
    assert [m["content"] for m in conversation.messages] == ["Be brief.", "Rain?", "No."]
    assert read_document(row | {"conversations": None, "text": "Rain."}) == "Rain."


def test_a_byte_order_mark_is_no_text(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "data.txt"
    tokens = []
    for mark in (b"", codecs.BOM_UTF8):
        path.write_bytes(mark + b"As Windows writes it.")
        tokens.append(read_rows(path, tokenizer, 100)[0].tokens.tolist())
    assert tokens[0] == tokens[1]


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n{"text": "\xff"}\n')
    with pytest.raises(SpecDecError, match="line 3 is not UTF-8"):
        read_rows(path, tokenizer, 100)


def test_what_a_template_refuses_is_named(write: Any, with_template: Any) -> None:
    tokenizer = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(SpecDecError, match="line 1 .*template refuses it: roles must alternate"):
        read_rows(write({"messages": TURNS}), tokenizer, 100)


def test_the_line_of_a_template_s_error_is_named(write: Any, with_template: Any) -> None:
    tokenizer = with_template("{{ messages[0].content }}\n{% if %}")
    with pytest.raises(SpecDecError, match="chat template has an error in line 2") as caught:
        read_rows(write({"messages": TURNS}), tokenizer, 100)
    assert "chat_template.jinja" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "[]", "is none of .jsonl, .json, .txt"),
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", None, "does not exist"),
        ("a", None, "does not exist"),
        ("..", None, "is a folder"),
    ],
)
def test_unusable_files_are_refused(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SpecDecError, match=words):
        check_data_file(tmp_path / name, "--data")


def test_about_two_percent_are_held_out_and_none_is_in_both(write: Any, tokenizer: Any) -> None:
    path = write(*({"text": f"text number {i}"} for i in range(2000)))
    chosen = choose_heldout_lines(path)
    assert 20 <= len(chosen) <= 65
    train, heldout = prepare_rows(path, None, tokenizer, 32)
    both, _ = read_rows(path, tokenizer, 32)
    total = len(both.tokens) + 1  # two streams, two opening end tokens
    assert abs(len(train.tokens) + len(heldout.tokens) - total) < 6
    text = tokenizer.decode(heldout.tokens.tolist())
    assert all(f"text number {number - 1}<eos>" in text for number in list(chosen)[:-1])


def test_a_single_document_gives_its_end_away(
    write: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = write("word " * 600, name="data.txt")
    whole, _ = read_rows(path, tokenizer, 16)
    train, heldout = prepare_rows(path, None, tokenizer, 16)
    assert len(heldout) == max(1, round(0.02 * len(whole)))
    assert get_rows(train) + get_rows(heldout) == get_rows(whole)
    prepare_rows(write("word", name="one.txt"), None, tokenizer, 16)
    assert "the evaluation is on the training data" in caplog.text


def test_data_without_labels_is_refused(write: Any, tokenizer: Any) -> None:
    with pytest.raises(SpecDecError, match="no row to learn from"):
        prepare_rows(write({"messages": TURNS[:1]}), None, tokenizer, 32)


def test_every_epoch_visits_every_row_in_a_new_order() -> None:
    epochs = [choose_rows(10, 5, 10 * e, 10) for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    pieces = [row for start in range(0, 28, 4) for row in choose_rows(10, 5, start, 4)]
    assert pieces == [row for epoch in epochs for row in epoch][:28]
    assert choose_rows(10, 6, 0, 10) != epochs[0]
    assert choose_rows(3, 0, 2, 7)[1:] == choose_rows(3, 0, 3, 6)


def test_batches_are_padded_at_the_end_without_labels(write: Any, tokenizer: Any) -> None:
    rows, _ = read_rows(write({"text": "some words to pack"}), tokenizer, 4)
    tokens, mask = rows.make_batch([len(rows) - 1, 0])
    last = get_rows(rows)[-1]
    assert tokens.shape == (2, 4)
    assert tokens[0].tolist() == last + [0] * (4 - len(last))
    assert mask[0].tolist() == [True] * len(last) + [False] * (4 - len(last))


def test_tokens_are_marked_by_where_they_start() -> None:
    offsets = [(0, 2), (2, 5), (5, 5), (5, 8), (8, 9)]
    assert chat.mask_tokens(offsets, [(2, 4), (7, 9)]).tolist() == [False, True, False, False, True]
    # Without width: a token that the tokenizer added, then spaces before and within a span.
    trimmed = [(0, 0), (0, 2), (4, 4), (4, 5), (7, 7), (7, 8), (9, 9), (0, 0)]
    assert chat.mask_tokens(trimmed, [(4, 9)]).tolist() == [
        False, False, False, True, True, True, True, False,
    ]  # fmt: skip


def test_spaces_are_labels_with_trimmed_offsets(write: Any) -> None:
    """GPT-NeoX's tokenizers leave the spaces out of their tokens' offsets."""
    from tokenizers import processors
    from transformers import AutoTokenizer

    answer = "\n    if x:\n        return  x\n\n    return   1\n"
    path = write(
        {"messages": [{"role": "user", "content": "f"}, {"role": "assistant", "content": answer}]}
    )
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "examples/pycode/target")
    expected, _ = read_rows(path, tokenizer, 256)
    trimming = processors.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.backend_tokenizer.post_processor = trimming
    encoded = tokenizer(answer, return_offsets_mapping=True)["offset_mapping"]
    assert any(start == end for start, end in encoded)
    rows, _ = read_rows(path, tokenizer, 256)
    assert rows.tokens.tolist() == expected.tokens.tolist()
    assert rows.mask.tolist() == expected.mask.tolist()
