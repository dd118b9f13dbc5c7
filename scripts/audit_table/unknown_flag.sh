torchrun --nproc-per-node 8 pretrain_gpt.py \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 \
    --bf16 --swiglu --normalization RMSNorm --disable-bias-linear \
    --use-distributed-optimizer \
    --fp8-format hybrid --tp-only-amax-red
