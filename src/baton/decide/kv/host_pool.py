"""The host pool: metadata of one host's arena as a pure state machine. Events of requests and workers in, grants out.

Blocks are pinned by requests, never by workers. The blocks of one request on this host are its *holding*. They are
freed when the request is released (`ReleaseBlocks`) and no worker can touch them: it has reported that, or it is dead.
When blocks are short, the oldest request is served first and the youngest one is preempted, on any worker. So the
oldest request always makes progress, and no request waits forever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

from baton.core.copies import LandingEnded, LandingRefused, LandingWanted, LeaseEnded, LeaseWanted
from baton.core.messages import (
    BatcherEvent,
    BlocksSealed,
    BlocksWanted,
    PoolCommand,
    PoolEvent,
    PrefillFinished,
    ReleaseBlocks,
    RequestDropped,
    RequestFailed,
    RequestFinished,
    StartDecode,
    StartPrefill,
    WorkerLost,
)
from baton.core.prefixes import BlocksRemoved, EngineCacheChanged
from baton.core.spill import BlocksSpilled
from baton.core.tier_messages import (
    BlocksKept,
    LoadEnded,
    LoadWanted,
    PutWanted,
    ReadBack,
    TierOpened,
    TierRests,
    TierShrunk,
)
from baton.core.types import BlockHash, BlockId, HostId, HostView, RequestId, WorkerId
from baton.decide.kv.arena_blocks import empty_arena, mirror_cache
from baton.decide.kv.blocks import EvictionOrder
from baton.decide.kv.grants import Grants
from baton.decide.kv.hashing import prefix_of, runs_per_block
from baton.decide.kv.holding import KEPT_FREE_RATIO, Holding, granted
from baton.decide.kv.hot_prefixes import HotPrefixes
from baton.decide.kv.quotas import Quotas
from baton.decide.kv.read_backs import ReadBacks
from baton.decide.kv.spill import SpillSpace
from baton.decide.kv.tier import Tier
from baton.decide.kv.window import ONE_HASH_A_BLOCK, PromptRules, behind_blocks, request_tokens_max


class HostPool:
    """The blocks of one host and the requests that hold them. `handle` is the only way in."""

    def __init__(
        self,
        *,
        host: HostId,
        blocks_total: int,
        block_tokens: int,
        eviction: Callable[[], EvictionOrder],
        tiers: Sequence[Tier] = (),
        prompts: PromptRules = ONE_HASH_A_BLOCK,
    ) -> None:
        self.host = host
        self.block_tokens = block_tokens
        self.window = prompts.window
        self.block_runs = runs_per_block(block_tokens, prompts.hash_tokens or block_tokens)
        self._arena = empty_arena(self, blocks_total, eviction, tiers, prompts)
        self._blocks, self.tiers = self._arena.blocks, self._arena.tiers
        """`tiers`: the tiers below the arena. None: there are none, and evicted blocks are lost."""
        self.hot_prefixes = HotPrefixes(self._blocks)
        self._read_backs = ReadBacks(host, self.block_tokens, self._arena, self._settle)
        self._growth_tokens = prompts.growth_tokens
        self._holdings: dict[RequestId, Holding] = {}
        self._users: dict[WorkerId, int] = {}
        """Number of holdings that each worker may touch. Workers without any are left out."""
        self.grants = Grants(
            arena=self._arena,
            read_backs=self._read_backs,
            holdings=self._holdings,
            quotas=Quotas.of(self._holdings, self._arena.orders),
            kept_free_blocks=int(blocks_total * KEPT_FREE_RATIO) if self.window is None else blocks_total,
            ahead_blocks=None if self.window is None else -(-self.window.ahead_tokens // block_tokens),
        )
        """The grants of this pool; they share its holdings."""

    def handle(self, event: PoolEvent) -> list[PoolCommand]:
        """Apply one event and return the resulting commands. Late and repeated events change nothing."""
        commands = self._apply(event)
        return commands if self.tiers is None else [*commands, *self.tiers.write_back()]

    def _apply(self, event: PoolEvent) -> list[PoolCommand]:
        match event:
            case StartPrefill():
                self._assign(event)
                return [*self._give_first(event), *self.grants.serve()]
            case StartDecode():
                self._assign(event)
            case ReleaseBlocks(request_id=request_id):
                self._release(request_id)
            case PrefillFinished() | RequestFinished() | RequestFailed():
                self._end(event)
            case BlocksSealed():
                # A seal lengthens prefix hits, so waiting requests may need fewer blocks now.
                return [*self._seal(event), *self.grants.serve()]
            case BlocksWanted() | BlocksSpilled():
                self._want(event)
            case RequestDropped():
                self._drop(event)
            case EngineCacheChanged():
                return [*mirror_cache(self._arena, event), *self.grants.serve()]
            case LandingWanted() | LandingEnded() | LeaseWanted() | LeaseEnded():
                return [*self._handle_wire(event), *self.grants.serve()]
            case ReadBack() | LoadEnded():
                told = self._read_backs.handle(self._holdings.get(event.request_id), event)
                return [*told, *self.grants.serve()]
            case BlocksKept() | LoadWanted() | PutWanted() | TierOpened() | TierRests() | TierShrunk():
                told = self.tiers.handle(event) if self.tiers is not None else []
                return [*told, *self.grants.serve()]
            case WorkerLost(worker=worker):
                for holding in [held for held in self._holdings.values() if held.user == worker]:
                    self._leave(holding)
            case _:
                assert_never(event)
        return self.grants.serve()

    def table(self, request_id: RequestId) -> tuple[tuple[BlockId, ...], int]:
        """Return the request's block table and the number of leading tokens with KV, after which a worker continues."""
        held = self._holdings.get(request_id)
        return (held.table, held.computed_tokens) if held and not held.reading else ((), 0)

    def sealed_hashes(self, request_id: RequestId) -> tuple[BlockHash, ...]:
        """Return the hashes of the request's leading sealed blocks; empty if a preemption or release is pending."""
        return held.hashes_kept if (held := self._holdings.get(request_id)) else ()

    def is_computing(self, request_id: RequestId, attempt: int, worker: WorkerId) -> bool:
        """Return whether this worker uses the request's blocks, and no preemption or release is pending."""
        return (held := self._holdings.get(request_id)) is not None and held.is_computed_by(worker, attempt)

    def held_tokens(self, hashes: Sequence[BlockHash]) -> int:
        """Return the number of leading tokens whose KV the arena holds, by the hashes of their blocks."""
        return self._arena.hit(hashes).count * self.block_tokens

    def behind(self, computed_tokens: int) -> int:
        """Return the number of leading blocks behind the attention window after `computed_tokens` tokens."""
        return behind_blocks(self.window, computed_tokens, self.block_tokens)

    def held_from_tokens(self, request_id: RequestId) -> int:
        """Return the position of the first token whose KV the request still has here."""
        return held.behind * self.block_tokens if (held := self._holdings.get(request_id)) else 0

    def view(self) -> HostView:
        """Return the number of blocks in each state."""
        return self._arena.view()

    @property
    def spill(self) -> SpillSpace | None:
        """The spill space of this host. None: there is none."""
        return self._arena.spill

    @property
    def request_tokens_max(self) -> int | None:
        """Maximum tokens of a request that this host can hold. None: any length fits."""
        rules = None if self.spill is None else self.spill.rules
        return request_tokens_max(self.window, self._blocks.total * self.block_tokens, self.block_tokens, rules)

    def blocks_of(self, worker: WorkerId) -> int:
        """Return the number of blocks that the worker's requests hold. A shared block counts once per request."""
        return sum(held.blocks for held in self._holdings.values() if held.user == worker)

    @property
    def holders(self) -> int:
        """Number of requests that hold blocks in this pool or wait for them."""
        return len(self._holdings)

    def check(self) -> None:
        """Assert that every pin belongs to a request and no block is lost (INV-2, INV-4)."""
        pins = [0] * self._blocks.total
        for holding in self._holdings.values():
            assert holding.is_touched or not holding.released, f"{holding.request.id} is over and still holds blocks"
            for block in (*holding.held, *holding.spilling, *holding.leased):
                pins[block] += 1
        self._arena.check(pins)
        if self._arena.spill is not None:
            self._arena.spill.check(list(self._holdings.values()))

    def _assign(self, event: StartPrefill | StartDecode) -> None:
        holding = self._holdings.get(event.request.id)
        if holding is None:
            holding = self._holdings[event.request.id] = Holding(event.request, event.attempt, None)
            self._use(holding, event.worker)
            return
        self._revert_spill(holding)  # the previous worker has died, and its loss is reported later
        again = isinstance(event, StartPrefill) and event.request.sampling.prompt_logprobs
        if holding.preempting or holding.reading or again:
            # The blocks are useless: a dead worker cannot give them back, an unfinished read may still write into
            # them, and prompt log probabilities require that every prompt token is computed again.
            self._arena.empty(holding)
        holding.attempt, holding.released = event.attempt, False
        self._use(holding, event.worker)
        if not holding.landing:
            holding.wanted = 0

    def _use(self, holding: Holding, worker: WorkerId | None) -> None:
        """Set the worker that may touch the holding's blocks, and count its holdings. None: no worker."""
        users = self._users
        if holding.user is not None:
            users[holding.user] -= 1
            if not users[holding.user]:
                del users[holding.user]
        if worker is not None:
            users[worker] = users.get(worker, 0) + 1
        holding.user = worker

    def _give_first(self, event: StartPrefill) -> list[BlocksRemoved]:
        """Grant a prompt's first blocks with its start if its worker is idle and would ask for them at once.

        A busy worker asks later, in its own order: by then the prefix hit may be longer. A request that comes before
        all others gets its blocks now if its class has reserved some.
        """
        request, holding = event.request, self._holdings[event.request.id]
        is_busy = self._users[event.worker] > 1
        if self._growth_tokens is None or (is_busy and not self.grants.is_first_of_class(holding)):
            return []
        if holding.table or holding.landing or holding.preempted:
            return []
        if request.block_hashes and not request.sampling.prompt_logprobs:
            holding.prefix = prefix_of(request, block_runs=self.block_runs, block_tokens=self.block_tokens)
        tokens = request.prompt_tokens + min(self._growth_tokens, request.output_tokens_max)
        holding.wanted = -(-tokens // self.block_tokens)
        hit = self.grants.grantable_hit(holding, 0)
        if hit is None:
            holding.wanted = 0
            return []
        return self.grants.hold(holding, hit)

    def _current(self, event: BatcherEvent) -> Holding | None:
        """Return the holding of the event. None: the event belongs to an abandoned attempt."""
        holding = self._holdings.get(event.request_id)
        if holding is None or holding.attempt != event.attempt or holding.user != event.worker:
            return None
        return holding

    def _want(self, event: BlocksWanted | BlocksSpilled) -> None:
        """Record how many blocks a request wants, or unpin the arena blocks that its worker has spilled."""
        holding = self._current(event)
        if isinstance(event, BlocksSpilled):
            is_current = holding is not None and event.first == holding.behind - len(holding.spilling)
            if self.spill is not None and holding is not None and is_current:
                self.spill.end(holding)
            return
        if holding is None or holding.released:
            return
        holding.wanted = event.blocks
        holding.prefix = event.prefix
        self.grants.want(event.request_id)

    def _seal(self, event: BlocksSealed) -> list[PoolCommand]:
        holding = self._current(event)
        if holding is None:
            return []
        holding.computed_tokens = (event.first + len(event.hashes)) * self.block_tokens
        return [*self._arena.seal(holding, event.first, event.hashes)]

    def _drop(self, event: RequestDropped) -> None:
        holding = self._current(event)
        if holding is None:
            return
        if event.preempted:
            self._arena.preempt(holding)
        else:
            holding.computed_tokens = max(holding.computed_tokens, event.computed_tokens)
            self._leave(holding)

    def _end(self, event: PrefillFinished | RequestFinished | RequestFailed) -> None:
        holding = self._current(event)
        if holding is None:
            return
        if isinstance(event, PrefillFinished):
            holding.computed_tokens = event.computed_tokens
        self._leave(holding)

    def _leave(self, holding: Holding) -> None:
        """Record that no worker touches the holding any more. An unfinished tier read is given up, not waited for."""
        self._use(holding, None)
        self._revert_spill(holding)
        if holding.reading:
            self._arena.empty(holding)
        if not holding.landing:
            holding.wanted = 0
        self._settle(holding)

    def _revert_spill(self, holding: Holding) -> None:
        if self.spill is not None:
            self.spill.revert(holding)

    def _settle(self, holding: Holding) -> None:
        """Free the blocks of a released or preempted holding once nothing touches them."""
        if holding.is_touched:
            return
        if holding.released:
            self._free(holding)
        elif holding.preempting:
            self._arena.preempt(holding)

    # ---- KV from and to other hosts

    def _handle_wire(self, event: LandingWanted | LandingEnded | LeaseWanted | LeaseEnded) -> list[PoolCommand]:
        match event:
            case LandingWanted():
                return self._expect(event)
            case LandingEnded():
                return self._land(event)
            case LeaseWanted():
                self._lease(event)
            case LeaseEnded(request_id=request_id):
                holding = self._holdings.get(request_id)
                if holding is not None and holding.leases:
                    self._arena.end_lease(holding)
                    self._settle(holding)
            case _:
                assert_never(event)
        return []

    def _expect(self, event: LandingWanted) -> list[PoolCommand]:
        """Request blocks to land in. If the request still has enough blocks on this host, it lands in those."""
        holding = self._holdings.get(event.request.id)
        if event.worker is None:
            return self._expect_ahead(event)
        if holding is None:
            holding = self._holdings[event.request.id] = Holding(event.request, event.attempt, None)
        if holding.user is None and not holding.landing and len(holding.table) < event.first_block:
            self._arena.empty(holding)  # its blocks here lie before those that will land
            holding.behind = event.first_block
        self._use(holding, event.worker)
        holding.attempt, holding.landing, holding.released = event.attempt, True, False
        holding.wanted, holding.prefix = event.blocks, event.prefix
        if len(holding.table) >= event.blocks:
            return [granted(holding, self.host, self.block_tokens)]
        self.grants.want(event.request.id)
        return []

    def _expect_ahead(self, event: LandingWanted) -> list[PoolCommand]:
        """Grant free blocks for KV that is sent ahead. Refuse a request that holds blocks here already."""
        request_id = event.request.id
        holding = Holding(event.request, event.attempt, None, wanted=event.blocks, prefix=event.prefix, landing=True)
        hit = None if request_id in self._holdings else self.grants.grantable_hit(holding, event.first_block)
        if hit is None:
            return [LandingRefused(self.host, request_id, event.attempt)]
        self._holdings[request_id] = holding
        return [*self.grants.hold(holding, hit), granted(holding, self.host, self.block_tokens)]

    def _land(self, event: LandingEnded) -> list[PoolCommand]:
        holding = self._holdings.get(event.request_id)
        if holding is None:
            return []
        holding.landing = False
        holding.computed_tokens = event.computed_tokens
        holding.wanted = 0
        told = self._arena.seal(holding, 0, event.hashes)
        if holding.behind > self.behind(event.computed_tokens):
            # Fewer blocks have landed than were wanted: the attention window begins before the first of them.
            self._arena.empty(holding)
        self._settle(holding)
        return [*told]

    def _lease(self, event: LeaseWanted) -> None:
        holding = self._holdings.get(event.request.id)
        if holding is None:
            holding = self._holdings[event.request.id] = Holding(event.request, 0, None)
        hit = self._arena.hit(event.prefix)
        if not holding.is_touched and hit.count * self.block_tokens > holding.computed_tokens:
            self._arena.empty(holding)
            self._arena.adopt(holding, hit, event.prefix)
        self._arena.lease(holding)

    def _release(self, request_id: RequestId) -> None:
        holding = self._holdings.get(request_id)
        if holding is None:
            return
        holding.released = True
        holding.wanted = 0
        if holding.landing and not holding.table:
            holding.landing = False
        self._settle(holding)

    def _free(self, holding: Holding) -> None:
        self._arena.empty(holding)
        del self._holdings[holding.request.id]
