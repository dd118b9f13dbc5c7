"""Optimizer, schedule and clipping over FP32 master weights."""
