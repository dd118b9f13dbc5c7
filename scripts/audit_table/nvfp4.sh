torchrun --nproc-per-node 8 pretrain_gpt.py \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 \
    --bf16 --swiglu --normalization RMSNorm --disable-bias-linear \
    --use-distributed-optimizer \
    --fp4-format e2m1 --fp4-recipe nvfp4 --fp4-param-gather \
    --fp8-margin 2 --no-fp8-wgrad --num-layers-at-end-in-bf16 4
