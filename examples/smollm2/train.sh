#!/usr/bin/env bash
# Everything that made the drafters of SmolLM2-135M-Instruct, from the published GGUF file on.
# What was interrupted goes on where it stopped when the script is started again. Seeds are in it.
#
#   SPEC_BENCH=Spec-Bench/data/spec_bench/question.jsonl HUMAN_EVAL=HumanEval.jsonl.gz \
#       examples/smollm2/train.sh
#
# The two files are those of the benchmarks whose prompts the training data shall not have. Without
# more, it does what a processor can do in some hours; README.md has the numbers for a GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
HERE=examples/smollm2
WORK=${WORK:-out/smollm2}
PYTHON=${PYTHON:-python}
PROCESSES=${PROCESSES:-1} # which write texts at the same time, each with an engine
export PYTHONPATH=$PWD
mkdir -p "$WORK"
MODEL=${MODEL:-$($PYTHON $HERE/get.py)}
specdec() { $PYTHON -m specdec "$@"; }
# Run a command for each process's number, at the same time; fail where one fails.
each() {
  local number jobs=() status=0
  for ((number = 0; number < PROCESSES; number++)); do "$@" "$number" & jobs+=($!); done
  for number in "${jobs[@]}"; do wait "$number" || status=1; done
  return $status
}

# The target, which answers many prompts at once. On a processor it keeps the file's own blocks.
[ -d "$WORK/checkpoint" ] ||
  specdec convert --model-dir "$MODEL" --output-dir "$WORK/checkpoint" ${CONVERT_FLAGS:-}
[ -d "$WORK/engine" ] ||
  specdec build --checkpoint-dir "$WORK/checkpoint" --output-dir "$WORK/engine" \
    --max-batch-size "${BATCH_SIZE:-64}" --max-seq-len 768

# Prompts: user turns that the model writes itself, from nothing and from a few first words, and
# questions about installed documentation.
turns() { # NAME NUM_TURNS NUMBER: a process's share
  local share=$(($2 / PROCESSES)) begun=()
  [ "$1" = turns ] || begun=(--begun)
  $PYTHON $HERE/make_prompts.py turns --engine-dir "$WORK/engine" --model "$MODEL" \
    --output "$WORK/$1-$3.jsonl" --num-turns "$share" --first $(($3 * share)) "${begun[@]}"
}
if [ ! -f "$WORK/prompts.jsonl" ]; then
  each turns turns "${NUM_TURNS:-6144}"
  each turns begun "${NUM_BEGUN:-2560}"
  $PYTHON $HERE/make_prompts.py join --turns "$WORK"/turns-*.jsonl "$WORK"/begun-*.jsonl \
    --output "$WORK/prompts.jsonl" --num-docs "${NUM_DOCS:-1500}" --without "$SPEC_BENCH" "$HUMAN_EVAL"
fi

# Its answers to them.
answers() { # NUMBER
  [ -f "$WORK/data-$1.jsonl" ] ||
    specdec train data --input "$WORK/prompts-$1.jsonl" --engine-dir "$WORK/engine" \
      --tokenizer-dir "$MODEL" --max-tokens 192 --temperature "${TEMPERATURE:-0.5}" --seed $(($1 + 1)) \
      --output "$WORK/data-$1.jsonl" --resume --allow-failures
}
if [ ! -f "$WORK/data.jsonl" ]; then
  head -n "${MAX_ROWS:-4288}" "$WORK/prompts.jsonl" > "$WORK/asked.jsonl"
  split --number "l/$PROCESSES" --numeric-suffixes=0 --suffix-length 1 \
    --additional-suffix .jsonl "$WORK/asked.jsonl" "$WORK/prompts-"
  each answers
  cat "$WORK"/data-?.jsonl > "$WORK/data.jsonl"
fi

# drafter FOLDER METHOD STEPS, and more options of specdec-train.
drafter() {
  [ -f "$WORK/$1/config.json" ] ||
    specdec train --method "$2" --max-steps "$3" --model-dir "$MODEL" --data "$WORK/data.jsonl" \
      --output-dir "$WORK/$1" --model-max-length 384 --batch-size "${ROWS:-4}" --dtype bfloat16 \
      --self-distillation 1 --eval-rows 128 --eval-steps 0 --eval-prompts "${EVAL_PROMPTS:-16}" \
      --save-steps 200 --seed 1 --resume "${@:4}" ${TRAIN_FLAGS:-}
}
# A draft model of the same tokens: cut out of the target, then taught by it.
draft() {
  [ -d "$WORK/corpus" ] ||
    $PYTHON $HERE/make_prompts.py texts --data "$WORK/data.jsonl" --model "$MODEL" --output "$WORK/corpus"
  [ -d "$WORK/pruned" ] || $PYTHON $HERE/prune.py --model-dir "$MODEL" --output-dir "$WORK/pruned"
  [ -f "$WORK/draft/model.safetensors" ] ||
    $PYTHON examples/pycode/pretrain.py --start-from "$WORK/pruned" --teacher-dir "$MODEL" \
      --corpus-dir "$WORK/corpus" --tokenizer-dir "$MODEL" --output-dir "$WORK/draft" \
      --sequence-length 384 --batch-size "${ROWS:-4}" --steps "$1" --learning-rate 2e-3
}
# The model's steps are cheap: few tokens at a time, of few that occur, are all that can pay.
eagle3() {
  drafter eagle3 eagle "$1" --eagle-version 3 --eagle-draft-vocab-size "${DRAFT_VOCAB:-4096}" \
    --eagle-intermediate-size "${MLP_SIZE:-768}" --eagle-num-steps 3 --learning-rate 2e-3 --eagle-start random
}
# An output layer over 49,152 tokens in each head: too large to ship.
medusa() { drafter medusa medusa "$1" --medusa-num-heads 3 --learning-rate 5e-4; }
redrafter() { drafter redrafter redrafter "$1" --redrafter-predict-n-tokens 4 --learning-rate 5e-4; }

for name in ${DRAFTERS:-eagle3 draft}; do "$name" "${STEPS:-2200}"; done
