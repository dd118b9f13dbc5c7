def get_gpt_layer_with_transformer_engine_spec(qk_layernorm=False):
    return None


get_gpt_layer_local_spec = get_gpt_layer_with_transformer_engine_spec
