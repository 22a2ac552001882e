"""The computing part: model files, tokenizers, grammars, and the engines that run one forward pass per step."""
