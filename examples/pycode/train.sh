#!/usr/bin/env bash
# Everything that made the pycode models, from the interpreter's own standard library on.
# About an hour and a half on 2 CPU cores; what was interrupted resumes when it is started again.
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
pretrain draft 600

[ -f "$WORK/redrafter/model.safetensors" ] ||
  specdec-train --method redrafter --model-dir "$WORK/target" \
    --data "$WORK/corpus/train.jsonl" --eval-data "$WORK/corpus/heldout.jsonl" \
    --output-dir "$WORK/redrafter" --max-steps 2000 --batch-size 8 --model-max-length 512 \
    --learning-rate 2e-3 --redrafter-num-layers 2 --redrafter-exit-dim 320 \
    --redrafter-predict-n-tokens 5 --eval-steps 500 --eval-rows 64 --save-steps 100 --seed 1 --resume
