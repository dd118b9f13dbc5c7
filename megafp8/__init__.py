"""Pretrain GPT models with FP8 on any device."""

__version__ = "0.1.0"
