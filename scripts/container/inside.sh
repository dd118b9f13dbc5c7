#!/usr/bin/env bash
# Use the packages of the image together, as a user would: prepare a corpus, train on it with Weights &
# Biases offline, and run a sweep. test.sh starts this script inside the image, without a network.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "${MEGAFP8_DIR:-/workspace/megafp8}"
small=(
    trainer.max_steps=4 trainer.val_check_interval=4 trainer.limit_val_batches=1
    model.num_layers=1 model.hidden_size=64 model.ffn_hidden_size=128 model.num_attention_heads=2
    model.encoder_seq_length=32 model.micro_batch_size=2 model.global_batch_size=2
)

python3 - "$work/corpus.jsonl" <<'PYTHON'
import json
import sys

with open(sys.argv[1], "w") as file:
    for number in range(400):
        text = " ".join(f"word{number * k % 97}" for k in range(60))
        file.write(json.dumps({"text": text}) + "\n")
PYTHON
python3 -m megafp8 preprocess "$work/corpus.jsonl" --output "$work/corpus" --tokenizer bpe --vocab-size 512

WANDB_MODE=offline WANDB_DIR=$work python3 pretrain_gpt.py model.fp8=True "${small[@]}" \
    "model.data.data_prefix=$work/corpus" "exp_manager.explicit_log_dir=$work/run" \
    exp_manager.create_wandb_logger=True exp_manager.wandb_logger_kwargs.project=container
grep -q '"status": "finished"' "$work/run/summary.json"
find "$work" -name "offline-run-*" | grep -q . || { echo "container: error: no offline run"; exit 1; }

python3 pretrain_gpt.py --multirun model.fp8=True,False "${small[@]}" \
    "model.data.data_prefix=$work/corpus" "hydra.sweep.dir=$work/sweep"
finished=$({ grep -ls '"status": "finished"' "$work"/sweep/*/summary.json || true; } | wc -l)
[ "$finished" = 2 ] || { echo "container: error: $finished of 2 jobs of the sweep finished"; exit 1; }
echo "container: corpus, Weights & Biases offline and sweep"
echo "1 passed in ${SECONDS}s" # as pytest says it, so that scripts/nightly.py counts it
