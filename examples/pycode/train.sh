#!/usr/bin/env bash
# Everything that made the pycode models, from the interpreter's own standard library on.
# About two hours on 2 CPU cores; interrupted steps resume when it is started again.
set -euo pipefail
cd "$(dirname "$0")"
WORK=${WORK:-work}
PYTHON=${PYTHON:-python}

$PYTHON corpus.py --output-dir "$WORK/corpus"
[ -f "$WORK/tokenizer/tokenizer.json" ] ||
  $PYTHON make_tokenizer.py --data "$WORK/corpus/train.jsonl" --output-dir "$WORK/tokenizer"
$PYTHON make_prompts.py --data "$WORK/corpus/heldout.jsonl" --output "$WORK/prompts.jsonl"

pretrain() {
  [ -f "$WORK/$1/model.safetensors" ] ||
    $PYTHON pretrain.py --size "$1" --corpus-dir "$WORK/corpus" --tokenizer-dir "$WORK/tokenizer" \
      --output-dir "$WORK/$1" --steps "$2" --compile
}
pretrain target 1200
pretrain draft DRAFT_STEPS

[ -f "$WORK/redrafter/model.safetensors" ] ||
  specdec-train --method redrafter --model-dir "$WORK/target" \
    --data "$WORK/corpus/train.jsonl" --eval-data "$WORK/corpus/heldout.jsonl" \
    --output-dir "$WORK/redrafter" REDRAFTER_FLAGS --resume
