#!/bin/sh
# Train with each of FP8-LM's levels: which of gradients, weights and moments are in low precision.
# Further settings are passed on:  examples/sweeps/optimizer_levels.sh trainer.max_steps=200
cd "$(dirname "$0")/../.." || exit 1
exec "${PYTHON:-python}" pretrain_gpt.py -m model.fp8=True \
    model.optim.fp8_opt_level=O0,O1,O2,O3 "$@"
