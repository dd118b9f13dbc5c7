def get_megatron_ddp_config(args):
    return None


def get_megatron_optimizer_config(args):
    return None, None
