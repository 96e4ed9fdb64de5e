"""Each row of each table of contradictions happens to a command, with its fact and its hint.

Every call of `refuse_contradictions` in the product is found: a row without an example fails here,
whatever module it is in.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UsageError
from specdec.options import Contradiction
from specdec.run.pipeline import check_shows_drafts
from tests.conftest import ROOT, read_error_lines
from tests.core.templates import match_template
from tests.engines import run_cli_here

FOLDERS = (
    "specdec generate convert build run serve train export verify audit measure doctor match recipe"
)
CONVERT = "convert --output-dir o"
TARGET = f"{CONVERT} --model-dir m"
ADDED = f"{CONVERT} --base-model-checkpoint-dir b"
EXPORT = "export --output-dir o --to hf"
GENERATE = "generate abc --model-dir m"
RUN = "run --engine-dir e --input-text a"
DATA = "train data --input i --base-url http://127.0.0.1:1/v1 --model m --output"
TRAIN = "train --model-dir m --data d --output-dir o"
EAGLE = f"{TRAIN} --method eagle"
VERIFY = "verify --engine-dir e --model-dir m"
LEAVE, ONE, LEAVE_ONE = "leave it out", "give one of them", "leave one of them out"
IDLE = "has no effect with --no-speculation"
# By the module that refuses: a command line, the fact and the hint. e is a folder with config.json.
EXAMPLES: dict[str, list[tuple[str, str, str]]] = {
    "specdec.build.pipeline": [
        ("build --output-dir e --triton-parameters a=b",
         "--triton-parameters has no effect without --emit-triton", LEAVE),
        ("build --output-dir e --emit-triton t --emit-script s.sh --checkpoint-dir c",
         "--emit-triton describes an engine that is there, --emit-script one that is not yet",
         "build the engine first; then call it with --output-dir and --emit-triton alone"),
        ("build --output-dir e --emit-triton t",
         "--emit-triton needs the tokenizer's folder as the server will see it",
         "give --triton-parameters tokenizer_dir=DIR"),
        ("build --output-dir e --emit-triton t --triton-parameters tokenizer_dir=d draft.a=b",
         "--triton-parameters draft.a without --triton-draft-engine-dir", "give the draft engine"),
    ],
    "specdec.serve.models": [
        ("serve", "missing --model-dir, or --engine-dir",
         "give it on the command line or in a --config recipe"),
        ("serve --model-dir o/m --engine-dir e", "--model-dir and --engine-dir are both given",
         LEAVE_ONE),
        ("serve --model-dir o/m --draft-model-dir o/s --draft-engine-dir e",
         "--draft-model-dir and --draft-engine-dir are both given", LEAVE_ONE),
        ("serve --engine-dir e --quantization int8", "--quantization without --model-dir",
         "give the model, or leave it out: an engine has been made with its drafter"),
        ("serve --engine-dir e --served-model-name=", "--served-model-name is empty",
         "give a name, or leave it out"),
    ],
    "specdec.doctor.cli": [
        ("doctor --clear-cache --engine-dir e",
         "--clear-cache does nothing else, and --engine-dir was given too",
         "clear the cache first, then check the engine"),
    ],
    "specdec.convert.flags": [
        (f"{TARGET} --base-model-checkpoint-dir b",
         "--model-dir and --base-model-checkpoint-dir are both given", ONE),
        (CONVERT, "missing --model-dir",
         "give the target: --model-dir, or --base-model-checkpoint-dir for an existing checkpoint"),
        (f"{TARGET} --medusa-model-dir a --drafter-model-dir b",
         "--drafter-model-dir and --medusa-model-dir are both given",
         "a checkpoint holds one drafter: give one of them"),
        (f"{TARGET} --speculative-decoding-mode mtp --eagle-model-dir b",
         "--eagle-model-dir and --speculative-decoding-mode mtp, which takes the head in"
         " --model-dir, are both given", LEAVE_ONE),
        *(
            (f"{TARGET} --{option}", f"--{option.split()[0]} has no effect without --{folder}",
             "give the drafter's folder, or leave the option out")
            for folder, option in (
                ("drafter-model-dir", "redrafter-num-beams 4"),
                ("drafter-model-dir", "redrafter-draft-len-per-beam 4"),
                ("drafter-model-dir", "redrafter-no-greedy-search"),
                ("drafter-model-dir", "redrafter-num-beams 4 --medusa-model-dir a"),
                ("medusa-model-dir", "num-medusa-heads 2"),
                ("medusa-model-dir", "num-medusa-layers 1"),
                ("medusa-model-dir", "max-medusa-token-len 9"),
                ("eagle-model-dir", "num-eagle-layers 2"),
                ("eagle-model-dir", "max-draft-len 4"),
                ("eagle-model-dir", "max-non-leaves-per-layer 4"),
                ("dflash-model-dir", "dflash-max-draft-len 2"),
            )
        ),
        (ADDED, "--base-model-checkpoint-dir without a drafter leaves nothing to convert",
         "give the drafter to add to the checkpoint: --drafter-model-dir or --medusa-model-dir or"
         " --eagle-model-dir or --dflash-model-dir or --mtp-model-dir or"
         " --mtp-assistant-model-dir"),
        (f"{ADDED} --medusa-model-dir a --lora-dir l",
         "--lora-dir adds to a Hugging Face model, not to --base-model-checkpoint-dir",
         "give the model as --model-dir"),
        (f"{TARGET} --lora-dir l --quantization fp8",
         "--lora-dir and --quantization are both given, and the calibration runs the model without"
         " the adapter",
         "quantize with specdec-build --quantization int8|int4; or merge the adapter with PEFT's"
         " merge_and_unload, and convert what its save_pretrained writes"),
        *(
            (f"{TARGET} {option}", f"{option.split()[0]} has no effect without --quantization",
             "give --quantization fp8, or leave the option out")
            for option in ("--calib-size 5", "--kv-cache-dtype fp8", "--group-size 32")
        ),
        (f"{ADDED} --medusa-model-dir a --quantization fp8",
         "--quantization takes a Hugging Face target, not --base-model-checkpoint-dir",
         "give the target as --model-dir: the calibration runs it with transformers"),
        (f"{TARGET} --quantization nvfp4 --group-size 32",
         "--group-size has no effect with --quantization nvfp4: there is nothing to choose", LEAVE),
        (f"{TARGET} --quantization int4_awq --group-size 48",
         "--group-size is 48; --quantization int4_awq has groups of 32, 64, 128",
         "give 128, or leave it out"),
        (f"{TARGET} --quantization fp8_pc_pt --calib-size 3",
         "--calib-size has no effect: --quantization fp8_pc_pt needs no calibration",
         "leave it out, or give --kv-cache-dtype fp8, which does"),
        *(
            (f"{TARGET} --quantization {option}",
             f"--quantization {option.split()[0]} without --calibration-data",
             "give a .txt, .jsonl or .json file of texts like those to be decoded: the scales come"
             " from them")
            for option in ("fp8", "int4_awq", "fp8_pc_pt --kv-cache-dtype fp8")
        ),
        (f"{TARGET} --medusa-model-dir a --pp-size 2",
         "--pp-size is 2, but an engine with a drafter has no pipeline stages",
         "use --tp-size, or leave --pp-size out"),
        (f"{TARGET} --use-embedding-sharing",
         "--use-embedding-sharing is not for --trtllm-version 1.2: since 0.16, TensorRT-LLM itself"
         " shares a head that equals the embedding", "leave it out, or convert for 0.14"),
        (f"{TARGET} --trtllm-version 0.14 --use-embedding-sharing --drafter-model-dir d",
         "--use-embedding-sharing has no effect on a checkpoint with a ReDrafter drafter or made"
         " from another one: their head is always written", LEAVE),
        (f"{ADDED} --medusa-model-dir a --moe-tp-size 2",
         "--moe-tp-size and --moe-ep-size have no effect with --base-model-checkpoint-dir",
         "leave them out: the checkpoint's experts stay as they are split"),
        (f"{TARGET} --embedding-sharding-dim 2 --use-parallel-embedding",
         "--embedding-sharding-dim is 2", "give 0 (vocabulary) or 1 (hidden size)"),
        (f"{TARGET} --embedding-sharding-dim 0",
         "--embedding-sharding-dim has no effect without --use-parallel-embedding",
         "give both, or neither"),
    ],
    "specdec.export.settings": [
        (EXPORT, "missing --model-dir", "give the drafter's target, or --checkpoint-dir"),
        (f"{EXPORT} --checkpoint-dir c --dtype float32",
         "--dtype has no effect with --checkpoint-dir: its weights keep their type",
         "leave it out, or convert the checkpoint again with it"),
        (f"{EXPORT} --model-dir m --gguf-type F32",
         "--gguf-type has no effect without --to gguf", LEAVE),
        (f"{EXPORT} --model-dir m --trtllm-version 1.3",
         "--trtllm-version has no effect without --to trtllm-pytorch", LEAVE),
        (f"{EXPORT} --model-dir m --deploy k8s --audit-image i",
         "--deploy writes manifests of vLLM", "give --to vllm, or leave it out"),
        ("export --output-dir o --to vllm --model-dir m --deploy k8s",
         "missing --audit-image", "give an image that has specdec with its extra audit"),
        *(
            (f"{EXPORT} --model-dir m {option}",
             f"{option.split()[0]} has no effect without --deploy", LEAVE)
            for option in (
                "--audit-image i", "--image i", "--storage c", "--replicas 3", "--gpus 2",
            )
        ),
    ],
    "specdec.generate.settings": [
        (f"{GENERATE} --input-file f", "prompts and --input-file are both given", LEAVE_ONE),
        (f"{GENERATE} --no-cache --force", "--force has no effect with --no-cache", LEAVE_ONE),
        (f"{GENERATE} --draft-vocabulary shared", "--draft-vocabulary without --draft-model-dir",
         "give the draft model, or leave it out"),
        (f"{GENERATE} --draft-tree-tokens 4", "--draft-tree-tokens without --draft-model-dir",
         "give the draft model, or leave it out"),
        (f"{GENERATE} --drafter-model-dir y --draft-len 4",
         "--draft-len 4 without --draft-model-dir",
         "give the draft model, or 'auto', which adapts the length of any drafts"),
        (f"{GENERATE} --max-seq-len 64 --max-output-len 64",
         "--max-output-len 64 leaves a prompt no room in --max-seq-len 64",
         "lower the first, or raise the second"),
    ],
    "specdec.run.settings": [
        (f"{RUN} --use-py-session",
         "--use-py-session: TensorRT-LLM's Python session cannot run speculative engines",
         "leave it out; specdec-run uses the C++ session"),
        (f"{RUN} --num-beams 2",
         "--num-beams is 2: speculative decoding has no beam search over the output",
         "leave it out; ReDrafter's own beams are chosen by specdec-convert"),
        (f"{RUN} --show-drafts --no-speculation", f"--show-drafts {IDLE}", LEAVE_ONE),
        (f"{RUN} --acceptance-output a --no-speculation", f"--acceptance-output {IDLE}", LEAVE_ONE),
        (f"{RUN} --show-drafts --streaming",
         "--show-drafts and --streaming: what is rejected is known when a text is complete",
         "leave --streaming out, or add --json, whose lines say how each token came about"),
        (f"{RUN} --chat-template chatml",
         "--chat-template has no effect on --input-text without --apply-chat-template",
         "add --apply-chat-template"),
        ("run --engine-dir e", "give exactly one of --input-text and --input-file",
         'for example --input-text "def main():"'),
    ],
    "specdec.run.pipeline": [
        ("plain", "--show-drafts has no effect with an engine that runs plain", LEAVE),
        ("untold", "--show-drafts: TensorRT-LLM does not report which tokens medusa drafted",
         "leave it out, or build the engine with --backend torch"),
        ("wordless", "--show-drafts needs a tokenizer, and the engine holds none",
         "give the base model's folder as --tokenizer-dir, or add --json"),
    ],
    "specdec.methods.budget": [
        (f"{RUN} --no-speculation --draft-budget auto", f"--draft-budget {IDLE}", LEAVE_ONE),
        (f"{RUN} --no-speculation --draft-len auto", f"--draft-len auto {IDLE}", LEAVE_ONE),
    ],
    "specdec.methods.chain": [
        (f"{RUN} --no-speculation --draft-chain suffix,prompt_lookup", f"--draft-chain {IDLE}",
         LEAVE_ONE),
    ],
    "specdec.methods.draft_target": [
        (f"{RUN} --no-speculation --draft-engine-dir e", f"--draft-engine-dir {IDLE}", LEAVE_ONE),
    ],
    "specdec.methods.lookahead": [
        (f"{RUN} --no-speculation --lookahead-config [3,3,3]", f"--lookahead-config {IDLE}",
         LEAVE_ONE),
    ],
    "specdec.methods.ngram": [
        (f"{RUN} --no-speculation --ngram-table t", f"--ngram-table {IDLE}", LEAVE_ONE),
    ],
    "specdec.methods.prompt_lookup": [
        (f"{RUN} --no-speculation --prompt-lookup-num-tokens 3",
         f"--prompt-lookup-num-tokens {IDLE}", LEAVE_ONE),
        (f"{RUN} --draft-engine-dir e --prompt-lookup-num-tokens 3",
         "--prompt-lookup-num-tokens and --draft-engine-dir are both given",
         "let one or the other draft"),
        (f"{RUN} --prompt-lookup-config [10,2,[0]] --max-matching-ngram-size 3",
         "--prompt-lookup-config and --max-matching-ngram-size are both given",
         "use one way or the other"),
    ],
    "specdec.methods.suffix": [
        (f"{RUN} --no-speculation --suffix-max-tokens 3", f"--suffix-max-tokens {IDLE}", LEAVE_ONE),
    ],
    "specdec.train.data.pipeline": [
        (f"{DATA} o.jsonl --top-p 0", "--top-p is 0", "give a number above 0 and at most 1"),
        (f"{DATA} o.jsonl --resume --force", "--resume and --force are both given",
         "continue, or start over"),
        ("train data --merge a.jsonl --shard 0/2 --output o.jsonl",
         "--merge puts files together, and nothing is answered",
         "give --merge and --output alone"),
        (f"{DATA} o.jsonl --base-url http://127.0.0.1:1/v1/", "--base-url names a server twice",
         "name each server once"),
        (f"{DATA} o.json", "--output is o.json", "name a .jsonl file, as specdec-train takes it"),
    ],
    "specdec.train.flags": [
        (f"{TRAIN} --max-steps 3 --num-epochs 1", "both --max-steps and --num-epochs are given",
         ONE),
        (f"{TRAIN} --num-epochs 0", "--num-epochs is 0",
         "nothing would be learned: give more than 0"),
        (f"{TRAIN} --learning-rate 0", "--learning-rate is 0",
         "nothing would be learned: give more than 0"),
        (f"{TRAIN} --warmup-ratio 1.5", "--warmup-ratio is 1.5", "give 0 to 1"),
        (f"{TRAIN} --self-distillation 1.5", "--self-distillation is 1.5", "give a share, 0 to 1"),
        (f"{TRAIN} --plan --sanity", "both --plan and --sanity are given", ONE),
        (f"{TRAIN} --tracker wandb --plan",
         "--tracker wandb with --plan or --sanity, which log nothing", LEAVE),
        (f"{TRAIN} --max-disk 5GB",
         "--max-disk 5GB without --hidden-states-dir: no states are kept",
         "name a folder with --hidden-states-dir, or leave it out"),
        (f"{TRAIN} --max-disk much --hidden-states-dir s", "--max-disk is 'much'",
         "give a number of bytes, such as 500GB, 1.5TB or 64GiB"),
        (f"{TRAIN} --max-disk 5GB --hidden-states-dir s --shard-target",
         "--max-disk with --shard-target: processes that share a target read it equally often,"
         " which those of kept states do not", LEAVE_ONE),
        (f"{TRAIN} --hidden-states-layers 2,4",
         "--hidden-states-layers without --hidden-states-from: the target is run here",
         "give the server or folder of the states, or leave the layers out"),
        (f"{TRAIN} --hidden-states-from states --shard-target",
         "--shard-target with --hidden-states-from: no layers are loaded that could be split",
         "leave one of them out"),
        (f"{TRAIN} --hidden-states-from states",
         "--hidden-states-from with --eval-prompts 16: an engine's acceptance needs the"
         " target's layers, which are not loaded",
         "give --eval-prompts 0, and measure the drafter where the target runs"),
        (f"{TRAIN} --hidden-states-dtype fp8",
         "--hidden-states-dtype fp8 without --hidden-states-dir: none are kept",
         "name a folder with --hidden-states-dir, or leave the type out"),
        (f"{TRAIN} --muon-learning-rate 0.1",
         "--muon-learning-rate has no effect with --optimizer adamw", LEAVE_ONE),
        (f"{TRAIN} --optimizer muon --muon-learning-rate 0", "--muon-learning-rate is 0",
         "most weights would learn nothing: give more than 0"),
        (f"{TRAIN} --loss tv",
         "--loss tv with --self-distillation 0: it is a loss from the target's distribution, of"
         " which nothing would be learned", "give --self-distillation 1, or leave --loss out"),
        (f"{TRAIN} --depth-weighting dpace --redrafter-loss-decay 0.7",
         "--redrafter-loss-decay has no effect with --depth-weighting dpace", LEAVE_ONE),
        (f"{TRAIN} --stop-at-acceptance 2 --eval-prompts 0",
         "--stop-at-acceptance without --eval-prompts: no acceptance is measured",
         "give --eval-prompts more than 0"),
        *(
            (f"{EAGLE} --eagle-{option}", f"--eagle-{option.split()[0]} is for EAGLE-3",
             f"give --eagle-version 3, or leave --eagle-{option.split()[0]} out")
            for option in ("norm-output", "fc-norm", "norm-before-fc", "draft-vocab-size 9",
                           "parallel", "mask-token-id 4")
        ),
        *(
            (f"{EAGLE} --eagle-version 3 {option}", f"{flag} is for EAGLE-1",
             f"give --eagle-version 1, or leave {flag} out")
            for option, flag in (
                ("--eagle-noise 0.1", "--eagle-noise"), ("--no-eagle-bias", "--eagle-bias"),
                ("--eagle-token-weight 0.5 --eagle-noise 0.1", "--eagle-token-weight"),
            )
        ),
        (f"{EAGLE} --eagle-version 3 --eagle-mask-token-id 4",
         "--eagle-mask-token-id is 4 without --eagle-parallel",
         "give both, or leave the token out"),
        (f"{EAGLE} --eagle-version 3 --eagle-draft-vocab-size 0", "--eagle-draft-vocab-size is '0'",
         "give auto, full, or a number of tokens of at least 1"),
        (f"{EAGLE} --eagle-version 3 --eagle-draft-vocab-size 9 --self-distillation 0.5",
         "--eagle-draft-vocab-size with --self-distillation 0.5: a text has tokens that are not"
         " drafted", "give --self-distillation 1, or leave one of the two out"),
        (f"{EAGLE} --eagle-version 3 --eagle-fc-norm --eagle-norm-before-fc",
         "--eagle-norm-before-fc and --eagle-fc-norm are both given", ONE),
    ],
    "specdec.verify.settings": [
        ("verify --checkpoint-dir c --engine-dir e",
         "--engine-dir: no effect with --checkpoint-dir, a claim of its own", LEAVE),
        ("verify", "missing --checkpoint-dir, or --model-dir",
         "name the checkpoint or the model to verify"),
        (f"{VERIFY} --dtype float32", "--dtype with --engine-dir, which has a type",
         "leave one out"),
        (f"{VERIFY} --workers 2", "--workers: no effect with --engine-dir", LEAVE),
        (f"{VERIFY} --top-k 3", "--top-k: no effect with greedy text alone: --sampling is absent",
         LEAVE),
        (f"{VERIFY} --sampling --temperature 0", "--temperature is 0",
         "give a number above 0 and below 100"),
        (f"{VERIFY} --use-logits", "--use-logits without --draft-engine-dir",
         "give the draft model's engine"),
    ],
}  # fmt: skip
# Of `specdec run`, which needs whole engines for them: the values that are checked.
SHOWN: dict[str, Any] = {
    "runtime": "TensorRT-LLM",
    "method": "medusa",
    "tells_origins": True,
    "has_tokenizer": True,
    "is_json": False,
}
NOT_SHOWN: dict[str, dict[str, Any]] = {
    "plain": {"method": "plain"}, "untold": {"tells_origins": False},
    "wordless": {"has_tokenizer": False},
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "config.json").write_text("{}")
    return tmp_path


def list_rules() -> Iterator[tuple[str, Contradiction]]:
    """The rules of each call of `refuse_contradictions`, by the module that calls it."""
    for path in [path for name in FOLDERS.split() for path in sorted((ROOT / name).rglob("*.py"))]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts if parts[0] == "specdec" else ("specdec", *parts))
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "refuse_contradictions(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "refuse_contradictions":
                namespace = dict(vars(importlib.import_module(module)))
                for inner in ast.walk(ast.parse(text)):  # imports inside functions
                    if isinstance(inner, ast.ImportFrom) and inner.level == 1 and not inner.module:
                        package = module.rpartition(".")[0]
                        for alias in inner.names:
                            namespace[alias.name] = importlib.import_module(
                                f"{package}.{alias.name}"
                            )
                for rule in eval(ast.unparse(node.args[1]), namespace):
                    yield module, rule


def test_every_rule_has_an_example_and_every_example_a_rule() -> None:
    rules = list(list_rules())
    assert len(rules) > 50
    used = set()
    for module, (_, fact, hint) in rules:
        matching = [
            example[0]
            for example in EXAMPLES.get(module, [])
            if match_template(fact, example[1]) and match_template(hint, example[2])
        ]
        assert matching, f"{module} refuses without an example in {__name__}: {fact}"
        used |= {(module, line) for line in matching}
    assert used == {(module, line) for module, rows in EXAMPLES.items() for line, *_ in rows}


@pytest.mark.parametrize(
    ("line", "fact", "hint"), [row for rows in EXAMPLES.values() for row in rows]
)
def test_what_is_refused(line: str, fact: str, hint: str, folder: Path) -> None:
    if line in NOT_SHOWN:
        check_shows_drafts(**SHOWN)
        with pytest.raises(UsageError) as caught:
            check_shows_drafts(**SHOWN | NOT_SHOWN[line])
        assert (caught.value.message, caught.value.hint) == (fact, hint)
        return
    done = run_cli_here(*line.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert read_error_lines(done.stderr) == (fact, hint)
    assert [path.name for path in folder.iterdir()] == ["e"]
