#!/usr/bin/env python3
"""Train the pycode target or its draft model, from scratch or from a trained model on.

    python pretrain.py --size target --corpus-dir work/corpus --tokenizer-dir work/tokenizer \
                       --output-dir work/target --steps 2400

Plain next-token training on packed files: Muon for the matrices inside the layers, AdamW for the
rest, linear decay to zero. With `--teacher-dir` the loss is the divergence from the teacher's own
distribution instead, which is what a draft model is for; `--start-from` goes on from a trained
model, and `--data` makes half of every batch texts of that file, from their beginnings on. With
`--loop-prompts` the model continues prompts of that file, greedily, and what runs in circles there
is made less likely: unlikelihood training of sequences (Welleck et al., arXiv 1908.04319). Resumes
from `OUTPUT/training_state.pt` after a kill. Writes the model in bfloat16 with its tokenizer, and
`training_log.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import Engine
from specdec.build.pipeline import build_engine
from specdec.build.settings import BuildSettings
from specdec.convert.pipeline import convert_model
from specdec.convert.settings import ConvertSettings
from specdec.measure.repetition import NGRAM_SIZE, is_looping
from specdec.text.pretrained import load_model, load_tokenizer
from specdec.train.features import OutputHead
from specdec.train.loss import Teacher
from specdec.train.loss import compute_loss as compute_fused_loss

SEQUENCE_LENGTH = 1024
SHAPES: dict[str, dict[str, int]] = {
    "target": dict(
        hidden_size=320, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=896,
    ),
    "draft": dict(
        hidden_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256,
    ),
}  # fmt: skip


def pack_tokens(path: Path, tokenizer: Any, cache: Path) -> np.ndarray:
    """Tokenize a corpus file into one uint16 array, files separated by the end-of-text token."""
    if cache.is_file():
        cached: np.ndarray = np.load(cache)
        return cached
    texts = [json.loads(line)["text"] for line in path.open(encoding="utf-8")]
    ids: list[int] = [tokenizer.eos_token_id]
    for start in range(0, len(texts), 64):
        for encoded in tokenizer(texts[start : start + 64])["input_ids"]:
            ids.extend(encoded)
            ids.append(tokenizer.eos_token_id)
    packed = np.asarray(ids, dtype=np.uint16)
    np.save(cache, packed)
    return packed


def sample_batch(
    tokens: np.ndarray,
    batch_size: int,
    seed: int,
    length: int = SEQUENCE_LENGTH,
    starts: np.ndarray | None = None,
) -> torch.Tensor:
    """Cut `batch_size` windows, at random or from some of `starts`; a seed gives the same ones."""
    last = len(tokens) - length - 1
    kept = None if starts is None else starts[starts < last]
    at = np.random.default_rng(seed).integers(0, last if kept is None else len(kept), batch_size)
    rows = np.stack([tokens[s : s + length + 1] for s in (at if kept is None else kept[at])])
    return torch.from_numpy(rows.astype(np.int64))


def predict(model: LlamaForCausalLM, rows: torch.Tensor, float32: bool) -> torch.Tensor:
    """Log-probabilities in float32, [B * SEQUENCE_LENGTH, V], of rows [B, SEQUENCE_LENGTH + 1]."""
    device = "cuda" if rows.is_cuda else "cpu"
    with torch.autocast(device, dtype=torch.bfloat16, enabled=not float32):
        logits = model(rows[:, :-1]).logits
    log_probs: torch.Tensor = logits.float().flatten(0, 1).log_softmax(-1)
    return log_probs


def compute_states(model: LlamaForCausalLM, rows: torch.Tensor, float32: bool) -> torch.Tensor:
    """Last hidden states, [B * T, D], of rows [B, T + 1]."""
    device = "cuda" if rows.is_cuda else "cpu"
    with torch.autocast(device, dtype=torch.bfloat16, enabled=not float32):
        states: torch.Tensor = model.model(rows[:, :-1]).last_hidden_state.flatten(0, 1)
    return states if float32 else states.bfloat16()


def compute_loss(
    model: LlamaForCausalLM,
    rows: torch.Tensor,
    float32: bool,
    teacher: LlamaForCausalLM | None = None,
) -> torch.Tensor:
    """Mean loss a token, in nats: next-token cross-entropy, or KL(teacher || model)."""
    labels = rows[:, 1:].flatten()
    if teacher is None:
        return torch.nn.functional.nll_loss(predict(model, rows, float32), labels)
    with torch.no_grad():
        expected = compute_states(teacher, rows, float32)
    losses: torch.Tensor = compute_fused_loss(
        compute_states(model, rows, float32),
        model.lm_head.weight,
        labels,
        torch.full((len(labels),), 1 / len(labels), device=rows.device),
        measure=False,
        teacher=Teacher(expected, OutputHead(teacher.lm_head.weight.detach()), share=1.0),
    )[0]
    return losses


def mark_repeats(tokens: Sequence[int]) -> torch.Tensor:
    """Which tokens end an n-gram that ended before, bool [N]."""
    seen = set[tuple[int, ...]]()
    is_again = torch.zeros(len(tokens), dtype=torch.bool)
    for end in range(NGRAM_SIZE, len(tokens) + 1):
        gram = tuple(tokens[end - NGRAM_SIZE : end])
        is_again[end - 1] = gram in seen
        seen.add(gram)
    return is_again


class LoopBreaker:
    """Makes tokens less likely by which the model's own text runs in circles."""

    NUM_ROWS, NUM_TOKENS = 32, 96  # of a step
    NUM_STEPS = 4  # for which the model's texts are used

    def __init__(self, model: LlamaForCausalLM, tokenizer: Any, path: Path, seed: int) -> None:
        """path: prompts, {"prompt"} a line."""
        self.model, self.tokenizer, self.seed = model, tokenizer, seed
        texts = [json.loads(line)["prompt"] for line in path.open(encoding="utf-8")]
        self.prompts = [ids[-160:] for ids in tokenizer(texts)["input_ids"]]
        self.rows: list[tuple[list[int], list[int]]] = []  # prompts and what follows

    def compute_loss(self, step: int, float32: bool) -> tuple[torch.Tensor, int]:
        """Mean of -log(1 - p) where a 4-gram ends again, 0 elsewhere; texts that loop."""
        if not self.rows:
            self.rows = self._write(np.random.default_rng(self.seed * 10**7 + step))
        rows, self.rows = self.rows[: self.NUM_ROWS], self.rows[self.NUM_ROWS :]
        length = max(len(prompt) + len(text) for prompt, text in rows)
        ids = torch.zeros(len(rows), length + 1, dtype=torch.long)
        is_again = torch.zeros(len(rows), length, dtype=torch.bool)  # whether the next token is
        for row, (prompt, text) in enumerate(rows):
            ids[row, : len(prompt) + len(text)] = torch.tensor(prompt + text)
            is_again[row, len(prompt) - 1 :][: len(text)] = mark_repeats(text)
        device = next(self.model.parameters()).device
        log_probs = predict(self.model, ids.to(device), float32)[is_again.flatten().to(device)]
        chosen = log_probs.gather(1, ids[:, 1:][is_again].to(device)[:, None])
        losses = -torch.log1p(-chosen.exp().clamp(max=1 - 1e-4))
        share = 1 / (self.NUM_ROWS * self.NUM_TOKENS)
        return losses.sum() * share, sum(is_looping(text) for _, text in rows)

    def _write(self, dice: np.random.Generator) -> list[tuple[list[int], list[int]]]:
        chosen = dice.choice(len(self.prompts), self.NUM_ROWS * self.NUM_STEPS, replace=False)
        prompts = [self.prompts[i] for i in chosen]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self.model.save_pretrained(folder / "model")
            convert_model(ConvertSettings(
                model_dir=folder / "model", output_dir=folder / "checkpoint", dtype="bfloat16",
            ))  # fmt: skip
            build_engine(BuildSettings(
                checkpoint_dir=folder / "checkpoint", output_dir=folder / "engine",
                max_batch_size=len(prompts), max_seq_len=512,
            ))  # fmt: skip
            with Engine.load(folder / "engine") as engine:
                outputs = engine.generate(prompts, max_output_len=self.NUM_TOKENS)
        return [(prompt, output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)]


def evaluate(model: LlamaForCausalLM, tokens: np.ndarray, device: str, float32: bool) -> float:
    """Held-out cross-entropy over a fixed set of windows."""
    model.eval()
    with torch.inference_mode():
        losses = [
            compute_loss(model, sample_batch(tokens, 8, 10**6 + i).to(device), float32)
            for i in range(4)
        ]
    model.train()
    return float(torch.stack(losses).mean())


class Optimizers:
    """Muon for the layers' matrices, AdamW for the rest; their state on disk."""

    def __init__(self, model: LlamaForCausalLM, learning_rate: float, path: Path) -> None:
        self.model, self.learning_rate, self.path = model, learning_rate, path
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and ".layers." in name]
        others = [p for name, p in named if not (p.ndim == 2 and ".layers." in name)]
        self.each: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def restore(self, device: str) -> int:
        """Go on with what was saved; return its step, 0 where nothing was."""
        if not self.path.is_file():
            return 0
        state = torch.load(self.path, map_location=device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.each, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return int(state["step"])

    def save(self, step: int) -> None:
        """Replace what was saved; a kill at any moment leaves the old or the new state."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.each],
            "step": step,
        }
        torch.save(state, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)

    def step(self, step: int, num_steps: int) -> None:
        """Clip the gradients and take a step: a short warm-up, then linearly down to zero."""
        scale = min((step + 1) / min(100, 1 + num_steps // 6), (num_steps - step) / num_steps)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.each:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def sample_rows(
    args: argparse.Namespace, step: int, train: np.ndarray, texts: np.ndarray | None,
    beginnings: np.ndarray | None,
) -> torch.Tensor:  # fmt: skip
    """A batch of the corpus, or half of it and half of the texts, which begin at `beginnings`."""
    seed, length = args.seed * 10**7 + step, args.sequence_length
    num_texts = 0 if texts is None else args.batch_size // 2
    rows = sample_batch(train, args.batch_size - num_texts, seed, length)
    if texts is None:
        return rows
    return torch.cat((rows, sample_batch(texts, num_texts, seed, length, beginnings)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SHAPES), help="of a model from scratch")
    parser.add_argument("--corpus-dir", type=Path, required=True)
    parser.add_argument("--tokenizer-dir", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--start-from", type=Path, help="a trained model, of any shape")
    parser.add_argument("--teacher-dir", type=Path, help="learn this model's distribution")
    parser.add_argument("--data", type=Path, help="texts, such as specdec-train data writes")
    parser.add_argument("--loop-prompts", type=Path, help="prompts whose texts shall not loop")
    parser.add_argument("--sequence-length", type=int, default=SEQUENCE_LENGTH)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-steps", type=int, default=100)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--float32", action="store_true", help="no bfloat16: faster on a CPU without such units"
    )
    args = parser.parse_args()
    if args.size is None and args.start_from is None:
        parser.error("give --size or --start-from")
    return args


def main() -> None:
    args = parse_arguments()
    output_dir: Path = args.output_dir
    output_dir.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)

    tokenizer = load_tokenizer(args.tokenizer_dir)
    train = pack_tokens(args.corpus_dir / "train.jsonl", tokenizer, args.corpus_dir / "train.npy")
    heldout = pack_tokens(
        args.corpus_dir / "heldout.jsonl", tokenizer, args.corpus_dir / "heldout.npy"
    )
    texts, beginnings = None, None
    if args.data is not None:
        texts = pack_tokens(args.data, tokenizer, output_dir / "data.npy")
        beginnings = np.flatnonzero(texts[:-1] == tokenizer.eos_token_id) + 1
    if args.start_from is None:
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=SEQUENCE_LENGTH,
            rope_theta=10000.0,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **SHAPES[args.size],
        )
        model = LlamaForCausalLM(config).to(device)
    else:
        model = load_model(args.start_from, flag="--start-from", dtype=torch.float32).to(device)
    teacher = None
    if args.teacher_dir is not None:
        teacher = load_model(args.teacher_dir, flag="--teacher-dir", dtype=torch.float32)
        teacher = teacher.to(device).eval()
    num_parameters = sum(p.numel() for p in model.parameters())
    optimizers = Optimizers(model, args.learning_rate, output_dir / "training_state.pt")
    start_step = optimizers.restore(device)
    breaker = None
    if args.loop_prompts is not None:
        breaker = LoopBreaker(model, tokenizer, args.loop_prompts, args.seed)
    forward = torch.compile(model) if args.compile else model
    model.train()
    log = (output_dir / "training_log.jsonl").open("a")
    print(f"{num_parameters} parameters, {len(train)} training tokens, from step {start_step}")

    began, recent, num_looping = time.monotonic(), [], 0
    for step in range(start_step, args.steps):
        rows = sample_rows(args, step, train, texts, beginnings).to(device)
        loss = compute_loss(forward, rows, args.float32, teacher)
        torch.autograd.backward(loss)
        if breaker is not None:
            loop_loss, count = breaker.compute_loss(step, args.float32)
            torch.autograd.backward(loop_loss)
            num_looping += count
        optimizers.step(step, args.steps)
        recent.append(loss.item())
        done = step + 1
        if done % 20 == 0 or done == args.steps:
            line: dict[str, Any] = {
                "step": done,
                "tokens": done * args.batch_size * args.sequence_length,
                "loss": round(sum(recent) / len(recent), 4),
                "seconds": round(time.monotonic() - began, 1),
            }
            if breaker is not None:
                line["looping"] = round(num_looping / len(recent) / breaker.NUM_ROWS, 3)
            recent, num_looping = [], 0
            if done % 500 == 0 or done == args.steps:
                line["heldout_loss"] = round(evaluate(model, heldout, device, args.float32), 4)
            print(json.dumps(line), flush=True)
            log.write(json.dumps(line) + "\n")
            log.flush()
        if done % args.save_steps == 0 and done < args.steps:
            optimizers.save(done)
    model.to(torch.bfloat16).save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    for path in (optimizers.path, output_dir / "data.npy"):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
