import argparse

VALUES = (
    "num-layers hidden-size ffn-hidden-size num-attention-heads seq-length "
    "max-position-embeddings micro-batch-size global-batch-size train-iters lr tokenizer-type "
    "vocab-size hidden-dropout attention-dropout attention-backend fp8-format"
)
SWITCHES = (
    "mock-data no-gradient-accumulation-fusion bf16 fp8-param-gather no-fp8-wgrad "
    "fp8-dot-product-attention fp8-multi-head-attention tp-only-amax-red sequence-parallel "
    "first-last-layers-bf16"
)


def parse_args():
    parser = argparse.ArgumentParser()
    for name in VALUES.split():
        parser.add_argument(f"--{name}")
    for name in SWITCHES.split():
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--fp8-recipe", default="delayed")
    parser.add_argument("--fp8-quantizer-factory")
    parser.add_argument("--fp8-margin", type=int, default=0)
    parser.add_argument("--fp8-interval", type=int, default=1)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    return parser.parse_args()


def validate_args(args):
    args.untie_embeddings_and_output_weights = True
    args.position_embedding_type = "rope"
    args.transformer_impl = "transformer_engine"
