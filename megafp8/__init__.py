"""Pretrain GPT models with FP8 on any device."""

from pathlib import Path

__version__ = Path(__file__).with_name("VERSION").read_text("utf-8").strip()
