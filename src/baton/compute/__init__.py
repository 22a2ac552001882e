"""What computes: model files, tokenizers and grammars, and the engines that run one forward pass a step."""
