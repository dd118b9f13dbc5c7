from megatron.core import parallel_state  # noqa: F401
