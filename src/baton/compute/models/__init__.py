"""Model files as they lie on disk: configuration, weights, tokenizer, chat template, grammars of outputs."""
