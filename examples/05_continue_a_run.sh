#!/usr/bin/env bash
# Kill a run at any moment and run the same command again: it continues from its newest checkpoint.
#   examples/05_continue_a_run.sh [key=value …]      PYTHON=… chooses the interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
command=(
    "${PYTHON:-python}" pretrain_gpt.py model.fp8=True trainer.accelerator=cpu
    model.num_layers=2 model.hidden_size=64 model.ffn_hidden_size=256 model.num_attention_heads=4
    model.encoder_seq_length=64 model.micro_batch_size=8 model.global_batch_size=16
    'model.data.splits_string="990,5,5"'
    trainer.max_steps=20 trainer.log_every_n_steps=1 model.optim.sched.warmup_steps=5
    exp_manager.checkpoint_callback_params.every_n_train_steps=5
    exp_manager.create_tensorboard_logger=False exp_manager.exp_dir="$runs" "$@"
)

"${command[@]}" &
run=$!
until compgen -G "$runs/*/checkpoints/step_*" >/dev/null; do # a checkpoint has this name when it is complete
    kill -0 "$run" 2>/dev/null || wait "$run"
    sleep 0.05
done
kill -KILL "$run"
wait "$run" || echo "--- killed; the same command again:"

"${command[@]}"
steps=$(sed -n 's/.*"step": *\([0-9]*\).*"loss".*/\1/p' "$runs"/*/metrics.jsonl | xargs)
echo "--- training steps in metrics.jsonl, each once: $steps"
