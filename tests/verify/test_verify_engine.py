"""A right engine is found right, and every kind of wrong one wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specdec.decode.api import Engine
from specdec.decode.outputs import Output
from specdec.decode.settings import DecodeSettings
from specdec.errors import SpecDecError, UsageError
from specdec.files.reading import read_json, write_json
from specdec.text.pretrained import load_tokenizer
from specdec.verify.chi_square import find_detectable_distance, fit_counts
from specdec.verify.engine import verify_engine
from specdec.verify.greedy import Text, compare_logits, compare_text, judge_in_float32
from specdec.verify.report import find_error, format_report
from specdec.verify.settings import VerifySettings
from tests.conftest import (
    make_llama,
    make_tokenizer,
    read_error_lines,
)
from tests.engines import make_engine, run_cli_here, save_weights
from tests.methods import build_methods

Report = dict[str, Any]
HALF = dict.fromkeys(("bfloat16", "float16"), "half precision")
SAMPLED = {"sampling": True, "num_samples": 100, "num_alone": 0, "max_output_len": 12}


@pytest.fixture(scope="module")
def redrafter(parent: Path, drafter: Path) -> Path:
    return make_engine(parent, parent / "target", drafter, beams=3, length=3)


def make_by_name(parent: Path, name: str, *build: object) -> Path:
    build_methods(parent / "target", name, build=build)
    return parent / f"{name}-engine"


@pytest.fixture(scope="module")
def draft_target(parent: Path) -> Path:
    return make_by_name(parent, "pair")


@pytest.fixture(scope="module")
def lookahead(parent: Path) -> Path:
    mode = ("--speculative-decoding-mode", "lookahead_decoding", "--max-draft-len", 11)
    return make_by_name(parent, "window", *mode)


@pytest.fixture(scope="module")
def plain(parent: Path) -> Path:
    return make_by_name(parent, "plain")


@pytest.fixture(scope="module")
def medusa(parent: Path) -> Path:
    return make_by_name(parent, "medusa")


@pytest.fixture(scope="module")
def eagle(parent: Path) -> Path:
    return make_by_name(parent, "eagle")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings of each engine that is opened."""
    seen: list[Any] = []
    honest = Engine.open

    def open_engine(settings: DecodeSettings, *args: Any) -> Engine:
        seen.append(settings)
        return honest(settings, *args)

    monkeypatch.setattr(Engine, "open", open_engine)
    return seen


def verify(engine: Path, model: Path, **flags: Any) -> Report:
    flags = {"max_output_len": 12, "num_alone": 1, **flags}
    report: Report = verify_engine(VerifySettings(engine_dir=engine, model_dir=str(model), **flags))
    error = find_error(report)
    assert (error is not None) == (report["verdict"] == "differs")
    head = {
        "exact": "PASS", "differs": "FAIL",
        "near-ties": f"PASS (near-ties in {HALF.get(report['dtype'], report['dtype'])})",
    }  # fmt: skip
    verdict = report["verdict"]
    assert format_report(report).startswith(f"{head[verdict]}: {engine}: {verdict}\n")
    return report


# ---- Right engines.


@pytest.mark.thorough
def test_a_redrafter_engine_is_exact(
    redrafter: Path, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each wait is for is told, and how far it is."""
    told: list[str] = []

    @contextlib.contextmanager
    def show_waiting(label: str, logger: object) -> Iterator[Any]:
        told.append(label)
        yield told.append

    monkeypatch.setattr("specdec.system.logs.show_waiting", show_waiting)
    report = verify(redrafter, parent / "target", sampling=True, num_samples=200)
    engine_runs = ["6 prompts", "prompt 0 alone", *["400 sampled requests"] * 2]
    assert [line.split(": ")[1].split(",")[0] for line in told[:4]] == engine_runs
    assert told[4].endswith("by transformers, token by token")
    assert told[5:] == [f"text {n} of 7" for n in range(1, 8)]
    assert (report["verdict"], report["divergences"]) == ("exact", [])
    assert report["lossy"] is False
    assert (report["prompts"], report["num_tokens"]) == (6, 7 * 12)
    assert report["method"] == "redrafter"
    assert report["alone"] == {"prompts": 1, "same": 1}
    assert 0 < report["logit_difference"] <= report["logit_bound"]
    sampling = report["sampling"]
    assert sampling["verdict"] == "exact"
    assert sampling["same_seeds"]["different"] == 0
    for test in sampling["tests"]:
        assert sum(cell["count"] for cell in test["cells"]) == 200
        assert np.isclose(sum(cell["expected"] for cell in test["cells"]), 200)
        assert test["num_cells"] > 5
        assert 0 < test["detectable_distance"] < 0.4


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "method", "flags"),
    [
        ("medusa", "medusa", {"medusa_choices": "[[0],[1]]"}),
        ("eagle", "eagle", {"eagle_choices": "[[0],[0,0],[2]]"}),
        ("eagle", "eagle", {"eagle_use_dynamic_tree": True, "eagle_dynamic_tree_max_top_k": 2,
                            "eagle_tree_tokens": 5}),
        ("draft_target", "prompt_lookup",
         {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}),
        ("draft_target", "suffix",
         {"suffix_max_tokens": 3, "suffix_min_probability": 0.0, "suffix_share_requests": True}),
        ("lookahead", "lookahead", {}),
        ("draft_target", "draft_target", {"draft_len": "3"}),
        ("draft_target", "draft_target", {"draft_len": "3", "use_logits": True}),
    ],
)  # fmt: skip
def test_every_way_to_draft_is_exact(
    name: str, method: str, flags: dict[str, Any], parent: Path, opened: list[Any],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Greedy and sampled; the engine gets the flags, and drafts in every step.

    The ratio rule draws with other random numbers: only its distribution is that without drafts.
    """
    if method == "draft_target":
        flags = {**flags, "draft_engine_dir": request.getfixturevalue("plain")}
    engine = request.getfixturevalue(name)
    opened.clear()
    report = verify(engine, parent / "target", **SAMPLED, **flags)
    assert (report["verdict"], report["method"]) == ("exact", method)
    assert report["num_drafted_steps"] > 0
    by_ratio = "use_logits" in flags
    assert (report["sampling"]["same_seeds"] is None) == by_ratio
    assert by_ratio or report["sampling"]["same_seeds"]["different"] == 0
    assert method != "draft_target" or report["acceptance_length"] > 2
    assert {name: getattr(opened[0], name) for name in flags} == flags
    # A step without drafts would prove nothing, so none may pause them unless that is asked for.
    assert opened[0].draft_budget == "fixed"
    assert [settings.no_speculation for settings in opened] == [False, True][: 2 - by_ratio]


def test_a_budget_that_is_asked_for_is_kept(
    medusa: Path, lookahead: Path, parent: Path, opened: list[Any]
) -> None:
    verify(medusa, parent / "target", num_alone=0, draft_budget="auto")
    assert [settings.draft_budget for settings in opened] == ["auto"]
    with pytest.raises(SpecDecError, match="is 4 deep, the engine has 3 Medusa heads"):
        verify(medusa, parent / "target", medusa_choices="[[0],[0,0],[0,0,0],[0,0,0,0]]")
    with pytest.raises(SpecDecError, match="drafts 1739 tokens a step"):
        verify(lookahead, parent / "target", lookahead_config="[30,30,30]")


def test_an_engine_of_two_ranks_is_exact(parent: Path, drafter: Path) -> None:
    engine = make_engine(
        parent, parent / "target", drafter, beams=3, length=3,
        convert=["--tp-size", 2],
    )  # fmt: skip
    report = verify(engine, parent / "target", num_alone=0, max_output_len=6)
    assert (report["verdict"], report["method"], report["prompts"]) == ("exact", "redrafter", 6)


def test_tokenizers_of_a_pair_are_compared(draft_target: Path, plain: Path, parent: Path) -> None:
    """Also for sampled text, which the tokenizer must not end."""
    flags = {**SAMPLED, "draft_engine_dir": plain, "draft_len": "2"}
    own = str(parent / "target")
    report = verify(draft_target, parent / "target", **flags, draft_tokenizer_dir=own)
    assert (report["verdict"], report["method"]) == ("exact", "draft_target")
    other = str(make_tokenizer(parent / "other-tokenizer", vocab=140))
    with pytest.raises(SpecDecError, match=r"\(140 tokens\) is not the one that .*plain-eng"):
        verify(draft_target, parent / "target", **flags, draft_tokenizer_dir=other)


def test_token_ids_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    target = make_llama(tmp_path, seed=4)
    engine = make_engine(tmp_path, target)
    report = verify(engine, target)
    assert (report["verdict"], report["prompts"]) == ("exact", 6)
    path = tmp_path / "texts.txt"
    path.write_text("a text\n")
    with pytest.raises(SpecDecError, match="holds texts, and .* has no tokenizer"):
        verify(engine, target, prompts=path)


def test_near_ties_in_half_precision(parent: Path, drafter: Path) -> None:
    """Here bfloat16 rounds one of these texts to another; a CPU that sums otherwise may not."""
    engine = make_engine(
        parent, parent / "target", drafter, beams=3, length=3,
        dtype="bfloat16",
    )  # fmt: skip
    report = verify(engine, parent / "target", max_output_len=32, num_alone=0)
    assert report["verdict"] == ("near-ties" if report["divergences"] else "exact")
    for found in report["divergences"]:
        assert found["near_tie"]
        assert abs(found["margin"]) <= found["bound"] < 0.5
        assert found["cause"] == "rounding"
        assert found["engine_token"] != found["model_token"]


def test_prompts_of_a_file(plain: Path, parent: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "one", "temperature": 0.9, "seed": 3}\n\n{"input_ids": [5, 6], "stop": "a"}\n'
    )
    report = verify(plain, parent / "target", prompts=path, num_alone=5)
    assert (report["verdict"], report["prompts"]) == ("exact", 2)
    assert report["alone"] == {"prompts": 2, "same": 2}


# ---- Wrong engines.


def test_one_changed_weight_is_found(parent: Path, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, parent / "target", optimize="none")
    path = engine / "weights.safetensors"
    tensors = load_file(path)
    tensors["transformer.layers.1.attention.dense.weight"][5, 7] += 20
    manifest = (engine / "manifest.json").read_bytes()
    save_weights(tensors, path)
    renewed = (engine / "manifest.json").read_bytes()
    (engine / "manifest.json").write_bytes(manifest)
    with pytest.raises(SpecDecError, match=r"weights\.safetensors has sha256 .*, not "):
        verify(engine, parent / "target", verify_hashes=True)
    (engine / "manifest.json").write_bytes(renewed)
    report = verify(engine, parent / "target")
    assert report["verdict"] == "differs"
    wrong = [found for found in report["divergences"] if not found["near_tie"]]
    assert wrong[0]["is_first"]
    assert wrong[0]["cause"] == "logits"
    assert wrong[0]["margin"] > wrong[0]["bound"]
    assert report["logit_difference"] > 100 * report["logit_bound"]
    assert "more than rounding" in format_report(report)
    error = find_error(report)
    assert error is not None
    assert "the engine computes other logits" in error.message


def break_outputs(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Output, int], Output]
) -> None:  # fmt: skip
    """Change every output of an engine that speculates."""
    honest = Engine.generate

    def generate(engine: Engine, *args: Any, **kept: Any) -> list[Output]:
        outputs = honest(engine, *args, **kept)
        if engine._settings.no_speculation:
            return outputs
        return [change(output, index) for index, output in enumerate(outputs)]

    monkeypatch.setattr(Engine, "generate", generate)


def replace_tokens(output: Output, tokens: list[int]) -> Output:
    logits = None if output.logits is None else output.logits[: len(tokens)]
    return dataclasses.replace(output, token_ids=tokens, logits=logits)


def test_a_broken_accept_rule_is_found(
    redrafter: Path, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_a_wrong_token(output: Output, index: int) -> Output:
        tokens = list(output.token_ids)
        tokens[4] = (tokens[4] + 1) % 128
        return replace_tokens(output, tokens)

    break_outputs(monkeypatch, accept_a_wrong_token)
    report = verify(redrafter, parent / "target", num_alone=0)
    assert report["verdict"] == "differs"
    firsts = [found for found in report["divergences"] if found["is_first"]]
    assert [(f["position"], f["cause"], f["near_tie"]) for f in firsts] == [
        (4, "choice", False)
    ] * 6


def test_a_broken_rule_of_sampling_is_found(
    redrafter: Path, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third sampled text is the prompt's first one: what may well be written."""
    sticky: dict[tuple[int, ...], list[int]] = {}

    def prefer_the_first(output: Output, index: int) -> Output:
        if output.logits is not None or index % 3:
            return output
        first = sticky.setdefault(tuple(output.prompt_ids), output.token_ids)
        return replace_tokens(output, first)

    break_outputs(monkeypatch, prefer_the_first)
    flags = {"num_alone": 0, "sampling": True, "num_samples": 200}
    report = verify(redrafter, parent / "target", **flags)
    assert (report["verdict"], report["divergences"]) == ("differs", [])
    assert {test["verdict"] for test in report["sampling"]["tests"]} == {"differs"}
    assert all(test["impossible"] == 0 for test in report["sampling"]["tests"])
    assert report["sampling"]["same_seeds"]["verdict"] == "differs"
    error = find_error(report)
    assert error is not None
    assert "in sampled text" in error.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda r, _: replace_tokens(r, r.token_ids[:-1]),
            "ends by length after 11 tokens, not at 12",
        ),
        (
            lambda r, _: dataclasses.replace(r, finish_reason="eos"),
            "which is not one of the model's end tokens",
        ),
    ],
)
def test_a_wrong_end_is_found(
    plain: Path, parent: Path, monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Output, int], Output], message: str,
) -> None:  # fmt: skip
    break_outputs(monkeypatch, change)
    report = verify(plain, parent / "target", num_alone=0)
    assert report["verdict"] == "differs"
    assert message in report["wrong_ends"][0]


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "e"}, "content": "x"}},
         "to the engine"),
        ({"decoder": {"type": "Replace", "pattern": {"String": "e"}, "content": "x"}},
         "tokens after"),
    ],
)  # fmt: skip
def test_an_engine_that_holds_a_wrong_tokenizer_is_found(
    plain: Path, parent: Path, tmp_path: Path, change: dict[str, Any], fact: str | None
) -> None:
    """Its text is the model's after the wrong tokens."""
    engine = tmp_path / "engine"
    shutil.copytree(plain, engine)
    make_tokenizer(engine / "tokenizer")
    path = engine / "tokenizer" / "tokenizer.json"
    write_json(path, read_json(path) | change)
    report = verify(engine, parent / "target", num_alone=0)
    assert report["verdict"] == ("exact" if fact is None else "differs")
    assert (fact is None) == (report["wrong_readings"] == [])
    if fact is not None:
        assert any(fact in wrong for wrong in report["wrong_readings"])
        error = find_error(report)
        assert error is not None
        assert "in its tokenizer: " in error.message


def test_a_loader_that_reads_texts_otherwise_is_found(
    plain: Path, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference reads tokenizer.json by itself."""
    from specdec.verify import engine

    def load(name: str, flag: str = "") -> Any:
        from tokenizers.normalizers import Lowercase

        tokenizer = load_tokenizer(name, flag)
        tokenizer.backend_tokenizer.normalizer = Lowercase()
        return tokenizer

    monkeypatch.setattr(engine, "load_tokenizer", load)
    report = verify(plain, parent / "target", num_alone=0)
    assert (report["verdict"], bool(report["wrong_readings"])) == ("differs", True)


# ---- What is refused.


def test_a_model_of_another_shape(plain: Path, tmp_path: Path) -> None:
    other = make_llama(tmp_path, layers=1, hidden=32, name="other")
    with pytest.raises(SpecDecError, match="hidden_size is 64 and 32; num_hidden_layers is 2 and"):
        verify(plain, other)


def test_quantized_and_too_long_engines(parent: Path, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, parent / "target")
    config = read_json(engine / "config.json")
    config["build_config"]["max_seq_len"] = 513
    write_json(engine / "config.json", config)
    with pytest.raises(SpecDecError, match="max_seq_len 513, more than the model's 512"):
        verify(engine, parent / "target")
    config["build_config"]["max_seq_len"] = 512
    config["pretrained_config"]["quantization"]["quant_algo"] = "FP8"
    write_json(engine / "config.json", config)
    with pytest.raises(SpecDecError, match=r"quantized \(FP8\)"):
        verify(engine, parent / "target")


def test_tensorrt_llm_engines(parent: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"version": "1.2.0", "build_config": {}})
    with pytest.raises(SpecDecError, match="is TensorRT-LLM's, .* it is not veri"):
        verify(tmp_path, parent / "target")


def test_errors_of_specdec_run_are_told(plain: Path, parent: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('\n{"promt": "a"}\n')
    with pytest.raises(SpecDecError, match=r"prompts.jsonl line 2: unknown key 'promt'"):
        verify(plain, parent / "target", prompts=path)
    path.write_text('{"input_ids": [5]}\n')
    with pytest.raises(SpecDecError, match="asks for 600 more, the engine's max_seq_len is 512"):
        verify(plain, parent / "target", prompts=path, max_output_len=600)
    with pytest.raises(SpecDecError, match="none of the built-in prompts is so short"):
        verify(plain, parent / "target", max_output_len=512)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"engine_dir": Path("e")}, "missing --model-dir"),
        ({"model_dir": "m", "engine_dir": Path("e"), "dtype": "float32"}, "--dtype with --engine"),
    ],
)
def test_wrong_usage(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        verify_engine(VerifySettings(**flags))


# ---- The test's own arithmetic, and the command.


def make_text(tokens: list[int], logits: torch.Tensor) -> Text:
    return Text(run="batch", prompt=3, input_ids=[9], output_ids=tokens, logits=logits)


@pytest.mark.parametrize(
    ("dtype", "bound"), [("bfloat16", 0.5), ("float16", 0.0625), ("float32", 16 * 2**-17)]
)
def test_near_ties_are_told_from_faults(dtype: str, bound: float) -> None:
    """The model prefers token 0 (logit 16) everywhere; token 1 lies below by a margin."""
    inside, outside = 0.9 * bound, 1.1 * bound
    for margin, wanted in ((inside, (True, "rounding")), (outside, (False, "logits"))):
        logits = torch.zeros(3, 4)
        logits[:, 0], logits[:, 1] = 16.0, 16.0 - margin
        own = logits.clone()
        own[1, 1] = 17.0  # the engine's own logits prefer what it wrote
        (found,) = compare_text(make_text([0, 1, 0], own), [0, 0, 0], logits, dtype)
        assert (found.near_tie, found.cause) == wanted
        assert (found.prompt, found.position, found.engine_token, found.model_token) == (3, 1, 1, 0)
        assert found.is_first
        assert np.isclose(found.margin, margin, rtol=1e-2)
        assert np.isclose(found.bound, bound)
        assert compare_logits(own, logits, dtype)[0] == pytest.approx(1 + margin, rel=1e-3)
    # The engine's own logits prefer token 0: no near-tie excuses that, wherever it comes.
    (found,) = compare_text(make_text([0, 1, 0], logits), [0, 0, 0], logits, dtype)
    assert (found.near_tie, found.cause) == (False, "choice")
    own = logits.clone()
    own[:, 1] = 17.0
    all_found = compare_text(make_text([1, 1, 0], own), [0, 0, 0], logits, dtype)
    assert [(f.position, f.is_first, f.cause) for f in all_found] == [
        (0, True, "logits"), (1, False, "logits"), (2, False, "choice"),
    ]  # fmt: skip


def test_the_model_is_asked_in_float32() -> None:
    """Ten spacings by the model's rounded logits; what float32 says decides."""
    rounded, own = torch.zeros(1, 4), torch.zeros(1, 4)
    rounded[0, 0], rounded[0, 1], own[0, 1] = 16.0, 16.0 - 10 / 16, 17.0
    text = make_text([1], own)

    class WideModel:
        def widen(self) -> None:
            pass

        def score(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
            return exact

    model: Any = WideModel()
    for below, wanted in ((9.0, "logits"), (7.0, "rounding"), (-2.0, "rounding")):
        exact = rounded.clone()
        exact[0, 1] = 16.0 - below / 16
        found = compare_text(text, [0], rounded, "bfloat16")
        (judged,) = judge_in_float32(model, found, [text])
        assert (judged.cause, judged.near_tie) == (wanted, wanted == "rounding")
        assert judged.margin == pytest.approx((10 if wanted == "logits" else below) / 16)
    # Far beyond the bound nothing is asked.
    rounded[0, 1] = 16.0 - 40 / 16
    found = compare_text(text, [0], rounded, "bfloat16")
    assert judge_in_float32(None, found, [text]) == found


def test_chi_square() -> None:
    """p-values of tables; the detectable distance is found as often as it says."""
    fit = fit_counts([60, 40], [0.5, 0.5])
    assert fit is not None
    assert (fit.num_cells, round(fit.statistic, 9), round(fit.p_value, 4)) == (2, 4.0, 0.0455)
    assert fit_counts([100, 0], [0.999, 0.001]) is None
    cells, number = 10, 500
    distance = find_detectable_distance(cells, number, 0.001)
    shift = np.where(np.arange(cells) % 2, 1, -1) * 2 * distance / cells
    drawn = np.random.Generator(np.random.Philox(key=1)).multinomial(
        number, 1 / cells + shift, size=2000
    )
    fits = [fit_counts(row.tolist(), [1 / cells] * cells) for row in drawn]
    found = np.mean([fit is not None and fit.p_value < 0.001 for fit in fits])
    assert 0.98 < found < 1


def test_the_command(plain: Path, parent: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def main():\n")
    flags = ("--prompts", prompts, "--max_output_len", 8, "--num-alone", 0, "--json")
    done = run_cli_here("verify", "--engine-dir", plain, "--model-dir", parent / "target", *flags)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["verdict"], report["prompts"], report["divergences"]) == ("exact", 1, [])
    make_llama(tmp_path, seed=8, name="stranger")
    make_tokenizer(tmp_path / "stranger")
    stranger = tmp_path / "stranger"
    done = run_cli_here("verify", "--engine-dir", plain, "--model-dir", stranger, *flags)
    assert done.returncode == 1
    assert json.loads(done.stdout)["verdict"] == "differs"
    fact, hint = read_error_lines(done.stderr)
    assert "prompt 0, position 0: the engine wrote " in fact
    assert "from this model" in hint
