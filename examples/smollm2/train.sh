#!/usr/bin/env bash
# Everything that made the drafters of SmolLM2-135M-Instruct, from the published GGUF file on.
# What was interrupted goes on where it stopped when the script is started again. Seeds are in it.
#
#   SPEC_BENCH=Spec-Bench/data/spec_bench/question.jsonl HUMAN_EVAL=HumanEval.jsonl.gz \
#       examples/smollm2/train.sh
#
# The two files are those of the benchmarks whose prompts the training data shall not have.
set -euo pipefail
cd "$(dirname "$0")/../.."
HERE=examples/smollm2
WORK=${WORK:-out/smollm2}
PYTHON=${PYTHON:-python}
export PYTHONPATH=$PWD
mkdir -p "$WORK"
MODEL=$($PYTHON $HERE/get.py)
specdec() { $PYTHON -m specdec "$@"; }

# The target, which keeps the file's own blocks and answers up to 64 prompts at once.
[ -d "$WORK/checkpoint" ] || specdec convert --model-dir "$MODEL" --output-dir "$WORK/checkpoint"
[ -d "$WORK/engine" ] ||
  specdec build --checkpoint-dir "$WORK/checkpoint" --output-dir "$WORK/engine" \
    --max-batch-size 64 --max-seq-len 768

# Prompts: user turns that the model writes itself, from nothing and from a few first words, and
# questions about installed documentation.
turns() {
  $PYTHON $HERE/make_prompts.py turns --engine-dir "$WORK/engine" --model "$MODEL" "$@"
}
turns --output "$WORK/turns.jsonl" --num-turns "${NUM_TURNS:-6144}"
turns --output "$WORK/begun.jsonl" --num-turns "${NUM_BEGUN:-2560}" --begun
$PYTHON $HERE/make_prompts.py join --turns "$WORK/turns.jsonl" "$WORK/begun.jsonl" \
  --output "$WORK/prompts.jsonl" --num-docs "${NUM_DOCS:-1500}" --without "$SPEC_BENCH" "$HUMAN_EVAL"

# Its answers to them.
[ -f "$WORK/data.jsonl" ] ||
  specdec train data --input "$WORK/prompts.jsonl" --engine-dir "$WORK/engine" \
    --tokenizer-dir "$MODEL" --max-tokens 192 --temperature "${TEMPERATURE:-0.5}" --seed 1 \
    --output "$WORK/data.jsonl" --max-rows "${MAX_ROWS:-4288}" --resume --allow-failures

# drafter FOLDER METHOD, and more options of specdec-train. The target's states are computed once.
drafter() {
  [ -f "$WORK/$1/config.json" ] ||
    specdec train --method "$2" --model-dir "$MODEL" --data "$WORK/data.jsonl" \
      --hidden-states-dir "$WORK/states" --output-dir "$WORK/$1" --model-max-length 384 \
      --batch-size 4 --dtype bfloat16 --self-distillation 1 --eval-rows 32 --eval-steps 0 \
      --save-steps 200 --seed 1 --resume "${@:3}"
}
# The model's steps are cheap: few tokens at a time, of few that occur, are all that can pay.
drafter eagle3 eagle --eagle-version 3 --eagle-draft-vocab-size 4096 --eagle-intermediate-size 768 \
  --eagle-num-steps 2 --learning-rate 2e-3 --max-steps "${STEPS:-2200}"
