#!/bin/sh
# Train the default job in BF16 and in every recipe of FP8 and FP4, and compare them on one page.
# Further settings are passed on:  examples/sweeps/recipes.sh trainer.max_steps=200
cd "$(dirname "$0")/../.." || exit 1
exec "${PYTHON:-python}" pretrain_gpt.py -m \
    precision=bf16,fp8_delayed_hybrid,fp8_delayed_e4m3,fp8_tensorwise,fp8_rowwise,fp8_rowwise_with_gw_hp,fp8_blockwise,mxfp8,nvfp4 \
    "$@"
