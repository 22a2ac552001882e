"""Build `tokenizers` pipelines from the vocabularies in GGUF files."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from baton.core.errors import ModelError

SPACE_MARK = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

GPT2_NAMES = ("default", "gpt-2")
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
BOS_PRE_TOKENIZERS = LLAMA3_NAMES
"""Pre-tokenizers whose texts start with BOS, unless the file says otherwise."""
KNOWN_PRE_TOKENIZERS = (*GPT2_NAMES, "smollm", *LLAMA3_NAMES, "qwen2")


def byte_level_backend(where: str, tokens: Sequence[str], merges: Sequence[str], pre: str) -> Tokenizer:
    """Build a byte-level BPE pipeline. `pre` names the pre-tokenizer, which splits text before merges are applied.

    Raises ModelError for an unknown one, because another split would give wrong tokens.
    """
    if pre not in KNOWN_PRE_TOKENIZERS:
        raise ModelError(
            f"{where} has the pre-tokenizer {pre!r}; Baton knows {', '.join(KNOWN_PRE_TOKENIZERS)}: "
            "use the model's safetensors folder with its tokenizer.json"
        )
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in LLAMA3_NAMES)
    backend = Tokenizer(model)
    backend.pre_tokenizer = _pre_tokenizer(pre)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    pattern = QWEN2_SPLIT if pre == "qwen2" else LLAMA3_SPLIT
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def sentencepiece_backend(tokens: Sequence[str], scores: Sequence[float], *, add_space_prefix: bool) -> Tokenizer:
    """Build a SentencePiece BPE pipeline. Merges into pieces with higher scores come first; bytes are the fallback.

    The file has scores but no merges, so every split of a piece into two other pieces becomes a merge.
    """
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[float, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=False):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-score, vocabulary[left], left, right))
    merges.sort()
    pairs = [(left, right) for _, _, left, right in merges]
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=pairs, unk_token=tokens[0], fuse_unk=True, byte_fallback=True)
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    if add_space_prefix:
        steps.insert(0, normalizers.Prepend(SPACE_MARK))
    backend.normalizer = normalizers.Sequence(steps)
    return backend
