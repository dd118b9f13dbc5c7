"""Text to microbatches: corpus, tokenizer, indexed dataset, samples, loader. No torch here."""
