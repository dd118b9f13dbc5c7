from megatron.core.transformer import TransformerConfig


def core_transformer_config_from_args(args):
    return TransformerConfig(
        num_layers=int(args.num_layers),
        fp8=args.fp8_format,
        fp8_recipe=args.fp8_recipe,
        fp8_quantizer_factory=args.fp8_quantizer_factory,
        fp8_margin=args.fp8_margin,
        fp8_interval=args.fp8_interval,
        fp8_wgrad=not args.no_fp8_wgrad,
        fp8_param=args.fp8_param_gather,
        fp8_dot_product_attention=args.fp8_dot_product_attention,
        fp8_multi_head_attention=args.fp8_multi_head_attention,
        tp_only_amax_red=args.tp_only_amax_red,
        first_last_layers_bf16=args.first_last_layers_bf16,
    )
