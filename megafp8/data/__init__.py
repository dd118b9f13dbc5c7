"""This package turns text into microbatches: corpus, tokenizer, indexed dataset, samples, loader.

It does not import torch.
"""
