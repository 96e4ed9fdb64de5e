"""Many requests with settings of their own: each gets exactly what it gets alone."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specdec.decode import loop
from specdec.decode.engine import TorchEngine
from specdec.decode.loop import Interrupted, Options, generate
from specdec.decode.prefill import PromptReader
from specdec.decode.prompt_requests import make_requests
from specdec.decode.requests import ActiveRequest, Request
from specdec.decode.sampling import SamplingParams
from specdec.errors import SpecDecError, UsageError
from specdec.files.tensor_file import TensorFile
from specdec.run.settings import RunSettings
from specdec.system import logs
from specdec.text import prompts as prompt_files
from specdec.text.prompts import Prompt, list_prompts, read_line
from tests.conftest import make_llama, make_tokenizer, read_error_lines
from tests.engines import OracleDrafter, run_cli_here, start_cli
from tests.methods import build_methods, load_method


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = make_llama(tmp_path_factory.mktemp("requests"), seed=5)
    make_tokenizer(target)
    build_methods(target, "redrafter", "pair", "draft", build=["--max-batch-size", 5])
    build_methods(target, "medusa", "eagle", "eagle3", "dflash", build=["--max-batch-size", 7])
    return target.parent


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "target")


METHODS = [
    "plain", "redrafter", "medusa", "eagle", "eagle, dynamic", "eagle3", "dflash", "draft_target",
    "draft_target, logits", "draft_target, tree", "prompt_lookup", "suffix", "lookahead",
]  # fmt: skip


@pytest.fixture(scope="module")
def engines(folder: Path) -> dict[str, TorchEngine]:
    """The same target after every method; "plain" is the engine that takes drafts, given none."""
    return {method: load_method(folder, method) for method in METHODS}


def mix_requests(number: int) -> list[Request]:
    """Prompts of 1 to 60 tokens, limits of 1 to 30, greedy and sampled, stops and ends."""
    dice = random.Random(2)
    requests = []
    shared = [dice.randrange(3, 128) for _ in range(40)]
    for index in range(number):
        prompt = [dice.randrange(3, 128) for _ in range(dice.randint(1, 20))]
        if index % 3 == 0:
            prompt = shared[: dice.randint(10, 40)] + prompt
        sampling = SamplingParams()
        if index % 2:
            sampling = SamplingParams(
                temperature=dice.choice([0.5, 0.9, 1.4]), top_k=dice.choice([0, 3, 20]),
                top_p=dice.choice([1.0, 0.9, 0.6]), seed=dice.randrange(2**64),
            )  # fmt: skip
        requests.append(
            Request(
                index=index,
                input_ids=prompt,
                max_output_len=dice.randint(1, 30),
                end_ids=frozenset([dice.randrange(128)] if index % 4 == 0 else []),
                sampling=sampling,
                stop=(chr(dice.randrange(97, 123)), "xq") if index % 5 == 0 else (),
            )
        )
    return requests


def summarize(result: ActiveRequest) -> tuple[list[int], str | None, str | None]:
    return result.output_ids, result.finish_reason, result.text


@pytest.fixture(scope="module")
def alone(engines: dict[str, TorchEngine], tokenizer: Any) -> list[Any]:
    """What each of forty requests gets by itself, one token a step."""
    options = Options(tokenizer=tokenizer)
    return [summarize(engines["plain"].generate([r], options)[0]) for r in mix_requests(40)]


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_forty_mixed_requests(
    engines: dict[str, TorchEngine], tokenizer: Any, alone: list[Any], method: str
) -> None:
    """Together and alone, with and without reused prefixes; equal seeds give plain's text."""
    requests = mix_requests(40)
    engine = engines[method]
    results = engine.generate(requests, Options(tokenizer=tokenizer))
    together = [summarize(r) for r in results]
    if method == "draft_target, logits":  # other random numbers where it is sampled
        greedy = [at for at, r in enumerate(requests) if r.sampling.is_greedy]
        assert [together[at] for at in greedy] == [alone[at] for at in greedy]
        alone = [
            summarize(engine.generate([request], Options(tokenizer=tokenizer))[0])
            for request in requests
        ]
    else:
        for request in requests[::8]:
            (result,) = engine.generate([request], Options(tokenizer=tokenizer))
            assert summarize(result) == alone[request.index]
    assert together == alone
    assert {reason for _, reason, _ in together} == {"length", "eos", "stop"}
    if method != "plain":
        assert sum(r.stats.num_accepted for r in results) > 0, "a draft is accepted here and there"
    before = engine.timing.num_reused_tokens
    reused = engine.generate(requests, Options(tokenizer=tokenizer, reuse_blocks=True))
    assert [summarize(r) for r in reused] == together
    assert engine.timing.num_reused_tokens - before > 300


def test_finished_rows_are_refilled(engines: dict[str, TorchEngine]) -> None:
    """Rows never idle while requests wait, and results keep the order of the requests."""
    engine = engines["plain"]
    limits = [12, 2, 2, 2, 2, 2, 2, 2]
    requests = [
        Request(index=n, input_ids=[5, n + 3], max_output_len=limit, end_ids=frozenset())
        for n, limit in enumerate(limits)
    ]
    sizes = []

    def watch(active: Sequence[ActiveRequest]) -> None:
        sizes.append(len(active))

    results = generate(
        engine.decoder, engine.drafter, requests, Options(max_batch_size=2, on_progress=watch)
    )
    assert [r.request.index for r in results] == list(range(8))
    assert [len(r.output_ids) for r in results] == limits
    # 14 tokens through one row and 12 through the other: 2 prompts, then steps of 2 and 1 prompt
    # in turn, and what is left of the long one.
    assert sizes[:5] == [2, 2, 1, 2, 1]
    assert sum(sizes) == sum(limits)


def test_shared_prefixes_come_from_the_cache(engines: dict[str, TorchEngine]) -> None:
    engine = engines["redrafter"]
    prefix = list(range(3, 53))
    requests = [
        Request(index=n, input_ids=[*prefix, 60 + n], max_output_len=6, end_ids=frozenset())
        for n in range(7)
    ]
    expected = [r.output_ids for r in engine.generate(requests)]
    before = engine.timing.num_reused_tokens
    results = engine.generate(requests, Options(reuse_blocks=True))
    assert [r.output_ids for r in results] == expected
    assert engine.timing.num_reused_tokens - before == 6 * len(prefix)
    assert len({tuple(tokens) for tokens in expected}) > 1
    again = [requests[0]] * 2  # the whole prompt is known: its last token is run all the same
    assert [r.output_ids for r in engine.generate(again, Options(reuse_blocks=True))] == (
        [expected[0]] * 2
    )


@pytest.mark.parametrize("position", [0, 3, 7, 8, 15])
@pytest.mark.parametrize("length", [1, 4, 7])
def test_stop_word_inside_a_block(
    engines: dict[str, TorchEngine], tokenizer: Any, position: int, length: int
) -> None:
    """A perfect drafter gets whole blocks accepted; the text still ends in mid-block."""
    engine = engines["plain"]
    prompt = [9, 41, 77]
    request = Request(index=0, input_ids=prompt, max_output_len=24, end_ids=frozenset())
    expected = engine.generate([request])[0].output_ids
    text = tokenizer.decode(expected, skip_special_tokens=True)
    pieces = [tokenizer.decode(expected[: n + 1], skip_special_tokens=True) for n in range(24)]
    word = pieces[position + 1][len(pieces[position]) - 1 :]  # its end is in the next token
    stopped = Request(
        index=0, input_ids=prompt, max_output_len=24, end_ids=frozenset(), stop=(word,)
    )
    drafter = OracleDrafter([expected], beams=1, length=length, quality=1.0, seed=0)
    result = generate(engine.decoder, drafter, [stopped], Options(tokenizer=tokenizer))[0]
    first = next(n for n, piece in enumerate(pieces) if word in piece)
    assert result.output_ids == expected[: first + 1]
    assert result.text == text.split(word)[0]
    assert result.finish_reason == "stop"


def test_logits_are_those_that_chose(engines: dict[str, TorchEngine]) -> None:
    requests = mix_requests(9)
    requests = [
        Request(
            index=r.index, input_ids=r.input_ids, max_output_len=r.max_output_len,
            end_ids=frozenset(),
        )
        for r in requests
    ]  # fmt: skip
    plain = engines["plain"].generate(requests, Options(keep_logits=True))
    for method in METHODS[1:]:
        results = engines[method].generate(requests, Options(keep_logits=True))
        for result, reference in zip(results, plain, strict=True):
            assert isinstance(result.logits, Tensor)
            assert isinstance(reference.logits, Tensor)
            assert result.logits.shape == (len(result.output_ids), 128)
            assert result.logits.argmax(-1).tolist() == result.output_ids
            torch.testing.assert_close(result.logits, reference.logits, rtol=1e-4, atol=1e-3)


def test_interruption_keeps_what_was_done(engines: dict[str, TorchEngine]) -> None:
    requests = [
        Request(index=n, input_ids=[4 + n], max_output_len=5 * (n + 1), end_ids=frozenset())
        for n in range(4)
    ]
    engine = engines["plain"]
    expected = [r.output_ids for r in engine.generate(requests)]
    steps = []

    def interrupt(active: Sequence[ActiveRequest]) -> None:
        steps.append(len(active))
        if len(steps) == 8:
            raise KeyboardInterrupt

    options = Options(max_batch_size=2, on_progress=interrupt)
    with pytest.raises(Interrupted) as caught:
        generate(engine.decoder, engine.drafter, requests, options)
    results = caught.value.results
    assert [r.request.index for r in results] == [0, 1, 2, 3]
    assert results[0].finish_reason == "length"
    assert results[1].finish_reason is None
    assert len(results[1].output_ids) > 3, "what an unfinished one has is kept"
    assert results[3].output_ids == []
    for result, whole in zip(results, expected, strict=True):
        assert result.output_ids == whole[: len(result.output_ids)]


def test_interruption_while_prompts_are_run(
    engines: dict[str, TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that have a row but no token yet are told of too."""
    requests = mix_requests(5)

    def interrupt(*args: Any, **options: Any) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(PromptReader, "plan", interrupt)
    engine = engines["plain"]
    with pytest.raises(Interrupted) as caught:
        generate(engine.decoder, engine.drafter, requests, Options(max_batch_size=2))
    assert [r.request.index for r in caught.value.results] == [0, 1, 2, 3, 4]
    assert all(r.output_ids == [] for r in caught.value.results)


# --- flags, files and the command ---


def make(prompts: list[dict[str, Any]], tokenizer: Any = None, **flags: Any) -> list[Request]:
    settings = RunSettings(engine_dir=Path("e"), **flags)
    read = [read_line("line", json.dumps(prompt)).prompt for prompt in prompts]
    return make_requests(read, settings, tokenizer)


def test_flags_and_lines_become_settings() -> None:
    ids: list[dict[str, Any]] = [{"input_ids": [1]}, {"input_ids": [2]}]
    assert [r.sampling for r in make(ids)] == [SamplingParams()] * 2
    assert [r.sampling for r in make(ids, top_k=5)] == [SamplingParams(temperature=1, top_k=5)] * 2
    drawn = make(ids, temperature="0.5,2", top_p=0.5, random_seed=4)
    assert [r.sampling.temperature for r in drawn] == [0.5, 2.0]
    assert {(r.sampling.top_p, r.sampling.seed) for r in drawn} == {(0.5, 4)}
    line = {
        "input_ids": [3], "max_output_len": 7, "temperature": 0, "top_k": 2, "top_p": 0.25,
        "seed": 2**64 - 1, "stop": "\n\n",
    }  # fmt: skip
    request = make([line], tokenizer=FakeTokenizer(), temperature="0.9", stop_words=["a"])[0]
    assert request.sampling == SamplingParams(top_k=2, top_p=0.25, seed=2**64 - 1)
    assert request.sampling.is_greedy
    assert (request.max_output_len, request.stop) == (7, ("\n\n",))
    assert make(ids, tokenizer=FakeTokenizer(), stop_words=["a", "b"])[1].stop == ("a", "b")


class FakeTokenizer:
    eos_token_id = None
    chat_template = None

    def decode(self, ids: list[int]) -> str:
        return str(ids)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"temperature": "0.5,1,2"}, "has 3 values for 2 prompts"),
        ({"temperature": "hot"}, "--temperature is 'hot'"),
        ({"temperature": "-1"}, "--temperature is '-1'"),
        ({"temperature": "nan"}, "--temperature is 'nan'"),
        ({"top_p": 0.0}, "--top-p is 0.0"),
        ({"top_p": 1.5}, "--top-p is 1.5"),
        ({"random_seed": 2**64}, "--random-seed is 18446744073709551616"),
        ({"stop_words": [""]}, "none empty"),
        ({"stop_words": ["a"]}, "stop words need a tokenizer"),
    ],
)
def test_wrong_flags(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match="|".join([message])):
        make([{"input_ids": [1]}, {"input_ids": [2]}], **flags)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "temperature": -1}', "temperature is -1"),
        ('{"prompt": "a", "temperature": NaN}', "NaN is not a JSON number"),
        ('{"prompt": "a", "top_k": 1.5}', "top_k is 1.5"),
        ('{"prompt": "a", "top_p": 0}', "top_p is 0"),
        ('{"prompt": "a", "top_p": true}', "top_p is True"),
        ('{"prompt": "a", "seed": -1}', "seed is -1"),
        ('{"prompt": "a", "stop": [""]}', "stop is ['']"),
        ('{"prompt": "a", "stop": 3}', "stop is 3"),
        ('{"prompt": "a", "max_output_len": 0}', "max_output_len is 0"),
        ('{"messages": []}', "messages is []"),
        ('{"messages": [{"role": "user"}]}', "messages is"),
        ('{"prompt": "a", "input_ids": [1]}', "exactly one of prompt, input_ids, messages"),
        ('{"prompt": "a", "temprature": 1}', "did you mean temperature?"),
        ('{"prompt": "a", "max_tokens": 1}', "did you mean max_output_len?"),
        ('{"prompt": "a", "top_k": -1, "seed": 1.5}', "2 problems"),
        ("{", "is not JSON"),
        ("[1]", "not a JSON object"),
        ('{"max_output_len": 3}', "exactly one of prompt, input_ids"),
        ('{"prompt": 3}', "prompt is 3, not a text"),
        ('{"prompt": null}', "prompt is None, not a text"),
        ('{"input_ids": [1.5]}', "input_ids is [1.5], not a list of token ids"),
        ('{"prompt": 3}\n\n{"prompt": "a"}\n{', "line 5 is not JSON"),
    ],
)
def test_wrong_lines(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(SpecDecError) as caught:
        list_prompts([], tmp_path / "p.jsonl", json=False)
    assert "line 2" in caught.value.message
    assert message in caught.value.message


def test_lines_that_windows_wrote(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"def a():\r\n\r\nclass B:\r\n")
    given = list_prompts([], tmp_path / "p.txt", json=False)
    assert given == [Prompt(text="def a():"), Prompt(text="class B:")]


def test_line_separators_inside_a_text(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\u2028b"}\r\n\n', encoding="utf-8")
    assert list_prompts([], tmp_path / "p.jsonl", json=False) == [Prompt(text="a\u2028b")]


def test_chat_template(folder: Path, tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "hi"}]
    with pytest.raises(SpecDecError, match="has no chat template"):
        make([{"messages": turns}], tokenizer=tokenizer)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] != 'user' %}"
        "{{ raise_exception('only users') }}{% endif %}[{{ m['content'] }}]{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    try:
        by_flag = make([{"prompt": "hi"}], tokenizer=tokenizer, apply_chat_template=True)[0]
        by_line = make([{"messages": turns}], tokenizer=tokenizer)[0]
        assert by_flag.input_text == by_line.input_text == "<s>[hi]>"
        assert by_flag.input_ids == by_line.input_ids
        assert by_flag.input_ids.count(tokenizer.bos_token_id) == 1
        with pytest.raises(SpecDecError, match="template refuses the messages: only users"):
            make([{"messages": [{"role": "x", "content": ""}]}], tokenizer=tokenizer)
    finally:
        tokenizer.chat_template = None


def run(folder: Path, *args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return run_cli_here(
        "run", "--engine-dir", folder / "redrafter-engine", "--tokenizer-dir", folder / "target",
        *args, **options,
    )  # fmt: skip


def test_streamed_text_is_the_text(folder: Path, tmp_path: Path) -> None:
    flags = ["--input-text", "def a", "x", "return", "--max-output-len", 20]
    flags += ["--temperature", "0.8", "--stop-words", "q", "zz"]
    whole = run(folder, *flags)
    assert whole.returncode == 0, whole.stderr
    streamed = run(folder, *flags, "--streaming", "--output-file", tmp_path / "out.txt")
    assert streamed.returncode == 0, streamed.stderr
    assert streamed.stdout == whole.stdout == (tmp_path / "out.txt").read_text()
    report = json.loads(run(folder, *flags, "--json").stdout)
    for output in report["outputs"]:
        index, text = output["index"], output["output_text"]
        assert f'Output [Text {index} Beam 0]: "{text}"\n' in whole.stdout
        assert "q" not in text
        assert "zz" not in text


def test_an_interrupted_stream_shows_what_was_done(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs that waited for their turn too, and what might have begun a stop word."""
    step, steps = loop.Batch.step, 0

    def interrupt(batch: loop.Batch) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise KeyboardInterrupt
        step(batch)

    monkeypatch.setattr(loop.Batch, "step", interrupt)
    prompts = tmp_path / "p.jsonl"
    lines = [{"prompt": text, "max_output_len": 9 if text == "a" else 2} for text in "abcdef"]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--input-file", prompts, "--no-speculation", "--stop-words", "never in it"]
    whole = run(folder, *flags)
    steps = 0
    streamed = run(folder, *flags, "--streaming")
    assert whole.returncode == streamed.returncode == 1
    assert streamed.stdout == whole.stdout
    assert read_error_lines(streamed.stderr)[0] == "interrupted: 5 of 6 prompts were finished"
    assert streamed.stdout.count("Output [Text ") == 6


def test_text_is_streamed_while_it_is_made(folder: Path) -> None:
    """What twenty steps made can be read while the next one has not begun."""
    process = start_cli(
        "run", "--engine-dir", folder / "redrafter-engine", "--tokenizer-dir", folder / "target",
        "--input-text", "abc", "--max-output-len", "400", "--end-id", "127", "--streaming",
        "--no-speculation", pauses=True,
    )  # fmt: skip
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1 << 16).decode()
    rest, stderr = process.communicate("go on\n", timeout=600)
    assert process.returncode == 0, stderr
    whole = run(folder, "--input-text", "abc", "--max-output-len", "400", "--end-id", "127")
    assert first + rest == whole.stdout
    assert 10 < len(first) < 100 < len(rest)


def test_progress_over_prompts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt counts once, when it ends; prefixes that were reused are told."""
    bars: list[tuple[str, int]] = []
    moved: list[int] = []

    @contextlib.contextmanager
    def track(label: str, *, total: int) -> Iterator[Callable[[int], None]]:
        bars.append((label, total))
        yield moved.append

    monkeypatch.setattr(logs, "track", track)
    flags = ["--input-text", *["def a"] * 7, "--max-output-len", 4, "--json"]
    done = run(folder, *flags, "--kv-cache-enable-block-reuse")
    assert done.returncode == 0, done.stderr
    assert bars == [("prompts", 7)]
    assert sum(moved) == 7
    prompt = json.loads(done.stdout)["outputs"][0]["input_ids"]
    assert json.loads(done.stdout)["stats"]["num_reused_tokens"] == 6 * (len(prompt) - 1)


def test_prompts_from_stdin(folder: Path) -> None:
    flags = ["--input-file", "-", "--json", "--max-output-len", 3]
    texts = run(folder, *flags, stdin="ab\n\ncd\n")
    assert [o["input_text"] for o in json.loads(texts.stdout)["outputs"]] == ["ab", "cd"]
    lines = run(folder, *flags, stdin='{"prompt": "ab", "max_output_len": 1}\n')
    assert len(json.loads(lines.stdout)["outputs"][0]["output_ids"]) == 1
    empty = run(folder, *flags, stdin="\n")
    assert read_error_lines(empty.stderr)[0] == "stdin holds no prompt"


def test_no_more_is_read_of_prompts_than_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file, of what one unpacks to, of a pipe and of stdin; and nothing of a device."""
    monkeypatch.setattr(prompt_files, "MAX_BYTES", 1000)
    files = {name: tmp_path / name for name in ("p.txt", "p.txt.gz", "pipe.txt")}
    os.mkfifo(files["pipe.txt"])

    def read(path: Path, text: bytes) -> list[prompt_files.Line]:
        threads = ThreadPoolExecutor(1)
        if path == prompt_files.STDIN:
            monkeypatch.setattr(sys, "stdin", io.StringIO(text.decode()))
        else:
            threads.submit(path.write_bytes, gzip.compress(text) if path.suffix == ".gz" else text)
        if path != files["pipe.txt"]:
            threads.shutdown()
        return prompt_files.read_prompts(path, "--input-file")

    for path in (*files.values(), prompt_files.STDIN):
        assert len(read(path, b"a\n" * 500)) == 500
        if path == files["pipe.txt"]:  # is read once, also where it is asked for again
            assert len(prompt_files.read_prompts(path, "--input-file")) == 500
            prompt_files._read_pipe.cache_clear()
        with pytest.raises(SpecDecError, match=r"holds more than 1000 bytes, as unpacked text"):
            read(path, b"a" * 1001)
    (device := tmp_path / "zero.txt").symlink_to("/dev/zero")
    with pytest.raises(SpecDecError, match=r"zero.txt is a device, not a file"):
        prompt_files.read_prompts(device, "--input-file")
    with pytest.raises(SpecDecError, match=r"/dev/zero is a device"):
        prompt_files.read_prompts(Path("/dev/zero"), "--input-file")


def test_log_probabilities_and_the_best_of_several(folder: Path, tmp_path: Path) -> None:
    """Lines ask for them as requests to the server do; transformers has the same of a prompt."""
    sampled = {"prompt": "cd", "temperature": 1, "max_output_len": 6}
    lines = [
        {"prompt": "abc", "logprobs": 2, "prompt_logprobs": True, "logit_bias": {"101": 100}},
        *({**sampled, "seed": seed, "logprobs": 0} for seed in (5, 6, 7)),
        {**sampled, "seed": 5, "best_of": 3},
    ]
    (path := tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = run(folder, "--input-file", path, "--max-output-len", 3, "--json")
    assert done.returncode == 0, done.stderr
    first, *others, best = json.loads(done.stdout)["outputs"]
    assert first["output_ids"] == [101] * 3
    assert [len(told["top"]) for told in first["logprobs"]] == [2] * 3
    model = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    ids = torch.tensor([first["input_ids"]])
    with torch.no_grad():
        wanted = model(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None]).flatten()
    assert first["prompt_logprobs"][0] is None
    told = [one["logprob"] for one in first["prompt_logprobs"][1:]]
    assert told == pytest.approx(wanted.tolist(), abs=1e-4)
    sums = [sum(one["logprob"] for one in output["logprobs"]) for output in others]
    assert len({tuple(output["output_ids"]) for output in others}) == 3
    assert best["output_ids"] == others[sums.index(max(sums))]["output_ids"]
    assert best["index"] == 4

    refused = run(folder, "--input-file", path)
    assert f"{path} line 1 asks for logprobs" in read_error_lines(refused.stderr)[0]
    refused = run(folder, "--input-file", path, "--json", "--streaming")
    assert "prompt 4 has best_of 3" in read_error_lines(refused.stderr)[0]


def test_logits_file(folder: Path, tmp_path: Path) -> None:
    flags = ["--input-text", "ab", "cd", "--max-output-len", 4, "--output-generation-logits"]
    done = run(folder, *flags, "--json", "--output-file", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    file = TensorFile(Path(report["generation_logits"]))
    for output in report["outputs"]:
        rows = file.read(f"output.{output['index']}")
        assert rows.argmax(-1).tolist() == output["output_ids"]
    failed = run(folder, *flags)
    assert failed.returncode == 2
    assert "needs a place" in read_error_lines(failed.stderr)[0]


def test_ctrl_c_shows_what_was_done(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    lines = [{"prompt": "ab", "max_output_len": 2}]
    lines += [{"prompt": "cd", "max_output_len": 500}] * 400
    prompts.write_text("\n".join(map(json.dumps, lines)))
    process = start_cli(
        "run", "--engine-dir", folder / "redrafter-engine", "--tokenizer-dir", folder / "target",
        "--input-file", prompts, "--json", "--end-id", "127", "--no-speculation", "--debug",
    )  # fmt: skip
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 1, stderr
    report = json.loads(stdout)
    assert report["interrupted"] is True
    assert len(report["outputs"]) == 401
    assert report["outputs"][-1]["finish_reason"] is None
    error, hint = read_error_lines(stderr)
    assert error.startswith("interrupted: ")
    assert error.endswith("of 401 prompts were finished")
