"""Pretrain GPT models with FP8 on any device."""

__version__ = "0.2.0.dev0"
