#!/usr/bin/env bash
# Everything that made the pycode models, from the interpreter's own standard library on.
# Some seven hours on 2 CPU cores; what was interrupted resumes when it is started again.
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
# First a target of 10 million parameters and drafters for it.
TARGET=$WORK/target-10m
pretrain target target-10m --steps 1200 --compile
pretrain draft draft-pretrained --steps 600 --compile
pretrain draft draft-distilled --start-from "$WORK/draft-pretrained" --teacher-dir "$TARGET" \
  --steps 700 --batch-size 4 --seed 2 --float32

# What the target itself writes, of training files only: texts OUTPUT NUM_PROMPTS PER_FILE DTYPE MAX_TOKENS, and more
# options of specdec-train data. PROMPTS=--methods: of methods, not of what is at a file's top level.
texts() {
  [ ! -f "$1" ] || return 0
  $PYTHON make_prompts.py --data "$WORK/corpus/train.jsonl" --output "$WORK/train_prompts.jsonl" \
    --num-prompts "$2" --per-file "$3" ${PROMPTS:-}
  specdec-convert --model-dir "$TARGET" --output-dir "$WORK/checkpoint" --dtype "$4" --force
  specdec-build --checkpoint-dir "$WORK/checkpoint" --output-dir "$WORK/engine" \
    --max-batch-size 64 --max-seq-len 512 --force
  specdec-train data --input "$WORK/train_prompts.jsonl" --engine-dir "$WORK/engine" \
    --tokenizer-dir "$TARGET" --completion --max-tokens "$5" --output "$1" --resume "${@:6}"
}
# Of the first two the draft model and ReDrafter learned last, of the third the other drafters.
texts "$WORK/short.jsonl" 8000 100 bfloat16 128 --temperature 0.6 --seed 1 --max-rows 2560
texts "$WORK/greedy.jsonl" 8000 100 bfloat16 96 --temperature 0
texts "$WORK/data.jsonl" 4000 8 float32 256 --temperature 0.6 --seed 1
cat "$WORK/short.jsonl" "$WORK/greedy.jsonl" > "$WORK/both.jsonl"

# The draft model was grown to 1.9 times its size, which changes nothing that it computes, and learned on.
[ -d "$WORK/draft-grown" ] ||
  $PYTHON ../../benchmarks/grow.py --model-dir "$WORK/draft-distilled" --output-dir "$WORK/draft-grown" \
    --layers 3 --hidden 144 --intermediate 384 --heads 6 --kv-heads 2 --head-size 24 --dtype float32
learn_on() {
  pretrain draft "$1" --start-from "$WORK/$2" --teacher-dir "$TARGET" --data "$WORK/$3.jsonl" \
    --sequence-length 256 --batch-size 8 "${@:4}"
}
learn_on draft-1 draft-grown short --steps 1000 --learning-rate 3e-3 --seed 3
learn_on draft-2 draft-1 short --steps 400 --learning-rate 2e-3 --seed 4
learn_on draft-3 draft-2 short --steps 2500 --learning-rate 3e-3 --seed 5
learn_on draft-4 draft-3 both --steps 5000 --learning-rate 3e-3 --seed 6

# drafter FOLDER METHOD DATA SEED, and more options of specdec-train.
drafter() {
  [ -f "$WORK/$1/config.json" ] ||
    specdec-train --method "$2" --model-dir "$TARGET" --data "$3" \
      --eval-data "$WORK/corpus/heldout.jsonl" --output-dir "$WORK/$1" --seed "$4" --resume "${@:5}"
}
drafter redrafter-files redrafter "$WORK/corpus/train.jsonl" 1 --model-max-length 512 --max-steps 2000 --batch-size 8 --learning-rate 2e-3 --redrafter-num-layers 2 \
  --redrafter-exit-dim 320 --redrafter-predict-n-tokens 5 --eval-steps 500 --eval-rows 64 \
  --save-steps 100
redrafter_on() {
  drafter "$1" redrafter "$WORK/$3.jsonl" "$4" --start-from "$WORK/$2" --model-max-length 256 --max-steps "$5" --batch-size 8 \
    --learning-rate 1e-3 --self-distillation 1 --redrafter-num-layers 2 --redrafter-exit-dim 320 \
    --redrafter-predict-n-tokens 5 --eval-steps 0 --eval-rows 64 --save-steps 40
}
redrafter_on redrafter-1 redrafter-files short 2 240
redrafter_on redrafter-2 redrafter-1 both 3 1000
redrafter_on redrafter-3 redrafter-2 both 4 2000
medusa() {
  drafter "$1" medusa "$WORK/$2.jsonl" "$3" --learning-rate 1e-3 --self-distillation 1 --medusa-num-heads 4 --medusa-num-layers 1 --eval-rows 16 \
    --save-steps 50 "${@:4}"
}
medusa medusa-1 data 1 --model-max-length 512 --max-steps 1200 --batch-size 4 --eval-steps 300
medusa medusa-2 both 2 --model-max-length 256 --max-steps 200 --batch-size 8 --eval-steps 0 --start-from "$WORK/medusa-1"
drafter eagle-1 eagle "$WORK/data.jsonl" 1 --model-max-length 384 --max-steps 320 --batch-size 8 \
  --learning-rate 1e-3 --eagle-start random --eagle-token-weight 0.5 --eagle-num-steps 2 --eval-steps 160 --eval-rows 16 \
  --save-steps 50
eagle3() {
  drafter "$1" eagle "$WORK/$2.jsonl" "$3" --model-max-length 256 --batch-size 8 --learning-rate 2e-3 --eagle-start random --eagle-version 3 --eagle-num-steps 3 \
    --eagle-draft-vocab-size 1024 --dtype bfloat16 --eval-rows 16 --save-steps 40 "${@:4}"
}
eagle3 eagle3-1 data 1 --max-steps 400 --eval-steps 200
eagle3 eagle3-2 both 2 --max-steps 240 --eval-steps 0 --start-from "$WORK/eagle3-1"
dflash() {
  drafter "$1" dflash "$WORK/$2.jsonl" "$3" --batch-size 8 --learning-rate 2e-3 --dflash-block-size 8 --dflash-num-anchors 48 --eval-rows 64 "${@:4}"
}
dflash dflash-1 data 1 --model-max-length 384 --max-steps 600 --eval-steps 300 --save-steps 50
dflash dflash-2 both 2 --model-max-length 256 --max-steps 200 --eval-steps 0 --save-steps 40 --start-from "$WORK/dflash-1"

# Then the target was grown to 2.6 times its size, learned on, and unlearned to run in circles.
TARGET=$WORK/target
[ -d "$WORK/target-grown" ] ||
  $PYTHON ../../benchmarks/grow.py --model-dir "$WORK/target-10m" --output-dir "$WORK/target-grown" \
    --layers 12 --hidden 320 --intermediate 1664 --heads 8 --kv-heads 4 --head-size 40 --dtype float32
pretrain target target-25m --start-from "$WORK/target-grown" --steps 420 --learning-rate 2e-3 --seed 11 --compile
$PYTHON make_prompts.py --data "$WORK/corpus/train.jsonl" --output "$WORK/train_prompts.jsonl" \
  --num-prompts 8000 --per-file 100
pretrain target target --start-from "$WORK/target-25m" --steps 60 --learning-rate 1e-3 --seed 12 \
  --sequence-length 512 --loop-prompts "$WORK/train_prompts.jsonl"

# The drafters learned on from what it writes.
texts "$WORK/new-greedy.jsonl" 8000 100 bfloat16 96 --temperature 0
texts "$WORK/new-short.jsonl" 8000 100 bfloat16 128 --temperature 0.6 --seed 1 --max-rows 640
cat "$WORK/new-short.jsonl" "$WORK/new-greedy.jsonl" > "$WORK/new.jsonl"
learn_on draft-5 draft-4 new --steps 1800 --learning-rate 3e-3 --seed 7
# The draft model went on, with beginnings of methods as well.
PROMPTS=--methods texts "$WORK/new-methods.jsonl" 10000 100 bfloat16 96 --temperature 0 --max-rows 5376
cat "$WORK/new.jsonl" "$WORK/new-methods.jsonl" > "$WORK/new2.jsonl"
learn_on draft draft-5 new2 --steps 2800 --learning-rate 3e-3 --seed 8
redrafter_on redrafter redrafter-3 new 5 900
eagle3 eagle3 new 3 --max-steps 250 --eval-steps 0 --eagle-intermediate-size 896 --start-from "$WORK/eagle3-2"
dflash dflash new 3 --model-max-length 256 --max-steps 250 --eval-steps 0 --save-steps 40 --dflash-intermediate-size 896 \
  --start-from "$WORK/dflash-2"
# Of Medusa's four heads three are kept, so that all weights together have less than 80 MB.
[ -d "$WORK/medusa-3" ] || $PYTHON - "$WORK/medusa-2" "$WORK/medusa-3" <<'CODE'
import json, pathlib, sys
from safetensors.torch import load_file, save_file
old, new = map(pathlib.Path, sys.argv[1:])
new.mkdir()
heads = load_file(old / "medusa_lm_head.safetensors")
kept = {name: tensor for name, tensor in heads.items() if not name.startswith("3.")}
save_file(kept, new / "medusa_lm_head.safetensors", metadata={"format": "pt"})
config = json.loads((old / "config.json").read_text()) | {"medusa_num_heads": 3}
(new / "config.json").write_text(json.dumps(config))
CODE
drafter medusa medusa "$WORK/new.jsonl" 3 --model-max-length 256 --max-steps 200 --batch-size 8 --learning-rate 1e-3 --self-distillation 1 \
  --medusa-num-heads 3 --medusa-num-layers 1 --eval-rows 16 --eval-steps 0 --save-steps 40 --start-from "$WORK/medusa-3"
drafter eagle eagle "$WORK/new.jsonl" 2 --model-max-length 256 --max-steps 200 --batch-size 8 --learning-rate 1e-3 --eagle-token-weight 0.5 \
  --eagle-num-steps 2 --eagle-intermediate-size 896 --eval-rows 16 --eval-steps 0 --save-steps 40 --start-from "$WORK/eagle-1"
# Two drafters that are not shipped, since all weights together would have more than 80 MB. They begin as drafters that are.
drafter p_eagle eagle "$WORK/new-greedy.jsonl" 1 --start-from "$WORK/eagle3" --model-max-length 256 --max-steps 400 --batch-size 8 --learning-rate 2e-3 \
  --eagle-version 3 --eagle-parallel --eagle-num-steps 6 --eagle-intermediate-size 896 --eagle-draft-vocab-size 1024 --eval-rows 16 --eval-steps 200 --save-steps 40
drafter dspark dflash "$WORK/new-greedy.jsonl" 1 --start-from "$WORK/dflash" --model-max-length 256 --max-steps 300 --batch-size 8 --learning-rate 2e-3 \
  --dflash-block-size 8 --dflash-num-anchors 48 --dflash-intermediate-size 896 --dflash-markov-rank 64 --eval-rows 64 --eval-steps 0 --save-steps 40
