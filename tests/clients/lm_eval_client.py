"""lm-evaluation-harness: log-likelihoods of a task of its own equal transformers'; generation."""

import os
import pathlib
import tempfile

import lm_eval
from common import BASE_URL, MODEL, run
from lm_eval.tasks import TaskManager

TOKENIZER, TARGET = os.environ["CLIENT_TOKENIZER"], os.environ["CLIENT_TARGET"]
home = pathlib.Path(tempfile.mkdtemp())
ROWS = [
    ("def add(a, b):\n    return a", [" + b", " % path", ".append"], 0),
    ("import os\n\npath = os.path.", ["join", "while"], 0),
    ("for i in", [" range(10):", " return", " class"], 0),
]
TASKS = {
    "choices": "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: label\n",
    "texts": "output_type: generate_until\ndoc_to_target: '{{choices[0]}}'\n"
    'generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 20, temperature: 0}\n'
    "metric_list: [{metric: exact_match}]\n",
}


def write_tasks():
    import json

    rows = [{"text": text, "choices": c, "label": label} for text, c, label in ROWS]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, lines in TASKS.items():
        (home / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\n"
            f"dataset_kwargs: {{data_files: {{test: {home / 'rows.jsonl'}}}}}\n"
            f"test_split: test\ndoc_to_text: '{{{{text}}}}'\ntarget_delimiter: ''\n{lines}"
        )


def evaluate(model, task, model_args, **more):
    found = lm_eval.simple_evaluate(
        model=model, model_args=model_args, tasks=[task], log_samples=True, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(home), include_defaults=False), **more,
    )  # fmt: skip
    return [sample["resps"] for sample in found["samples"][task]]


def serve(path, **more):
    served = {"model": MODEL, "base_url": f"{BASE_URL}/{path}", "num_concurrent": 2}
    return served | {"tokenizer": TOKENIZER, "tokenizer_backend": "huggingface"} | more


def likelihoods():
    ours = evaluate("local-completions", "choices", serve("completions"))
    theirs = evaluate("hf", "choices", {"pretrained": TARGET, "dtype": "float32"}, device="cpu")
    pairs = [
        (float(own[0][0]), own[0][1], float(other[0][0]), other[0][1])
        for row, others in zip(ours, theirs, strict=True)
        for own, other in zip(row, others, strict=True)
    ]
    assert len(pairs) == 8
    for own, is_greedy, other, is_greedy_there in pairs:
        assert abs(own - other) < 1e-3, pairs
        assert str(is_greedy) == str(is_greedy_there), pairs


def plain():
    texts = evaluate("local-completions", "texts", serve("completions"))
    theirs = evaluate("hf", "texts", {"pretrained": TARGET, "dtype": "float32"}, device="cpu")
    assert texts == theirs, (texts, theirs)


def chat():
    args = serve("chat/completions", tokenizer_backend=None)
    args.pop("tokenizer")
    texts = evaluate("local-chat-completions", "texts", args, apply_chat_template=True)
    assert all(resps[0][0] for resps in texts), texts


write_tasks()
run(plain=plain, likelihoods=likelihoods, chat=chat)
