"""llama.cpp through llama-cpp-python's low-level binding: a batch of one token per sequence, with logits of each."""

from __future__ import annotations

import ctypes
import time

import llama_cpp
import numpy as np
from protocol import Job, serve

UBATCH_TOKENS = 512
"""The default of llama.cpp."""
BF16 = 30
"""The ggml_type of bfloat16, which has no name in the binding. Source: ggml.h."""
KV_TYPES = {"float32": llama_cpp.GGML_TYPE_F32, "bfloat16": BF16}


class LlamaCppPeer:
    def __init__(self, job: Job) -> None:
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(job.model.encode(), parameters)
        self._vocab_tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._job = job
        self._prompt_context = self._context(job.prompt_tokens_max, 1)
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def prefill(self, prompt: list[int]) -> float:
        memory = llama_cpp.llama_get_memory(self._prompt_context)
        llama_cpp.llama_memory_clear(memory, True)
        started = time.perf_counter()
        self._run(self._prompt_context, [(token, at, 0) for at, token in enumerate(prompt)], last_only=True)
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]]) -> list[float]:
        context = self._filled(prompts)
        tokens = [prompt[-1] for prompt in prompts]
        seconds = []
        for step in range(self._job.steps):
            at = self._job.context_tokens + step
            started = time.perf_counter()
            tokens = self._run(context, [(token, at, index) for index, token in enumerate(tokens)], last_only=False)
            seconds.append(time.perf_counter() - started)
        memory = llama_cpp.llama_get_memory(context)
        for index in range(len(prompts)):
            llama_cpp.llama_memory_seq_rm(memory, index, self._job.context_tokens, -1)
        return seconds

    def _filled(self, prompts: list[list[int]]) -> ctypes.c_void_p:
        if len(prompts) not in self._contexts:
            room = self._job.context_tokens + self._job.steps + 32
            context = self._contexts[len(prompts)] = self._context(room * len(prompts), len(prompts))
            for index, prompt in enumerate(prompts):
                self._run(context, [(token, at, index) for at, token in enumerate(prompt)], last_only=True)
        return self._contexts[len(prompts)]

    def _context(self, tokens: int, sequences: int) -> ctypes.c_void_p:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = tokens
        parameters.n_batch = self._job.prompt_tokens_max
        parameters.n_ubatch = UBATCH_TOKENS
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = self._job.threads
        kind = KV_TYPES.get(self._job.weights, BF16)
        parameters.type_k = parameters.type_v = kind
        return llama_cpp.llama_init_from_model(self._model, parameters)

    def _run(self, context: ctypes.c_void_p, rows: list[tuple[int, int, int]], *, last_only: bool) -> list[int]:
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for row, (token, position, sequence) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = not last_only or row == len(rows) - 1
        status = llama_cpp.llama_decode(context, batch)
        llama_cpp.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {len(rows)} tokens")
        asked = [len(rows) - 1] if last_only else range(len(rows))
        return [int(np.argmax(self._logits(context, row))) for row in asked]

    def _logits(self, context: ctypes.c_void_p, row: int) -> np.ndarray:
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), shape=(self._vocab_tokens,))


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Discard the output of the library."""


if __name__ == "__main__":
    serve(LlamaCppPeer)
