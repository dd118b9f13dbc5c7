#!/bin/sh
# Train with delayed scaling: margins times lengths of the amax history, then margins with the most
# recent amax alone, under which a history has no effect.
# Further settings are passed on:  examples/sweeps/scaling.sh trainer.max_steps=200
cd "$(dirname "$0")/../.." || exit 1
"${PYTHON:-python}" pretrain_gpt.py -m model.fp8=True model.fp8_health=full \
    model.fp8_amax_compute_algo=max model.fp8_amax_history_len=4,16,1024 model.fp8_margin=0,1,2 "$@" || exit
exec "${PYTHON:-python}" pretrain_gpt.py -m model.fp8=True model.fp8_health=full \
    model.fp8_amax_compute_algo=most_recent model.fp8_margin=0,1,2 "$@"
