#!/usr/bin/env bash
# Everything that made the pycode models, from the interpreter's own standard library on.
# About two hours on 2 CPU cores; what was interrupted resumes when it is started again.
set -euo pipefail
cd "$(dirname "$0")"
WORK=${WORK:-work}
PYTHON=${PYTHON:-python}

$PYTHON corpus.py --output-dir "$WORK/corpus"
[ -f "$WORK/tokenizer/tokenizer.json" ] ||
  $PYTHON make_tokenizer.py --data "$WORK/corpus/train.jsonl" --output-dir "$WORK/tokenizer"
$PYTHON make_prompts.py --data "$WORK/corpus/heldout.jsonl" --output "$WORK/prompts.jsonl"

pretrain() {
  local size=$1 folder=$WORK/$2
  shift 2
  [ -f "$folder/model.safetensors" ] ||
    $PYTHON pretrain.py --size "$size" --corpus-dir "$WORK/corpus" \
      --tokenizer-dir "$WORK/tokenizer" --output-dir "$folder" "$@"
}
pretrain target target --steps 1200 --compile
pretrain draft draft-pretrained --steps 600 --compile
pretrain draft draft --start-from "$WORK/draft-pretrained" --teacher-dir "$WORK/target" \
  --steps 700 --batch-size 4 --seed 2 --float32

# What the target itself writes: Medusa's, the EAGLEs' and DFlash's drafters learned from that, ReDrafter's from the files.
if [ ! -f "$WORK/data.jsonl" ]; then
  $PYTHON make_prompts.py --data "$WORK/corpus/train.jsonl" --output "$WORK/train_prompts.jsonl" \
    --num-prompts 4000 --per-file 8
  specdec-convert --model-dir "$WORK/target" --output-dir "$WORK/checkpoint" --dtype float32 --force
  specdec-build --checkpoint-dir "$WORK/checkpoint" --output-dir "$WORK/engine" \
    --max-batch-size 32 --max-seq-len 512 --force
  specdec-train data --input "$WORK/train_prompts.jsonl" --engine-dir "$WORK/engine" \
    --tokenizer-dir "$WORK/target" --completion --max-tokens 256 --temperature 0.6 --seed 1 \
    --output "$WORK/data.jsonl" --resume
fi

drafter() {
  [ -f "$WORK/$1/config.json" ] ||
    specdec-train --method "${1%3}" --model-dir "$WORK/target" --data "$2" \
      --eval-data "$WORK/corpus/heldout.jsonl" --output-dir "$WORK/$1" --seed 1 --resume "${@:3}"
}
TEXT=$WORK/corpus/train.jsonl
drafter redrafter "$TEXT" --model-max-length 512 --max-steps 2000 --batch-size 8 --learning-rate 2e-3 --redrafter-num-layers 2 \
  --redrafter-exit-dim 320 --redrafter-predict-n-tokens 5 --eval-steps 500 --eval-rows 64 \
  --save-steps 100
drafter medusa "$WORK/data.jsonl" --model-max-length 512 --max-steps 1200 --batch-size 4 --learning-rate 1e-3 \
  --self-distillation 1 --medusa-num-heads 4 --medusa-num-layers 1 --eval-steps 300 --eval-rows 16 \
  --save-steps 50
drafter eagle "$WORK/data.jsonl" --model-max-length 384 --max-steps 320 --batch-size 8 \
  --learning-rate 1e-3 --eagle-token-weight 0.5 --eagle-num-steps 2 --eval-steps 160 --eval-rows 16 \
  --save-steps 50
drafter eagle3 "$WORK/data.jsonl" --model-max-length 256 --max-steps 400 --batch-size 8 --learning-rate 2e-3 --eagle-version 3 \
  --eagle-num-steps 3 --eagle-draft-vocab-size 1024 --dtype bfloat16 --eval-steps 200 --eval-rows 16 --save-steps 40
drafter dflash "$WORK/data.jsonl" --model-max-length 384 --max-steps 600 --batch-size 8 \
  --learning-rate 2e-3 --dflash-block-size 8 --dflash-num-anchors 48 --eval-steps 300 --eval-rows 64 \
  --save-steps 50
