"""OpenVINO GenAI: continuous batching over paged attention. Prompts of decode steps come from its prefix cache."""

from __future__ import annotations

import time

import numpy as np
import openvino
import openvino_genai
from protocol import Job, serve

CACHE_GB = 2
PRECISION = {"float32": "f32"}


class OpenVinoPeer:
    def __init__(self, job: Job) -> None:
        self.version = f"openvino-genai {openvino_genai.__version__.split('-')[0]}"
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = job.prompt_tokens_max
        scheduler.max_num_seqs = job.batch_max
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        precision = PRECISION.get(job.weights, "bf16")
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": job.threads,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)
        self._job = job
        self._requests = 0

    def prefill(self, prompt: list[int]) -> float:
        handle = self._add(prompt, 1)
        started = time.perf_counter()
        while not handle.can_read():
            self._pipeline.step()
        seconds = time.perf_counter() - started
        self._finish()
        return seconds

    def decode(self, prompts: list[list[int]]) -> list[float]:
        """Run the steps that compute prompts, then decode the whole batch once every request has a token."""
        handles = [self._add(prompt, self._job.steps + len(prompts) + 2) for prompt in prompts]
        waiting = list(handles)
        while waiting:
            self._pipeline.step()
            waiting = [handle for handle in waiting if not handle.can_read()]
        seconds = []
        for _ in range(self._job.steps):
            started = time.perf_counter()
            self._pipeline.step()
            seconds.append(time.perf_counter() - started)
        for handle in handles:
            handle.cancel()
        self._finish()
        return seconds

    def _finish(self) -> None:
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()

    def _add(self, prompt: list[int], tokens: int) -> openvino_genai.GenerationHandle:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.do_sample = False
        config.ignore_eos = True
        self._requests += 1
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        return self._pipeline.add_request(self._requests, ids, config)


if __name__ == "__main__":
    serve(OpenVinoPeer)
