"""Model files: configuration, weights, tokenizer and chat template; and the grammars of structured outputs."""
