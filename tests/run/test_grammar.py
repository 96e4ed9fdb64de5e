"""Structured output: always in the grammar, and distributed as plain decoding with the mask is."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from specdec import Engine, Prompt, SpecDecError
from specdec.decode.accept import Candidates, accept_batch
from specdec.decode.sampling import DRAFT, Sampler, SamplingParams
from specdec.engine.tree import Tree, pack_beams
from specdec.text.grammar import Grammar, GrammarCompiler
from specdec.text.schemas import fit_schema
from tests.conftest import make_drafter, make_llama, make_tokenizer
from tests.engines import call, make_engine
from tests.run.statistics import FALSE_ALARM_RATE, compute_p_value
from tests.run.test_sampling import LENGTH, METHODS, TARGET, VOCAB, compute_tree_logits


class NoTwins:
    """A grammar of the toy's five tokens: none twice in a row, and 4 only after 1."""

    def __init__(self, text: list[int] | None = None) -> None:
        self.text = list(text or [])

    def allows(self, token: int) -> bool:
        last = self.text[-1] if self.text else None
        return token != last and (token != 4 or last == 1)

    def validate_tokens(self, tokens: list[int]) -> int:
        return int(self.allows(tokens[0]))

    def consume_token(self, sampled_token: int) -> bool:
        assert self.allows(sampled_token)
        self.text.append(sampled_token)
        return True

    def rollback(self, num_tokens: int) -> bool:
        del self.text[len(self.text) - num_tokens :]
        return True

    def compute_bitmask(self) -> bytes:
        bits = np.array([self.allows(token) for token in range(VOCAB)])
        return np.packbits(bits, bitorder="little").tobytes()

    def is_error(self) -> bool:
        return False

    def deep_copy(self) -> NoTwins:
        return NoTwins(self.text)


@pytest.mark.parametrize(
    "method", ["beams", "draft model, long chain, ratio", "draft model, compared", "dynamic tree"]
)
def test_masked_texts_follow_their_distribution(method: str) -> None:
    """False alarm: one seed in ten thousand."""
    exact = np.zeros((VOCAB,) * LENGTH)
    for known in itertools.product(range(VOCAB), repeat=LENGTH):
        chances = []
        for at, token in enumerate(known):
            before = NoTwins(list(known[:at]))
            weights = TARGET.get_logits(known[:at]).exp().tolist()
            left = [w if before.allows(t) else 0.0 for t, w in enumerate(weights)]
            chances.append(left[token] / sum(left))
        exact[known] = math.prod(chances)
    counts = np.zeros(exact.shape, np.int64)
    num_pruned = 0
    for seed in range(300):
        text: list[int] = []
        state = Grammar(NoTwins(), ()).follow(text)
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), LENGTH + 8, state)
        while len(text) < LENGTH:
            drafted = METHODS[method](text, sampler)
            candidates = drafted.prune(state)
            num_pruned += drafted.tree.num_nodes - candidates.tree.num_nodes
            logits = compute_tree_logits(candidates.tree, text)[None]
            ((path, bonus),) = accept_batch([candidates], logits, [sampler], [len(text)])
            text += [*candidates.tree.tokens[path[1:]].tolist(), bonus]
        counts[tuple(text[:LENGTH])] += 1
    assert num_pruned > 50
    assert compute_p_value(counts.reshape(-1), exact.reshape(-1)) > FALSE_ALARM_RATE


def test_a_forbidden_draft_is_rejected_not_forgotten() -> None:
    """One token, drafted mostly outside of the grammar: cut off with it, p would be too flat."""
    p, q = np.array([0.5, 0.3, 0.2, 0, 0]), torch.tensor([0.1, 0.1, 0.1, 0.0, 0.7])
    logits = torch.tensor([*p[:3], 0.1, 0.9]).log()
    logits[3] = -torch.inf
    counts = np.zeros(VOCAB, np.int64)
    for seed in range(3000):
        text: list[int] = []
        state = Grammar(NoTwins([3]), ()).follow(text)
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), 4, state)
        drafted = int(np.searchsorted(q.cumsum(0).numpy(), sampler.get_uniform(DRAFT, 0)))
        chain = Tree(np.array([3, drafted]), np.array([-1, 0]), np.array([0, 1]))
        candidates = Candidates(chain, [q]).prune(state)
        ((path, bonus),) = accept_batch([candidates], logits.expand(1, 2, -1), [sampler], [0])
        counts[int(chain.tokens[1]) if len(path) > 1 else bonus] += 1
    assert compute_p_value(counts, p) > FALSE_ALARM_RATE


def test_what_is_pruned() -> None:
    """Of a tree all that is outside; of a drawn chain all after the first that is."""
    output: list[int] = [2]
    state = Grammar(NoTwins(), ()).follow(output)
    tree = pack_beams(2, np.array([[1, 4], [1, 1], [2, 0], [3, 4]]))
    sure = np.linspace(1.0, 0.3, tree.num_nodes)
    candidates = Candidates(tree, None, sure, source=1).prune(state)
    pruned, kept = candidates.tree, [0, 1, 3, 4]
    assert candidates.source == 1
    assert candidates.confidence is not None
    assert candidates.confidence.tolist() == sure[kept].tolist()
    assert pruned.tokens.tolist() == tree.tokens[kept].tolist() == [2, 1, 3, 4]
    assert pruned.parents.tolist() == [-1, 0, 0, 1]
    assert pruned.depths.tolist() == [0, 1, 1, 2]
    chain = Tree(np.array([2, 3, 4, 0, 1]), np.arange(-1, 4), np.arange(5))
    probs = [torch.full((VOCAB,), 0.2)] * 4
    cut = Candidates(chain, probs).prune(state)
    assert cut.tree.tokens.tolist() == [2, 3, 4]
    assert cut.draft_probs is not None
    assert len(cut.draft_probs) == 2
    inside = Candidates(pack_beams(2, np.array([[1, 4]])))
    assert inside.prune(state).tree is inside.tree


pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("grammar")
    target, drafter = make_llama(parent, seed=5), make_drafter(parent, exit_dim=96, scale=3.0)
    make_tokenizer(target)
    make_engine(
        parent, target, drafter, beams=3, length=4,
        build=["--max-batch-size", 4, "--tokenizer-dir", target],
    ).rename(parent / "redrafter")  # fmt: skip
    call("convert", "--model-dir", target, "--output-dir", parent / "ckpt")
    call(
        "build", "--checkpoint-dir", parent / "ckpt", "--output-dir", parent / "lookahead",
        "--speculative-decoding-mode", "lookahead_decoding",
        "--max-draft-len", 11, "--tokenizer-dir", target,
    )  # fmt: skip
    return parent


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22, 333]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[a-c]{3,9}"}, {"json_schema": SCHEMA}, {"lark": 'start: ("x" | "yz")+ "!"'},
    {"choice": ["a|b", "c.d", "[e]"]},
]  # fmt: skip


def check_text(text: str, number: int) -> None:
    if number == 1:
        value = json.loads(text)
        assert value.keys() == {"a", "b"}
        assert value["a"] in (1, 22, 333)
        spaced = json.dumps(value)
        assert re.fullmatch(re.escape(spaced).replace(r"\ ", " ?"), text)
    elif number == 3:
        assert text in GRAMMARS[3]["choice"]
    else:
        assert re.fullmatch(("[a-c]{3,9}", "", r"(x|yz)+!")[number], text)


@pytest.mark.parametrize("method", ["redrafter", "lookahead"])
def test_texts_keep_to_their_grammar_and_drafts_change_nothing(folder: Path, method: str) -> None:
    """Greedy, sampled and penalized, alongside requests without a grammar."""
    prompts = [
        Prompt(
            text=f"hello {n}", temperature=(n % 3) * 0.7, seed=n, frequency_penalty=(n % 2) * 0.5,
            grammar=[*GRAMMARS, None][n % 5],
        )
        for n in range(20)
    ]  # fmt: skip
    texts = []
    for speculation in (True, False):
        with Engine.load(folder / method, device="cpu", speculation=speculation) as engine:
            outputs = engine.generate(prompts, max_output_len=60)
        texts.append([output.token_ids for output in outputs])
        ended = 0
        for n, output in enumerate(outputs):
            if n % 5 < 4 and output.finish_reason == "eos":
                ended += 1
                check_text(output.text, n % 5)
        assert ended >= 11
    assert texts[0] == texts[1]


def test_white_space_of_json_is_at_most_what_json_dumps_writes(folder: Path) -> None:
    from llguidance import LLMatcher

    with Engine.load(folder / "redrafter", device="cpu") as engine:
        tokenizer = engine.tokenizer
        more: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "array"}}}
        compact = {**more, "x-guidance": {"whitespace_flexible": False}}
        free = {**more, "x-guidance": {"whitespace_flexible": True}}
        value = {"a": [1, {"b": None}, []], "c": "x  y"}
        dumped, least = json.dumps(value), json.dumps(value, separators=(",", ":"))
        inner = f"{{ {dumped[1:]}"
        indented, wide = json.dumps(value, indent=1), dumped.replace(": ", ":  ")
        for grammar, taken in (
            ({"json_schema": more}, [dumped, least]), ({"json_object": True}, [dumped, least]),
            ({"json_schema": compact}, [least]),
            ({"json_schema": free}, [dumped, least, indented, wide, inner]),
        ):  # fmt: skip
            prepared = engine.prepare(Prompt(text="x", grammar=grammar)).grammar
            assert prepared is not None
            matcher = prepared._matcher
            assert isinstance(matcher, LLMatcher)
            for text in (dumped, least, indented, wide, inner, f"{dumped}\n"):
                own, ids = matcher.deep_copy(), tokenizer(text)["input_ids"]
                took = own.validate_tokens(ids) == len(ids)
                assert (took and own.consume_tokens(ids) and own.is_accepting()) == (text in taken)


def test_a_grammar_with_too_many_readings_ends_the_text_early(folder: Path) -> None:
    """As a limit does, and soon: its masks would take seconds of everybody's steps."""
    grammar = {"lark": 'start: s\ns: s s | s s s | "a"'}
    with Engine.load(folder / "redrafter", device="cpu") as engine:
        bias = {engine.tokenizer("a")["input_ids"][-1]: 100.0}
        prompt = Prompt(text="x", temperature=0, grammar=grammar, logit_bias=bias)
        (output,) = engine.generate(prompt, max_output_len=200)
    assert output.finish_reason == "length"
    assert 50 < len(output.token_ids) < 200
    assert set(output.text) == {"a"}


FAULTY: list[tuple[dict[str, Any], str]] = [
    ({"uniqueItems": True}, "uniqueItems"), ({"not": {"type": "string"}}, "not"),
    ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
    ({"type": "string", "pattern": "^(?!a)b"}, "pattern"), ({"contains": {}}, "contains"),
    ({"oneOf": [{"type": "string"}, {"minLength": 3}]}, "oneOf"), ({"type": "thing"}, "type"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"), ({"if": {}, "then": {}}, "if"),
    ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "patternProperties"),
    ({"$ref": "#/$defs/Nothing"}, "$ref"),
]  # fmt: skip
HARMLESS: list[tuple[dict[str, Any], list[str]]] = [
    ({"type": "string", "format": "path"}, ["format"]), ({"format": "password"}, ["format"]),
    ({"type": "array", "uniqueItems": False, "minContains": 1}, []),
    ({"propertyNames": {"type": "string"}, "then": {}, "dependentRequired": {}}, []),
    ({"oneOf": [{"const": 1, "title": "one"}, {"const": 2}]}, []),
    ({"title": "t", "description": "d", "examples": [1], "default": 1, "x-order": 3}, []),
    ({"$schema": "https://example.com/mine"}, ["$schema"]),
]  # fmt: skip
PLACES: list[tuple[str, Any]] = [
    ("properties.a.", lambda part: {"type": "object", "properties": {"a": part}}),
    ("items.anyOf.0.", lambda part: {"type": "array", "items": {"anyOf": [part]}, "minItems": 1}),
    ("$defs.A.", lambda part: {"$ref": "#/$defs/A", "$defs": {"A": part, "unused": {"not": {}}}}),
    ("allOf.0.additionalProperties.", lambda part: {"allOf": [{"additionalProperties": part}]}),
    ("", lambda part: part),
]


@pytest.mark.parametrize(("place", "make"), PLACES)
@pytest.mark.parametrize(("part", "keyword"), FAULTY)
def test_what_no_grammar_keeps_to_is_named(
    place: str, make: Any, part: dict[str, Any], keyword: str
) -> None:
    schema = make(part)
    fitted = fit_schema(schema)
    assert place + keyword in [fault.path for fault in fitted.faults]
    assert all(fault.path.startswith(place) for fault in fitted.faults)
    loose = fit_schema(schema, keeps_all=False)
    assert not loose.faults
    assert place + keyword in loose.left_out
    assert fit_schema(loose.schema).schema == loose.schema, "which is a grammar now"
    assert schema == make(part), "which nothing has changed"


@pytest.mark.parametrize(("place", "make"), PLACES)
@pytest.mark.parametrize(("part", "left_out"), HARMLESS)
def test_what_only_describes_is_left_out(
    place: str, make: Any, part: dict[str, Any], left_out: list[str]
) -> None:
    if "$schema" in part and place not in ("", "$defs.A."):
        place, make = PLACES[-1]
    fitted = fit_schema(make(part))
    assert not fitted.faults
    assert fitted.left_out == [place + keyword for keyword in left_out]
    assert not fit_schema(fitted.schema).left_out


def test_what_no_text_can_be_is_named() -> None:
    part = {"type": "string", "minLength": 5, "maxLength": 3}
    (fault,) = fit_schema(part).faults
    assert (fault.path, "minLength (5)" in fault.reason) == ("minLength", True)
    (fault,) = fit_schema({"allOf": [{"enum": []}]}).faults
    assert fault.path == "allOf.0.enum"


def test_a_schema_of_a_request(folder: Path) -> None:
    with Engine.load(folder / "redrafter", device="cpu") as engine:
        schema = {"properties": {"p": {"type": "string", "format": "path"}}}
        engine.prepare(Prompt(text="x", grammar={"json_schema": schema}))
        schema["properties"]["p"]["not"] = {"minLength": 3}  # type: ignore[assignment]
        with pytest.raises(SpecDecError, match=r"at properties\.p\.not"):
            engine.prepare(Prompt(text="x", grammar={"json_schema": schema}))


def test_grammars_that_are_wrong(folder: Path) -> None:
    with Engine.load(folder / "redrafter", device="cpu") as engine:
        for grammar, message in (
            ({"regex": "[a-c"}, "the regex is refused: .*unclosed character class"),
            ({"json_schema": {"type": 3}}, "the json_schema is refused: type must be"),
            ({"lark": "start: nothing"}, "the lark is refused"),
            ({"xml": "a"}, "not one of json_object, json_schema, regex, choice, lark"),
            ({"choice": ["a", ""]}, "the choice is refused: .* is not a list of texts"),
            ({"regex": 3}, "the regex is refused"),
        ):
            with pytest.raises(SpecDecError, match=message):
                engine.prepare(Prompt(text="x", grammar=grammar))
        with pytest.raises(SpecDecError, match="both grammar and end_ids"):
            engine.prepare(Prompt(text="x", grammar={"regex": "a"}, end_ids=()))


NAME, NAME_ID = "<filename>", 128
QUOTED = f'"a{NAME}b"'
NAMED: list[tuple[dict[str, Any], str, int]] = [
    ({"choice": [f"a{NAME}b"]}, f"a{NAME}b", 0),
    ({"json_schema": {"enum": [f"x{NAME}", f"x{NAME}y"]}}, f'"x{NAME}', 0),
    ({"regex": f"{NAME}+"}, NAME, 0),
    ({"lark": f"start: {QUOTED}"}, f"a{NAME}b", 0),
    ({"lark": f"start: {QUOTED} {NAME} B // {NAME}\nB: /x{NAME}/"}, f"a{NAME}b{NAME}x{NAME}", 1),
    ({"lark": f'start: "a" <[{NAME_ID}]>'}, f"a{NAME}", 1),
]


@pytest.mark.parametrize(("spec", "text", "num_special"), NAMED)
def test_the_name_of_a_special_token_is_text(
    tmp_path: Path, spec: dict[str, Any], text: str, num_special: int
) -> None:
    """It is that token where a Lark grammar names it outside of its texts."""
    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path))
    tokenizer.add_special_tokens({"additional_special_tokens": [NAME]})
    assert tokenizer.convert_tokens_to_ids(NAME) == NAME_ID
    output_ids: list[int] = []
    root = Tree(np.array([0]), np.array([-1]), np.array([0]))
    state = GrammarCompiler(tokenizer, [2]).compile(spec).follow(output_ids)
    while len(output_ids) < 60:
        logits = state.shape(root, torch.zeros(1, NAME_ID + 1))
        token = int(logits[0].argmax())
        assert not state.is_cut
        if token == 2 or not math.isfinite(float(logits[0, token])):
            break
        output_ids.append(token)
    assert tokenizer.decode(output_ids).startswith(text)
    assert output_ids.count(NAME_ID) == num_special
