"""Turn the fields of a request into sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from baton.compute.models.card import ModelCard
from baton.compute.models.tokenizer import Tokenizer
from baton.core.errors import RequestError
from baton.core.types import Grammar, Sampling
from baton.serve.http.wire.schemas import ChatRequest, CompletionRequest, GenerateFields

SEED_BITS = 63


def sampling_of(
    body: CompletionRequest | ChatRequest,
    card: ModelCard,
    tokenizer: Tokenizer,
    *,
    drawn_seed: int,
    grammar: Grammar | None = None,
) -> Sampling:
    """Return the sampling parameters of choice 0. `drawn_seed` is used if the client sent no seed.

    `ignore_eos` has no effect on an output with a grammar, which ends where the grammar ends.
    Raises RequestError (400) for token ids outside the vocabulary.
    """
    stop_token_ids = body.stop_token_ids or []
    check_tokens(stop_token_ids, card.vocab_tokens, "stop_token_ids")
    eos = () if body.ignore_eos and grammar is None else card.eos_token_ids
    return Sampling(
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body, card.vocab_tokens),
        bad_words=bad_words(body.bad_words or (), tokenizer),
        seed=(drawn_seed if body.seed is None else body.seed) & (2**SEED_BITS - 1),
        top_logprobs=_top_logprobs(body),
        prompt_logprobs=isinstance(body, CompletionRequest) and bool(body.echo) and body.logprobs is not None,
        stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *eos))),
        output_tokens_min=body.min_tokens or 0,
        grammar=grammar,
    )


def for_choice(sampling: Sampling, choice: int, *, output_tokens_max: int) -> Sampling:
    """Return the parameters of one of `n` choices, each with its own seed. Choice 0 keeps the client's seed.

    `output_tokens_max` overrides a larger `min_tokens`.
    """
    if sampling.output_tokens_min > output_tokens_max:
        sampling = msgspec.structs.replace(sampling, output_tokens_min=output_tokens_max)
    if choice == 0:
        return sampling
    digest = blake2b(f"{sampling.seed}:{choice}".encode(), digest_size=8).digest()
    return msgspec.structs.replace(sampling, seed=int.from_bytes(digest, "little") >> (64 - SEED_BITS))


def bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of words that an output must not have: of each word alone, and after a space.

    The tokens after a space count only if they are a form of the word of their own. Source: vLLM, `SamplingParams`.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        alone = tuple(tokenizer.encode(word.lstrip(" "), add_special=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(" "), add_special=False))
        if alone and not word.startswith(" "):
            found[alone] = None
        if spaced and (word.startswith(" ") or (len(spaced) == len(alone) and spaced[0] != alone[0])):
            found[spaced] = None
    return tuple(found)


def check_tokens(tokens: Sequence[int], vocab_tokens: int, param: str) -> None:
    """Raise RequestError (400) for a token id outside of the vocabulary."""
    if tokens and max(tokens) >= vocab_tokens:
        worst = next(index for index, token in enumerate(tokens) if token >= vocab_tokens)
        raise RequestError(
            f"{param}[{worst}] must be a token id from 0 to {vocab_tokens - 1}, got {tokens[worst]}", param=param
        )


def _logit_bias(body: GenerateFields, vocab_tokens: int) -> tuple[tuple[int, float], ...]:
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    check_tokens(list(bias), vocab_tokens, "logit_bias")
    return tuple(sorted(bias.items()))


def _top_logprobs(body: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(body, CompletionRequest):
        return body.logprobs
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError(
                f"top_logprobs is {body.top_logprobs}: set logprobs to true as well", param="top_logprobs"
            )
        return None
    return body.top_logprobs or 0


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
