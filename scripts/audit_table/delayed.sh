torchrun --nproc-per-node 8 pretrain_gpt.py \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 \
    --bf16 --swiglu --normalization RMSNorm --disable-bias-linear \
    --use-distributed-optimizer \
    --fp8-format hybrid --fp8-recipe delayed \
    --fp8-margin 2 --fp8-interval 4 --fp8-amax-history-len 16 --fp8-amax-compute-algo max \
    --no-fp8-wgrad --num-layers-at-start-in-bf16 2
