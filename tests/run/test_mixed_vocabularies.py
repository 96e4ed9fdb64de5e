"""A draft model with tokens of its own: what both have is drafted, the text stays the target's."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec import Engine
from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.draft_model import ModelDrafter
from specdec.decode.drafters.draft_target import ModelChainDrafter, attach_draft
from specdec.decode.drafters.paced import PacedDrafter
from specdec.decode.engine import TorchEngine
from specdec.decode.loop import Options, generate
from specdec.decode.requests import Request
from specdec.decode.sampling import SamplingParams
from specdec.engine.step import Step
from specdec.engine.tree import pack_beams
from specdec.errors import SpecDecError
from specdec.text.token_map import SameTokens, SharedTokens, read_words, split_bytes
from tests.conftest import make_llama, read_error_lines
from tests.costs import make_costs
from tests.covering import cover
from tests.engines import call, make_noisy_copy, run_cli_here
from tests.run.statistics import FALSE_ALARM_RATE, check_first_tokens
from tests.tape import TapeRecorder
from tests.vocabularies import (
    OTHER_WORDS,
    TARGET_WORDS,
    list_tokens,
    save_tokenizer,
    translate_model,
)

PROMPTS = (
    "def import the self", "\u65e5\u672c and \u20ac 12345", "user print(x)    return",
    " caf\u00e9 selfish prince", "x", "a = [1, 2]\n\tdef f(y):",
)  # fmt: skip
# By name: kind of tokenizer, words, seed of the order of ids.
VOCABULARIES: dict[str, tuple[str, Sequence[str], int]] = {
    "copy": ("bytes", TARGET_WORDS, 0),
    "permuted": ("bytes", TARGET_WORDS, 5),
    "merges": ("bytes", OTHER_WORDS, 6),
    "pieces": ("pieces", OTHER_WORDS, 7),
    "own pieces": ("pieces", TARGET_WORDS, 8),
}
TARGETS = {"target": VOCABULARIES["copy"], "pieces target": VOCABULARIES["own pieces"]}
EXTERNAL = ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 6)
PAIRS = (
    ("target", "permuted"), ("target", "merges"), ("target", "pieces"), ("target", "own pieces"),
    ("pieces target", "merges"), ("pieces target", "pieces"), ("pieces target", "copy"),
)  # fmt: skip


def name_folder(parent: Path, name: str) -> Path:
    return parent / name.replace(" ", "-")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines NAME of targets, and of models that say nearly the same in other tokens."""
    parent = tmp_path_factory.mktemp("vocabularies")
    usual = list_tokens("bytes", TARGET_WORDS)
    source = make_forgetful(parent, len(usual))
    make_noisy_copy(source, parent / "noisy", noise=0.02)
    for name, (kind, words, seed) in {**TARGETS, **VOCABULARIES}.items():
        tokens = list_tokens(kind, words, seed)
        model = name_folder(parent, f"{name} hf")
        translate_model(source if name in TARGETS else parent / "noisy", model, usual, tokens)
        save_tokenizer(model, kind, tokens)
        build(parent, name, *(EXTERNAL if name in TARGETS else ()))
    return parent


def make_forgetful(parent: Path, vocab: int) -> Path:
    """A model whose next token is mostly that of the newest alone, however a text is split."""
    from transformers import LlamaForCausalLM

    folder = make_llama(parent, seed=3, vocab=vocab, name="source")
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.05
            layer.mlp.down_proj.weight *= 0.05
    model.save_pretrained(folder)
    return folder


def build(parent: Path, name: str, *flags: object, convert: Sequence[object] = ()) -> Path:
    model, engine = name_folder(parent, f"{name} hf"), name_folder(parent, name)
    checkpoint = name_folder(parent, f"{name} ckpt")
    call("convert", "--model-dir", model, "--output-dir", checkpoint, *convert)
    call(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", engine,
        "--max-batch-size", 250, "--tokenizer-dir", model, *flags,
    )  # fmt: skip
    return engine


def load_tokenizer(parent: Path, name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_folder(parent, f"{name} hf"))


@functools.cache
def load(
    parent: Path,
    target: str = "target",
    draft: str = "",
    draft_len: int | None = 4,
    use_logits: bool = False,
    tree_tokens: int | None = None,
) -> TorchEngine:
    engine = TorchEngine(name_folder(parent, target), device="cpu")
    if draft:
        own = TorchEngine(name_folder(parent, draft), device="cpu")
        tokens = None
        if draft != "copy" or target != "target":
            tokens = make_map(parent, target, draft, own.device)
        attach_draft(
            engine, own, draft_len=draft_len, use_logits=use_logits, tokens=tokens,
            tree_tokens=tree_tokens,
        )  # fmt: skip
    return engine


def make_map(
    parent: Path, target: str, draft: str, device: torch.device | None = None
) -> SharedTokens:
    ours, theirs = (load_tokenizer(parent, name) for name in (target, draft))
    return SharedTokens(ours, theirs, len(ours), len(theirs), device or torch.device("cpu"))


def make_requests(parent: Path, target: str, **sampling: Any) -> list[Request]:
    tokenizer = load_tokenizer(parent, target)
    return [
        Request(
            index=index,
            input_ids=tokenizer(PROMPTS[index % len(PROMPTS)])["input_ids"],
            max_output_len=4 + (index * 7) % 21,
            end_ids=frozenset([60 + index]) if index % 3 == 0 else frozenset(),
            sampling=SamplingParams(seed=index, **sampling),
        )
        for index in range(9)
    ]


def add_stops(requests: Sequence[Request], results: Sequence[Any], tokenizer: Any) -> list[Request]:
    """End some of the texts by words from the middle of them."""
    stopped = []
    for request, result in zip(requests, results, strict=True):
        text = tokenizer.decode(result.output_ids).replace("\ufffd", "")
        word = text[len(text) // 2 :][:2]
        is_ended = request.index % 2 == 1 and word.strip()
        stopped.append(dataclasses.replace(request, stop=(word,) if is_ended else ()))
    return stopped


def run(
    engine: TorchEngine, requests: Sequence[Request], tokenizer: Any, batch_size: int = 3
) -> list[Any]:
    options = Options(max_batch_size=batch_size, tokenizer=tokenizer)
    return generate(engine.decoder, engine.drafter, requests, options)


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampled": {"temperature": 0.7, "top_k": 40, "top_p": 0.95},
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("pair", "draft_len", "how"), cover(itertools.product(PAIRS, [1, 4, None, "tree"], SAMPLINGS))
)
def test_text_is_the_targets(
    folder: Path, pair: tuple[str, str], draft_len: Any, how: str
) -> None:  # fmt: skip
    target, draft = pair
    requests = make_requests(folder, target, **SAMPLINGS[how])
    tokenizer = load_tokenizer(folder, target)
    plain = run(load(folder, target), requests, tokenizer)
    requests = add_stops(requests, plain, tokenizer)
    plain = run(load(folder, target), requests, tokenizer)
    lengths = (
        {"tree_tokens": 4, "draft_len": 2} if draft_len == "tree" else {"draft_len": draft_len}
    )
    results = run(load(folder, target, draft, **lengths), requests, tokenizer)
    assert [r.output_ids for r in results] == [r.output_ids for r in plain]
    assert [r.finish_reason for r in results] == [r.finish_reason for r in plain]
    assert {"length", "stop"} <= {r.finish_reason for r in results}
    if draft_len in (4, "tree") and how == "greedy":
        drafted = sum(r.stats.num_draft_depth for r in results)
        accepted = sum(r.stats.num_accepted for r in results)
        assert accepted > LEAST_ACCEPTED * drafted, (accepted, drafted)


# What a copy of it with noise says in its own tokens is right for the most part, if they are
# understood, and nearly nothing if they are not.
LEAST_ACCEPTED = 0.3


@pytest.mark.parametrize("how", [*SAMPLINGS, "logits", "tree"])
def test_other_ids_of_the_same_tokens_change_nothing(folder: Path, how: str) -> None:
    """Every token, every draft and every accepted token is as with the usual ids."""
    sampling = {} if how == "tree" else SAMPLINGS.get(how, {"temperature": 0.9})
    requests = make_requests(folder, "target", **sampling)
    found = []
    for draft in ("copy", "permuted"):
        tree_tokens = 4 if how == "tree" else None
        engine = load(folder, "target", draft, 4, how == "logits", tree_tokens)
        assert isinstance(engine.drafter, ModelDrafter)
        assert engine.drafter.tokens.is_same == (draft == "copy")
        results = run(engine, requests, load_tokenizer(folder, "target"))
        found.append([(r.output_ids, r.stats.to_json()) for r in results])
    assert found[0] == found[1]
    assert sum(stats["num_accepted"] for _, stats in found[0]) > 20


@pytest.mark.thorough
@pytest.mark.parametrize(("target", "draft"), [("target", "merges"), ("pieces target", "copy")])
def test_ratio_keeps_the_distribution(folder: Path, target: str, draft: str) -> None:
    """By the restricted probabilities, normalized: of many tokens the draft model has no twin."""
    engine = load(folder, target, draft, 2, True)
    prompt = load_tokenizer(folder, target)("def import")["input_ids"]
    p_value, kept = check_first_tokens(engine, engine.drafter, prompt)
    assert 150 < kept < 2850, "some drafts are kept, some are not"
    assert p_value > FALSE_ALARM_RATE / 2


@pytest.mark.parametrize("name", VOCABULARIES)
def test_bytes_of_tokens(folder: Path, name: str) -> None:
    tokens = list_tokens(*VOCABULARIES[name])
    words = read_words(load_tokenizer(folder, name), len(tokens))
    assert words.texts == {n: text for n, (_, text) in enumerate(tokens) if text is not None}
    assert words.num_tokens == len(tokens)
    names = [token for token, _ in tokens]
    assert words.special == {
        "<unk>": names.index("<unk>"), "<s>": names.index("<s>"), "</s>": names.index("</s>"),
        "unk_token_id": names.index("<unk>"), "bos_token_id": names.index("<s>"),
        "eos_token_id": names.index("</s>"),
    }  # fmt: skip
    for text, number in words.by_bytes.items():
        assert tokens[number][1] == text
        others = [tokens[n][0] for n, (_, same) in enumerate(tokens) if same == text]
        assert len(others) == 1 or not tokens[number][0].startswith("<0x")
    cut = "\u65e5\u672c".encode()[1:]
    said = split_bytes(b"de" + cut + b" returne", words)
    assert b"".join(tokens[n][1] or b"" for n in said) == b"de" + cut + b" returne"
    assert len(said) < 14


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_shared_tokens_are_those_of_equal_bytes(folder: Path, target: str, draft: str) -> None:
    made = make_map(folder, target, draft)
    ours, theirs = (list_tokens(*{**TARGETS, **VOCABULARIES}[name]) for name in (target, draft))
    texts = [{text or name for name, text in tokens} for tokens in (ours, theirs)]
    number = len(texts[0] & texts[1])
    assert made.counts == (number, len(ours), len(theirs))
    logits = torch.arange(len(theirs), dtype=torch.float32)[None]
    restricted = made.restrict(logits)
    assert restricted.shape == (1, number)
    pairs = np.stack(made.name(np.arange(number)), 1).tolist()
    assert [first for first, _ in pairs] == sorted({first for first, _ in pairs})
    for place, (first, second) in enumerate(pairs):
        assert ours[first][1] == theirs[second][1]
        assert ours[first][1] is not None or ours[first][0] == theirs[second][0]
        assert int(restricted[0, place]) == second
        assert made.say(first) == [second]
    assert made.to_draft(torch.arange(number)).tolist() == [second for _, second in pairs]
    probs = torch.rand(2, number)
    spread = made.spread(probs)
    assert spread.shape == (2, len(ours))
    assert torch.equal(spread[:, [first for first, _ in pairs]], probs)
    assert torch.isclose(spread.sum(), probs.sum())
    for token, (_, text) in enumerate(ours):
        if text is not None:  # all 256 bytes are in both
            assert b"".join(theirs[n][1] or b"" for n in made.say(token)) == text


def test_prompts_are_said_as_the_draft_models_tokenizer_would(folder: Path, tmp_path: Path) -> None:
    made = make_map(folder, "pieces target", "merges")
    ours, theirs = (load_tokenizer(folder, name) for name in ("pieces target", "merges"))
    for prompt in PROMPTS:
        assert made.say_prompt(ours(prompt)["input_ids"]) == theirs(prompt)["input_ids"]
    names = [theirs.convert_ids_to_tokens(n) for n in range(len(theirs))]
    text = ours("user")["input_ids"]
    special = [ours.bos_token_id, *text, ours.eos_token_id, *text]
    said = made.say_prompt(special)
    user = theirs("user")["input_ids"]
    assert said == [*user, theirs.eos_token_id, *user], "its texts begin with no <s>"
    cut = [
        n for n, (_, text) in enumerate(list_tokens(*TARGETS["pieces target"])) if text == b"\xe6"
    ]
    said = made.say_prompt([*text, *cut])
    assert said is not None
    assert b"".join(list_tokens(*VOCABULARIES["merges"])[n][1] or b"" for n in said) == b" user\xe6"
    assert made.say_prompt([ours.bos_token_id]) is None, "nothing is left to run"
    tokens = list_tokens(*VOCABULARIES["merges"])
    save_tokenizer(tmp_path, "bytes", tokens, add_bos=True)
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(tmp_path)
    begun = SharedTokens(ours, own, len(ours), len(own), torch.device("cpu"))
    for ids in ([ours.bos_token_id, *text], text):
        assert begun.say_prompt(ids) == [names.index("<s>"), *user]


def test_special_tokens_are_paired_by_what_they_are_for(tmp_path: Path) -> None:
    """Not by their names: the end of one model's texts is a word of the other's."""
    tokenizers = []
    for end in ("</s>", "<|end|>"):
        tokens = [
            (name if name != "</s>" else end, text) for name, text in list_tokens("bytes", ())
        ]
        tokens.append(("</s>" if end != "</s>" else "<|end|>", b"?"))
        folder = save_tokenizer(tmp_path / end.strip("</>|"), "bytes", list_tokens("bytes", ()))
        path = folder / "tokenizer.json"
        document = json.loads(path.read_text())
        document["model"]["vocab"] = {name: n for n, (name, _) in enumerate(tokens)}
        for entry in document["added_tokens"]:
            entry["content"] = end if entry["content"] == "</s>" else entry["content"]
        path.write_text(json.dumps(document))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["eos_token"] = end
        for entry in settings.get("added_tokens_decoder", {}).values():
            entry["content"] = end if entry["content"] == "</s>" else entry["content"]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "special_tokens_map.json").unlink(missing_ok=True)
        from transformers import AutoTokenizer

        tokenizers.append(AutoTokenizer.from_pretrained(folder))
    made = SharedTokens(tokenizers[0], tokenizers[1], 260, 260, torch.device("cpu"))
    assert (made.say(2), made.counts) == ([2], (259, 260, 260))
    assert 259 not in made.name(np.arange(259))[0]


def test_a_token_without_a_twin_is_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the draft model has nothing to say for it."""
    requests = make_requests(folder, "target")
    tokenizer = load_tokenizer(folder, "target")
    expected = [r.output_ids for r in run(load(folder), requests, tokenizer)]
    engine = load(folder, "target", "merges", 3)
    honest = SharedTokens.say
    unsaid: list[int] = []

    def say(tokens: SharedTokens, token: int) -> Sequence[int]:
        said = honest(tokens, token)
        if len(said) > 1:
            unsaid.append(token)
        return said if len(said) == 1 else []

    monkeypatch.setattr(SharedTokens, "say", say)
    results = run(engine, requests, tokenizer)
    assert [r.output_ids for r in results] == expected
    assert len(unsaid) > 2
    assert sum(r.stats.num_draft_tokens for r in results) > 100


def test_texts_that_outgrow_the_draft_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end without drafts; others go on."""
    requests = make_requests(folder, "target")
    tokenizer = load_tokenizer(folder, "target")
    expected = [r.output_ids for r in run(load(folder), requests, tokenizer)]
    engine = load(folder, "target", "merges", 3)
    whole = sum(r.stats.num_draft_tokens for r in run(engine, requests, tokenizer))
    assert isinstance(engine.drafter, ModelChainDrafter)
    short = dataclasses.replace(engine.drafter.model, max_seq_len=20)
    monkeypatch.setattr(engine.drafter, "model", short)
    results = run(engine, requests, tokenizer)
    assert [r.output_ids for r in results] == expected
    assert 0 < sum(r.stats.num_draft_tokens for r in results) < whole


def test_vocabularies_with_too_little_in_common(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"word{n}": n for n in range(290)} | {c: 290 + n for n, c in enumerate("abcdefghij")}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="word0"))
    ).save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    strange = AutoTokenizer.from_pretrained(tmp_path)
    target = load_tokenizer(folder, "target")
    with pytest.raises(SpecDecError) as caught:
        SharedTokens(target, strange, len(target), 300, torch.device("cpu"))
    assert "10 tokens are in both vocabularies, of 3" in caught.value.message
    assert "300 of the draft model: fewer than 30, a tenth of the smaller" in caught.value.message
    assert isinstance(SameTokens(5, 4).say_prompt([4]), type(None))

    class Slow:
        name_or_path = "somewhere"

    with pytest.raises(SpecDecError, match="somewhere is Slow, of which the bytes"):
        read_words(Slow(), 9)


def test_the_commands(folder: Path) -> None:
    """The run, with both tokenizers from the engines; other options of drafting; the proof."""
    common = [
        "run", "--engine-dir", folder / "target", "--input-text", "def import", "x",
        "--max-output-len", 12, "--json",
    ]  # fmt: skip
    draft = ["--draft-engine-dir", folder / "pieces"]
    shared = ["--draft-vocabulary", "shared"]
    plain = run_cli_here(*common, "--no-speculation")
    expected = [output["output_ids"] for output in json.loads(plain.stdout)["outputs"]]
    refused = run_cli_here(*common, *draft)
    assert refused.returncode == 1
    assert "the tokenizers differ" in refused.stderr
    assert "--draft-vocabulary shared" in read_error_lines(refused.stderr)[1]
    suffix = ["--suffix-max-tokens", 3, "--suffix-min-probability", 0, "--draft-len", 3]
    for flags in (
        ["--draft-len", "auto"],
        ["--draft-len", 3, "--draft-budget", "auto", "--draft-tokenizer-dir", folder / "pieces-hf"],
        [*suffix, "--draft-chain", "suffix,draft_target"],
        ["--draft-target-model-config", "[3,[0],[0],True]"],
    ):  # fmt: skip
        done = run_cli_here(*common, *draft, *shared, *flags)
        assert done.returncode == 0, done.stderr
        assert "are in both vocabularies" in done.stderr
        assert [o["output_ids"] for o in json.loads(done.stdout)["outputs"]] == expected
    same = run_cli_here(*common, "--draft-engine-dir", folder / "copy", *shared, "--draft-len", 3)
    assert same.returncode == 0, same.stderr
    assert "--draft-vocabulary shared is not needed" in same.stderr
    alone = run_cli_here(*common, *shared)
    assert alone.returncode == 2
    assert "--draft-vocabulary without --draft-engine-dir" in alone.stderr
    proof = run_cli_here(
        "verify", "--engine-dir", folder / "target", "--model-dir", folder / "target-hf", *draft,
        *shared, "--draft-len", 3, "--max-output-len", 8, "--num-alone", 1, "--json",
    )  # fmt: skip
    assert proof.returncode == 0, proof.stderr
    assert json.loads(proof.stdout)["verdict"] == "exact"


def test_one_tree_with_other_drafts_leaves_the_cache_true(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the others' path is emitted, what the draft model has run beyond it is dropped."""
    requests = make_requests(folder, "target")
    tokenizer = load_tokenizer(folder, "target")
    expected = [r.output_ids for r in run(load(folder), requests, tokenizer)]

    class Oracle(Drafter):
        """Knows the next two tokens."""

        max_draft_tokens = max_draft_depth = 2

        def propose(self, requests: Sequence[Any]) -> list[Candidates]:
            beams = [expected[r.request.index][len(r.output_ids) :][:2] for r in requests]
            return [
                Candidates(pack_beams(r.output_ids[-1], np.array([beam])))
                for r, beam in zip(requests, beams, strict=True)
            ]

    engine = load(folder, "target", "merges", 3)
    model = engine.drafter
    assert isinstance(model, ModelChainDrafter)
    chain = PacedDrafter([[Oracle(), model]], make_costs(), is_fixed=True)
    honest, run_model = model.propose, model.decoder.forward
    ran: dict[tuple[int, int], int] = {}  # (row, position): the token there
    checked = 0

    def forward(step: Step, cache: Any, *tokens: Any) -> torch.Tensor:
        for line, row in enumerate(step.rows.tolist()):
            pairs = [*zip(step.positions[line].tolist(), step.tokens[line].tolist(), strict=True)]
            for place, token in reversed(pairs):  # padding stands where the first token does
                ran[row, place] = token
        return run_model(step, cache, *tokens)

    def propose(active: Sequence[Any]) -> list[Candidates]:
        nonlocal checked
        for request in active:
            past = int(model._cache.past_lens[request.row])
            ids = model._read(request).ids
            assert [ran[request.row, place] for place in range(past)] == ids[:past]
            checked += past > 0
        return honest(active)

    monkeypatch.setattr(model, "propose", propose)
    monkeypatch.setattr(model.decoder, "forward", forward)
    options = Options(max_batch_size=3, tokenizer=tokenizer)
    results = generate(engine.decoder, chain, requests, options)
    assert [r.output_ids for r in results] == expected
    assert checked > 10


def test_commands_around_the_run(folder: Path) -> None:
    """From Hugging Face folders in one command; the fastest length; Python's streams."""
    words = ["--draft-vocabulary", "shared"]
    made = run_cli_here(
        "generate", "--model-dir", folder / "target-hf", "--draft-model-dir", folder / "merges-hf",
        *words, "--draft-len", 3, "--no-cache", "--max-output-len", 12, "--json", "def import",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    output = json.loads(made.stdout)["outputs"][0]
    with Engine.load(
        folder / "target", draft=folder / "merges", draft_vocabulary="shared", draft_len=3,
        device="cpu",
    ) as engine:  # fmt: skip
        tokens = [t for e in engine.stream("def import", max_output_len=12) for t in e.token_ids]
    assert tokens == output["output_ids"]


@pytest.mark.parametrize("how", SAMPLINGS)
def test_graphs(folder: Path, how: str) -> None:
    """Where drafts are made before the host knows them, their tokens change on the device."""
    requests = make_requests(folder, "target", **SAMPLINGS[how])
    tokenizer = load_tokenizer(folder, "target")
    plain = run(load(folder), requests, tokenizer)
    engine, draft = (
        TorchEngine(folder / name, device="cpu", recorder=TapeRecorder())
        for name in ("target", "merges")
    )
    tokens = make_map(folder, "target", "merges")
    attach_draft(engine, draft, draft_len=3, use_logits=False, tokens=tokens)
    results = run(engine, requests, tokenizer)
    assert [r.output_ids for r in results] == [r.output_ids for r in plain]
    known = run(load(folder, "target", "merges", 3), requests, tokenizer)
    assert [r.stats for r in results] == [r.stats for r in known]
