"""Streaming: send a prompt's KV to its decode host while the rest of the prompt is still computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.core.ports import CostModel
from baton.core.types import Request


@runtime_checkable
class StreamingPolicy(Protocol):
    def run_tokens(self, request: Request, cost: CostModel) -> int:
        """Return the minimum number of tokens per copy, or 0 to copy everything after the prompt.

        Called when a prompt goes to a worker and decode workers exist on other hosts. With a value above 0, placement
        chooses the decode host now, before the prompt is computed.
        """
        ...

    def layer_groups(self, request: Request, chunk_tokens: int, cost: CostModel) -> int:
        """Return the number of layer groups in which the KV of a prompt's last chunk is sent.

        A group is sent when its layers are computed, while the step computes the next ones. 1: the KV is sent after
        the step. Called only if `run_tokens` is above 0.
        """
        ...


@dataclass(frozen=True, slots=True)
class WhenDone:
    """Copy the KV after the prompt is computed, so that placement uses the newest load."""

    def run_tokens(self, request: Request, cost: CostModel) -> int:
        return 0

    def layer_groups(self, request: Request, chunk_tokens: int, cost: CostModel) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class PlaceAtStart:
    """Choose the decode host when the prompt starts, and copy nothing before it is computed.

    For engines whose prefill server sends the KV by itself to a decode server that has the request as well.
    """

    def run_tokens(self, request: Request, cost: CostModel) -> int:
        return request.prompt_tokens  # longer than every run: the prompt's last token is never sent ahead

    def layer_groups(self, request: Request, chunk_tokens: int, cost: CostModel) -> int:
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WhileComputing:
    """Stream the KV of long prompts, so that only the last chunk remains to be copied at the end."""

    prompt_tokens_min: int = 256
    """Shorter prompts are not streamed: they finish before much could be sent."""
    shortest_tokens: int = 128
    """Smaller runs are merged with the next one, so that the fixed cost of a copy stays small.
    Source: LMCache's report, 8 ms instead of 20 for 7,500 tokens in runs of 128 instead of 16."""

    layer_groups_max: int = 16
    """Maximum number of layer groups. 1: the last chunk is sent after its step."""
    copy_s: float = 0.001
    """Fixed cost of a copy: messages between five processes, and one run per block and layer."""

    def run_tokens(self, request: Request, cost: CostModel) -> int:
        return self.shortest_tokens if request.prompt_tokens >= self.prompt_tokens_min else 0

    def layer_groups(self, request: Request, chunk_tokens: int, cost: CostModel) -> int:
        # The fewest groups whose exposed time exceeds the lowest one by at most the fixed cost of a copy.
        compute_s = cost.prefill_s(new_tokens=chunk_tokens, cached_tokens=request.prompt_tokens - chunk_tokens)
        exposed_s = [
            self._exposed_s(groups, chunk_tokens, compute_s, cost) for groups in range(1, self.layer_groups_max + 1)
        ]
        enough_s = min(exposed_s) + self.copy_s
        return next(groups for groups, left_s in enumerate(exposed_s, 1) if left_s <= enough_s)

    def _exposed_s(self, groups: int, chunk_tokens: int, compute_s: float, cost: CostModel) -> float:
        """Predict the copy time left after the step: the last group, or more if the link is slower than the step.

        The link sends one group while the next one is computed, so it has the time of all groups but the first.
        """
        group_s = cost.handoff_s(tokens=-(-chunk_tokens // groups), same_host=False) + self.copy_s
        return max(group_s, groups * group_s - compute_s * (groups - 1) / groups)
