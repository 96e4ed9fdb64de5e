"""Requirements of a machine, optional libraries, and arguments of tool calls, alone."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from specdec.errors import SpecDecError
from specdec.system import libraries, requirements
from specdec.system.machine import Gpu
from specdec.text.tool_calls import convert_arguments, render_calls


def test_a_torch_that_is_absent_or_too_old() -> None:
    least = requirements.MIN_VERSIONS["torch"]
    for version, reasons in (
        (None, ["torch is not installed"]), (f"{least[0]}.{least[1]}.0+cpu", []),
        ("2.10.1", []),
        ("2.8.9", ["torch 2.8.9 is older than 2.9, the first that loads files safely"]),
    ):  # fmt: skip
        assert requirements.find_torch_reasons({"packages": {"torch": version}}) == reasons


def test_weights_that_do_not_fit() -> None:
    assert requirements.find_memory_problems(8 * 10**9, 8 * 10**9, "this machine") == []
    assert requirements.find_memory_problems(8 * 10**9, 0, "a GPU that does not say") == []
    ((fact, remedy),) = requirements.find_memory_problems(85 * 10**8, 8 * 10**9, "the GPU")
    assert fact == "the weights take 8.5 GB, the GPU has 8.0 GB"
    assert remedy.startswith("use a machine with more memory")
    assert requirements.choose_reasons((0, "a"), ("x", "b"), (True, "c")) == ["b", "c"]
    fields = {"name": "G", "memory_bytes": 5, "compute_capability": (9, 0)}
    known = Gpu.__dataclass_fields__
    gpus = requirements.read_gpus({"gpus": [{k: fields.get(k) for k in known}] * 2})
    assert len(gpus) == 2
    assert gpus[1].name == "G"


def test_a_library_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    assert libraries.import_gguf("--to gguf") is gguf
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SpecDecError, match="--to gguf needs the package gguf") as caught:
        libraries.import_gguf("--to gguf")
    assert caught.value.hint is not None
    assert "gguf" in caught.value.hint


# ---- Tool calls.


def make_message(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }


def convert(arguments: Any, *, to_text: bool) -> Any:
    message = make_message(arguments)
    (converted,) = convert_arguments([message], to_text=to_text)
    assert message == make_message(arguments), "it is not changed"
    return converted["tool_calls"][0]["function"]["arguments"]


def test_arguments_as_objects_and_as_texts() -> None:
    for arguments, as_text, as_object in (
        ({"a": "é"}, '{"a": "é"}', {"a": "é"}), ('{"a": 1}', '{"a": 1}', {"a": 1}),
        (None, "{}", {}), (" ", " ", {}), ("[1]", "[1]", "[1]"), ("{broken", "{broken", "{broken"),
        ("[" * 5000, "[" * 5000, "[" * 5000),
    ):  # fmt: skip
        assert convert(arguments, to_text=True) == as_text
        assert convert(arguments, to_text=False) == as_object
    plain: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": None},
    ]
    assert convert_arguments(plain, to_text=True) == plain
    strange = [{"role": "assistant", "tool_calls": [{"name": "f"}]}]
    assert convert_arguments(strange, to_text=True) == strange


def test_the_form_that_a_template_reads() -> None:
    """Some take objects apart, some print them, some print texts; a failure tries the other."""
    messages = [make_message('{"a": 1}')]

    def get(found: list[dict[str, Any]]) -> Any:
        return found[0]["tool_calls"][0]["function"]["arguments"]

    assert render_calls(lambda m: "".join(get(m).keys()), messages, False) == ("a", False)
    # Printed as Python does: the template wants a text.
    assert render_calls(lambda m: str(get(m)), messages, False) == ('{"a": 1}', True)
    assert render_calls(lambda m: "" + get(m), messages, False) == ('{"a": 1}', True)
    assert render_calls(lambda m: "".join(get(m).keys()), messages, True) == ("a", False)

    def fail(found: Any) -> str:
        raise ValueError(type(get(found)).__name__)

    for wants_text, name in ((False, "dict"), (True, "str")):
        with pytest.raises(ValueError, match=name):  # of the form that was tried first
            render_calls(fail, messages, wants_text)
    empty = [{"role": "user", "content": "a"}]
    assert render_calls(lambda m: m[0]["content"], empty, False) == ("a", False)
