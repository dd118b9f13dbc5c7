from dataclasses import dataclass


@dataclass
class TransformerConfig:
    num_layers: int = 2
    bf16: bool = False
    fp16: bool = False
    fp8: str | None = None
    fp8_recipe: str = "delayed"
    fp8_quantizer_factory: str | None = None
    fp8_margin: int = 0
    fp8_interval: int = 1
    fp8_wgrad: bool = True
    fp8_param: bool = False
    fp8_dot_product_attention: bool = False
    fp8_multi_head_attention: bool = False
    tp_only_amax_red: bool = False
    first_last_layers_bf16: bool = False
    fp8_output_proj: bool = False
