"""Update FP32 master weights: the optimizer, its learning-rate schedules and gradient clipping."""
