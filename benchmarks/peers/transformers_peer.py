"""Hugging Face transformers: PyTorch eager with its default attention. Prompts stay in a cache, which is cropped."""

from __future__ import annotations

import time

import torch
import transformers
from protocol import Job, serve


class TransformersPeer:
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[job.weights]
        self._model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).eval()
        self._job = job
        self._caches: dict[int, transformers.DynamicCache] = {}

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        tokens = torch.tensor([prompt])
        started = time.perf_counter()
        self._model(tokens, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()
        return time.perf_counter() - started

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]]) -> list[float]:
        if len(prompts) not in self._caches:
            cache = transformers.DynamicCache()
            self._model(torch.tensor(prompts), past_key_values=cache, logits_to_keep=1)
            self._caches[len(prompts)] = cache
        cache = self._caches[len(prompts)]
        tokens = torch.tensor([[prompt[-1]] for prompt in prompts])
        seconds = []
        for _ in range(self._job.steps):
            started = time.perf_counter()
            logits = self._model(tokens, past_key_values=cache, use_cache=True).logits
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            tokens.tolist()
            seconds.append(time.perf_counter() - started)
        cache.crop(-self._job.steps)
        return seconds


if __name__ == "__main__":
    serve(TransformersPeer)
