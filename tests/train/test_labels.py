"""Which tokens of a conversation are labels: marks of turns and rows, and the seam of an answer."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from specdec.errors import SpecDecError
from specdec.train.rows import read_rows
from tests.train.conftest import CHATML, get_labels, get_rows

ASKED = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "BAD"}]
AGAIN = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "good"}]
ALL, GOOD = "BAD<|im_end|>good<|im_end|>", "good<|im_end|>"


def mark(**fields: Any) -> dict[str, Any]:
    return {"messages": [ASKED[0], ASKED[1] | fields, *AGAIN]}


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logging.getLogger("specdec").propagate = True
    caplog.set_level(logging.INFO)
    return caplog


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        ("weight", 1, 0), ("weight", 1.0, 0.0), ("weight", "1.0", "0"),
        ("train", True, False), ("training", "true", "No"),
        ("loss", True, False), ("masked", False, True), ("mask", 0, 1), ("step_loss_mask", 1, 0),
        ("trainable", True, False), ("trainOnTurn", True, False), ("label", True, False),
        ("exclude_from_training", False, True), ("no_loss", 0, 1), ("unmasked", 1, 0),
        ("training_disabled", False, True), ("include-in-loss", "yes", "false"),
        ("assistant_masks", [1], [0, 0]),
        ("train_detail", [{"begin_offset": 0, "end_offset": 2, "train": True}],
         [{"begin_offset": 0, "end_offset": 2, "train": False}]),
    ],
)  # fmt: skip
def test_a_turn_that_is_not_to_be_learned_is_context(
    write: Any, with_template: Any, told: pytest.LogCaptureFixture, name: str, yes: Any, no: Any
) -> None:
    tokenizer = with_template(CHATML)
    for value, labels in ((yes, ALL), (no, GOOD), (None, ALL)):
        told.clear()
        rows, _ = read_rows(write(mark(**{name: value})), tokenizer, 999)
        assert get_labels(rows, tokenizer) == [labels]
        assert "BAD" in tokenizer.decode(get_rows(rows)[0])
        assert ("1 turn of the assistant and 0 rows are marked" in told.text) == (value is no)
        assert "does not read" not in told.text
    turns = [{"from": t["role"], "value": t["content"]} for t in [*ASKED, *AGAIN]]
    turns[1][name] = no
    assert get_labels(read_rows(write({"conversations": turns}), tokenizer, 999)[0], tokenizer) == [
        GOOD
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"weight": 0.5}, {"weight": 2}, {"weight": "0.5"}, {"loss_scale": -1},
        {"train_detail": [{"train": True}, {"train": False}]}, {"loss_mask": [0, 1]},
        {"content": [{"type": "text", "text": "a", "weight": 0}, {"type": "text", "text": "b"}]},
    ],
)  # fmt: skip
def test_a_turn_that_is_learned_in_part_is_refused(
    write: Any, with_template: Any, fields: Any
) -> None:
    with pytest.raises(SpecDecError, match="line 1 cannot be used: .*turn 2 has") as error:
        read_rows(write(mark(**fields)), with_template(CHATML), 999)
    assert "0 or false for one that is not" in error.value.hint


def test_parts_may_have_marks(write: Any, with_template: Any) -> None:
    tokenizer = with_template(CHATML)
    row = mark(content=[{"type": "text", "text": "BAD", "train": False}])
    assert get_labels(read_rows(write(row), tokenizer, 999)[0], tokenizer) == [GOOD]


@pytest.mark.parametrize(
    ("fields", "is_learned"),
    [
        ({"weight": 0}, False), ({"train": False}, False), ({"label": False}, False),
        ({"kto_tag": False}, False), ({"mask": "Assistant"}, False), ({"mask": "User"}, True),
        ({"weight": 1, "kto_tag": True, "label": 0, "loss": 2.5, "split": 0}, True),
    ],
)  # fmt: skip
def test_a_row_that_is_not_to_be_learned_is_left_out(
    write: Any, with_template: Any, told: pytest.LogCaptureFixture, fields: Any, is_learned: bool
) -> None:
    tokenizer = with_template(CHATML)
    rows, _ = read_rows(write({"messages": ASKED} | fields, {"messages": AGAIN}), tokenizer, 999)
    assert len(rows) == 1 + is_learned
    assert ("0 turns of the assistant and 1 row are marked" in told.text) != is_learned
    texts, _ = read_rows(write({"text": "a b c d e"} | fields), tokenizer, 999)
    assert bool(len(texts)) == (is_learned or "label" in fields)


def test_other_fields_are_told_though_they_are_false(
    write: Any, with_template: Any, told: pytest.LogCaptureFixture
) -> None:
    row = mark(label="quality:4", rank=0, seen=False, name="", train_step=7)
    row["messages"][0]["train"] = True
    rows, _ = read_rows(write(row), with_template(CHATML), 999)
    assert get_labels(rows, with_template(CHATML)) == [ALL]
    for name in (
        "user has train", *(f"assistant has {name}" for name in ("label", "rank", "seen")),
        "assistant has train_step",
    ):  # fmt: skip
        assert f"a turn of {name}, which the tokenizer's chat template does not read" in told.text
    assert "has name" not in told.text


# Qwen3.5's logic: the prompt opens the thoughts, and the template writes a block for each answer.
OPENS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% set c = m.content %}"
    "{% if '</think>' in c %}{{ '<think>\n' + c.split('</think>')[0].split('<think>')[-1].strip()"
    " + '\n</think>\n\n' + c.split('</think>')[-1].lstrip() }}"
    "{% else %}{{ '<think>\n\n</think>\n\n' + c }}{% endif %}{% else %}{{ m.content }}{% endif %}"
    "</s>{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
# Qwen3's: the target opens its thoughts itself.
CLOSED = OPENS.replace("<assistant><think>\n{% endif", "<assistant>{% endif")
# DeepSeek R1's and QwQ's: the template drops the thoughts that the prompt opens.
DROPS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1].lstrip() }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
BRACKETS = DROPS.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
SPACED = CHATML.replace("assistant\n{% endif", "assistant: {% endif")
PROMPT = "<user>2+2?</s><assistant><think>\n"


def answer(content: str, **fields: Any) -> dict[str, Any]:
    turn = {"role": "assistant", "content": content}
    return {"messages": [{"role": "user", "content": "2+2?"}, turn], **fields}


@pytest.mark.parametrize(
    ("template", "row", "text", "label"),
    [
        (OPENS, answer("hm\n</think>\n\nfour"), PROMPT + "hm\n</think>\n\nfour</s>",
         "hm\n</think>\n\nfour</s>"),
        (OPENS, answer("hm and", truncated=True), PROMPT + "hm and", "hm and"),
        (OPENS, answer("<think>\nhm and", finish_reason="length"), PROMPT + "hm and", "hm and"),
        (OPENS, answer("four"), PROMPT + "\n</think>\n\nfour</s>", "four</s>"),
        (CLOSED, answer("four"), PROMPT + "\n</think>\n\nfour</s>", "four</s>"),
        (CLOSED, answer("hm</think>four"), PROMPT + "hm\n</think>\n\nfour</s>",
         "<think>\nhm\n</think>\n\nfour</s>"),
        (DROPS, answer("hm\n</think>\n\nfour"), PROMPT + "hm\n</think>\n\nfour</s>",
         "hm\n</think>\n\nfour</s>"),
        (DROPS, answer("<think>\nhm</think>four"), PROMPT + "hm</think>four</s>",
         "hm</think>four</s>"),
        (DROPS, answer("hm and", truncated=True), PROMPT + "hm and", "hm and"),
        (BRACKETS, answer("hm[/THINK]four"), "<user>2+2?</s><assistant>[THINK]\nhm[/THINK]four</s>",
         "hm[/THINK]four</s>"),
        (SPACED, answer("four"), "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant: "
         "four<|im_end|>\n", "four<|im_end|>"),
        (CHATML, answer("fo", truncated=True), "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>"
         "assistant\nfo", "fo"),
    ],
)  # fmt: skip
def test_an_answer_is_learned_behind_the_prompt_that_asks_for_it(
    write: Any, with_template: Any, template: str, row: Any, text: str, label: str
) -> None:
    tokenizer = with_template(template)
    rows, _ = read_rows(write(row), tokenizer, 999)
    assert [tokenizer.decode(ids) for ids in get_rows(rows)] == [text]
    assert get_labels(rows, tokenizer) == [label]


@pytest.mark.parametrize("template", [DROPS, BRACKETS])
def test_an_answer_that_the_target_cannot_have_written_is_left_out(
    write: Any, with_template: Any, told: pytest.LogCaptureFixture, template: str
) -> None:
    closing = "[/THINK]" if template is BRACKETS else "</think>"
    path = write(answer("four"), answer(f"hm{closing}four"))
    rows, _ = read_rows(path, with_template(template), 999)
    assert len(rows) == 1
    assert "1 conversation left out, as the prompt of an answer ends with" in told.text
    assert f"its thoughts, {closing} and the answer" in told.text


ASK, SAY = {"role": "user", "content": "two"}, {"role": "assistant", "content": "good"}


@pytest.mark.parametrize("cut", [False, True])
def test_a_prompt_is_context_of_its_completion(
    write: Any, with_template: Any, tokenizer: Any, cut: bool
) -> None:
    """TRL's form, as texts and as messages, of which the completion's are learned."""
    row: dict[str, Any] = {"prompt": "x = ", "completion": "y + 1", "text": None}
    rows, _ = read_rows(write(row), tokenizer, 6 if cut else 99)
    assert get_labels(rows, tokenizer) == ["y +" if cut else "y + 1<eos>"]
    assert tokenizer.decode(get_rows(rows)[0]).startswith("x = y ")
    with_template(CHATML)
    row = {"prompt": [*ASKED, ASK], "completion": [SAY]}
    for system in ({}, {"system": "Hm."}):
        rows, _ = read_rows(write(row | system), tokenizer, 999)
        assert get_labels(rows, tokenizer) == [GOOD]
    assert len(read_rows(write(row | {"label": False}), tokenizer, 999)[0]) == 0


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"prompt": "a", "id": "7"}, "a prompt alone teaches nothing: let the target answer it"),
        ({"prompt": [ASK]}, "a prompt alone teaches nothing"),
        ({"prompt": "a", "response": "b"}, "rename response to completion"),
        ({"prompt": [ASK], "chosen": [SAY], "rejected": [SAY]}, "rename chosen to completion"),
        ({"conversation": [ASK, SAY]}, "rename conversation to messages"),
        ({"items": [{"from": "human", "value": "a"}]}, "rename items to messages"),
        (
            {"instruction": "a", "input": "", "output": "b"},
            '{"prompt": "...", "completion": "..."}',
        ),
        ({"question": "a", "answer": "b"}, '{"prompt": "...", "completion": "..."}'),
        ({"segments": [{"label": True, "text": "a"}]}, "text, messages, conversations or prompt"),
    ],
)
def test_the_hint_of_a_row_of_another_form_leads_on(
    write: Any, tokenizer: Any, row: dict[str, Any], hint: str
) -> None:
    with pytest.raises(SpecDecError, match="line 1 .*none of the keys text, messages,") as error:
        read_rows(write(row), tokenizer, 99)
    assert hint in error.value.hint


@pytest.mark.parametrize("cut", [{"truncated": True}, {"finish_reason": "length"}])
def test_the_cut_of_a_text_is_no_end(write: Any, tokenizer: Any, cut: dict[str, Any]) -> None:
    texts = [{"text": "a b c", "finish_reason": "stop"}, {"text": "d e"} | cut, {"text": "f"}]
    rows, _ = read_rows(write(*texts), tokenizer, 99)
    assert get_labels(rows, tokenizer) == ["<eos>a b c<eos>d ef<eos>"]
    assert tokenizer.decode(get_rows(rows)[0]) == "<eos>a b c<eos>d e<eos>f<eos>"
    rows, _ = read_rows(write({"prompt": "a b", "completion": " c"} | cut), tokenizer, 99)
    assert get_labels(rows, tokenizer) == [" c"]


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ({"content": "good", "reasoning_content": "so"}, "<think>so</think>good"),
        ({"content": "", "reasoning_content": "so be"}, "<think>so be"),
        ({"content": None, "reasoning": "so be"}, "<think>so be"),
        ({"content": "m", "reasoning_content": "so m"}, "<think>so m</think>m"),  # as in <|im_end|>
    ],
)
def test_the_cut_of_an_answer_with_thoughts_is_no_end(
    write: Any, with_template: Any, answer: dict[str, Any], label: str
) -> None:
    """Of thoughts alone their closing tag is not learned either."""
    content = "{{ m['content'] }}"
    thoughts = "{{ m['reasoning_content'] or m['reasoning'] }}"
    block = "{% if m['role'] == 'assistant' %}<think>" + thoughts + "</think>{% endif %}"
    assert content in CHATML
    tokenizer = with_template(CHATML.replace(content, block + content))
    messages = [*ASKED, AGAIN[0], {"role": "assistant"} | answer]
    messages[1] = ASKED[1] | {"reasoning_content": "a"}
    first = "<think>a</think>BAD<|im_end|>"
    for cut in ({}, {"truncated": True}):
        rows, _ = read_rows(write({"messages": messages} | cut), tokenizer, 999)
        (text,) = get_labels(rows, tokenizer)
        assert text.startswith(first + label)
        assert text == first + label if cut else text.endswith("<|im_end|>")
