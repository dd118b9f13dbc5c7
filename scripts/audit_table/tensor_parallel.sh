torchrun --nproc-per-node 8 pretrain_gpt.py \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 \
    --bf16 --swiglu --normalization RMSNorm --disable-bias-linear \
    --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer \
    --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather \
    --fp8-amax-history-len 16 --no-fp8-wgrad --first-last-layers-bf16
