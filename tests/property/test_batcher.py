"""The batcher against a real host pool: whatever is said, when and how often, every text is what it would be alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.config import BatchLimits
from baton.core.messages import (
    BlocksGranted,
    BlocksSealed,
    PoolCommand,
    PreemptRequest,
    PrefillFinished,
    ReleaseBlocks,
    RequestDropped,
    RequestFinished,
    StartDecode,
    StartPrefill,
    StartRequest,
    StepReport,
    StopRequest,
    ToWorker,
    WorkerCommand,
    WorkerLost,
)
from baton.core.step import Step, StepResult
from baton.core.types import (
    HostId,
    OutputToken,
    Request,
    RequestId,
    Sampling,
    Until,
    WorkerId,
    pack_tokens,
)
from baton.decide.kv.hashing import block_hashes
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.window import PromptRules
from baton.decide.policy.eviction import LeastRecentlyUsed
from tests.property.little_cluster import BLOCK_TOKENS, STOP, Arena, Held, Part, Process, new_batcher, text_alone

BLOCKS = 9
WORKERS = [WorkerId("a"), WorkerId("b")]
workers = st.sampled_from(WORKERS)


class BatchersUnderAnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = self.new_pool(PromptRules())
        self.arena = Arena()
        self.parts: dict[RequestId, Part] = {}
        self.limits = BatchLimits()
        self.hash_tokens = BLOCK_TOKENS
        self.processes: dict[WorkerId, Process] = {}
        self.number = 0

    def new_pool(self, prompts: PromptRules) -> HostPool:
        return HostPool(
            host=HostId("h"),
            blocks_total=BLOCKS,
            block_tokens=BLOCK_TOKENS,
            eviction=LeastRecentlyUsed,
            prompts=prompts,
        )

    @initialize(
        step_tokens=st.integers(1, 9),
        requests=st.integers(1, 4),
        growth=st.sampled_from((1, 4, 9)),
        hash_tokens=st.sampled_from((BLOCK_TOKENS, BLOCK_TOKENS, 2, 1)),
        asks_always=st.booleans(),
    )
    def boot(self, step_tokens: int, requests: int, growth: int, hash_tokens: int, asks_always: bool) -> None:
        """`asks_always`: no prompt gets its first blocks with its start."""
        self.pool = self.new_pool(PromptRules(hash_tokens=hash_tokens, growth_tokens=None if asks_always else growth))
        self.hash_tokens = hash_tokens
        self.limits = BatchLimits(step_tokens_max=step_tokens, requests_max=requests, growth_tokens=growth)
        self.processes = {worker: self.process(worker) for worker in WORKERS}

    def process(self, worker: WorkerId) -> Process:
        return Process(new_batcher(worker, self.limits, self.hash_tokens))

    # ---- the server's side

    def open(self) -> list[Part]:
        return [part for part in self.parts.values() if not part.closed]

    def carry(self, commands: Sequence[PoolCommand]) -> None:
        for command in commands:
            if isinstance(command, ToWorker):
                self.processes[command.worker].inbox.append(command.command)
        self.pool.check()

    def launch(self, part: Part, worker: WorkerId, until: Until) -> None:
        """As the driver does it: the pool first, then the worker with what the pool holds, then what follows."""
        command = (
            StartPrefill(part.request, part.attempt, worker, until)
            if len(part.tokens) == len(part.prompt)
            else StartDecode(part.request, part.attempt, worker)
        )
        part.worker = worker
        follow_up = self.pool.handle(command)
        table, computed_tokens = self.pool.table(part.request.id)
        part.sealed_blocks = computed_tokens // BLOCK_TOKENS
        part.last_start = StartRequest(
            part.request, part.attempt, pack_tokens(part.tokens), until, table, computed_tokens
        )
        self.processes[worker].inbox.append(part.last_start)
        self.carry(follow_up)

    def close(self, part: Part) -> None:
        part.closed, part.worker = True, None
        self.carry(self.pool.handle(ReleaseBlocks(part.request.id)))

    # ---- what clients do

    @rule(
        worker=workers,
        stream=st.integers(0, 1),
        prompt_tokens=st.integers(1, 14),
        output=st.integers(1, 8),
        stops=st.booleans(),
        logprobs=st.integers(0, 3),
        handed_off=st.booleans(),
    )
    def arrive(
        self,
        worker: WorkerId,
        stream: int,
        prompt_tokens: int,
        output: int,
        stops: bool,
        logprobs: int,
        handed_off: bool,
    ) -> None:
        assume(len(self.open()) < 6)
        self.number += 1
        prompt = [20 + 10 * stream + position % 7 for position in range(prompt_tokens)]
        request = Request(
            id=RequestId(f"r{self.number}"),
            prompt_tokens=prompt_tokens,
            block_hashes=block_hashes(prompt, block_tokens=self.hash_tokens),
            output_tokens_max=output,
            arrived_at_s=float(self.number // 2),
            sampling=Sampling(stop_token_ids=(STOP,) if stops else (), prompt_logprobs=logprobs == 0),
        )
        part = Part(request, prompt, list(prompt))
        self.parts[request.id] = part
        self.launch(part, worker, "first_token" if handed_off else "end")

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from(self.open()))
        if part.worker is not None:
            self.processes[part.worker].inbox.append(StopRequest(part.request.id, part.attempt, part.worker))
        self.close(part)

    @rule(worker=workers, data=st.data())
    def say_it_twice(self, worker: WorkerId, data: st.DataObject) -> None:
        """A start that comes twice while the first one is being obeyed changes nothing."""
        process = self.processes[worker]
        assume(process.step is None and process.held)
        part = self.parts[data.draw(st.sampled_from(sorted(process.held)))]
        if part.last_start is not None and part.last_start.attempt == process.held[part.request.id].attempt:
            before = process.batcher.view(0.0)
            process.batcher.apply([part.last_start])
            assert process.batcher.view(0.0) == before

    # ---- what workers do

    @rule(worker=workers, words=st.integers(1, 4))
    def listen(self, worker: WorkerId, words: int) -> None:
        """Take some of what is under way; between two steps only."""
        process = self.processes[worker]
        if process.step is not None:
            return
        taken, process.inbox = process.inbox[:words], process.inbox[words:]
        for command in taken:
            self.note(process, command)
        process.batcher.apply(taken)

    def note(self, process: Process, command: WorkerCommand) -> None:
        """Keep our own book of what the worker holds."""
        match command:
            case StartRequest(request=request, attempt=attempt):
                if request.id not in process.held:
                    computed_tokens = min(command.computed_tokens, len(command.tokens) // 4 - 1)
                    process.held[request.id] = Held(attempt, command.block_table, computed_tokens)
            case StopRequest(request_id=request_id):
                process.held.pop(request_id, None)
            case BlocksGranted(request_id=request_id) if request_id in process.held:
                held = process.held[request_id]
                if not held.table:
                    held.computed_tokens = command.cached_blocks * BLOCK_TOKENS
                    self.parts[request_id].sealed_blocks = command.cached_blocks
                held.table = command.block_table
            case PreemptRequest(request_id=request_id) if request_id in process.held:
                process.held[request_id] = Held(command.attempt)
            case _:
                pass

    @rule(worker=workers)
    def begin(self, worker: WorkerId) -> None:
        process = self.processes[worker]
        if process.step is not None:
            return
        step = process.batcher.plan(0.0)
        self.send(process)
        self.check_step(process, step)
        process.step = step if step.slices else None

    @rule(worker=workers)
    def end(self, worker: WorkerId) -> None:
        process = self.processes[worker]
        if process.step is None:
            return
        step, process.step = process.step, None
        result = StepResult([self.arena.compute(part) for part in step.slices])
        for part in step.slices:
            process.held[part.request_id].computed_tokens += part.count
        process.batcher.commit(step, result)
        self.send(process)

    def send(self, process: Process) -> None:
        report = process.batcher.take_report(now_s=0.0)
        if report is not None:
            process.outbox.append(report)
            for event in report.events:
                if isinstance(event, RequestFinished | PrefillFinished):
                    del process.held[event.request_id]
        assert process.batcher.take_report(now_s=0.0) is None, "said twice"

    def check_step(self, process: Process, step: Step) -> None:
        """The limits, room, and that every token is computed once, in order, from what is there already."""
        assert step.tokens <= self.limits.step_tokens_max
        assert len(step.slices) <= self.limits.requests_max
        assert max(Counter(part.request_id for part in step.slices).values(), default=1) == 1
        for part in step.slices:
            held = process.held[part.request_id]
            assert part.count >= 1
            assert part.start == held.computed_tokens, "a token is computed twice, or left out"
            assert tuple(part.block_table) == held.table
            assert part.start + part.count <= len(part.block_table) * BLOCK_TOKENS, "no room"
            assert part.start + part.count <= len(part.tokens)
            assert part.sample == (part.start + part.count == len(part.tokens))
        self.check_no_request_starves(process, {part.request_id for part in step.slices})

    def check_no_request_starves(self, process: Process, chosen: set[RequestId]) -> None:
        """Every decoding request with room is in every step, and no step is empty while there is work."""
        view = process.batcher.view(0.0)
        decoding: list[RequestId] = []
        able = 0
        for request_id, held in process.held.items():
            room = held.table and held.computed_tokens < len(held.table) * BLOCK_TOKENS
            able += bool(room)
            computing = held.computed_tokens < self.parts[request_id].request.prompt_tokens
            if room and (not computing or self.decodes(process, request_id)):  # the last token of a prompt too
                decoding.append(request_id)
        assert view.running_requests == sum(bool(held.table) for held in process.held.values())
        assert chosen or not able, "requests could go on and none does"
        if len(decoding) <= min(self.limits.requests_max, self.limits.step_tokens_max):
            known = {request_id for request_id in decoding if self.decodes(process, request_id)}
            assert known <= chosen, "a decode waits for a prompt"

    def decodes(self, process: Process, request_id: RequestId) -> bool:
        """True where exactly one token is left to compute, as far as the server knows the text."""
        part, held = self.parts[request_id], process.held[request_id]
        return not process.outbox and held.computed_tokens == len(part.tokens) - 1

    # ---- reports arrive

    @rule(worker=workers)
    def hear(self, worker: WorkerId) -> None:
        process = self.processes[worker]
        if process.outbox:
            self.take_in(process.outbox.pop(0))

    def take_in(self, report: StepReport) -> None:
        for token in report.tokens:
            self.take_token(token, report.worker)
        for event in report.events:
            part = self.parts[event.request_id]
            current = (part.attempt, part.worker) == (event.attempt, event.worker) and not part.closed
            if current and isinstance(event, BlocksSealed):
                self.check_sealed(part, event)
            if current and isinstance(event, RequestDropped):
                assert event.preempted, "dropped a request that was not stopped"
                part.sealed_blocks = 0
            self.carry(self.pool.handle(event))
            if current and isinstance(event, RequestFinished | PrefillFinished):
                self.check_end(part, event)

    def take_token(self, token: OutputToken, worker: WorkerId) -> None:
        part = self.parts[token.request_id]
        if part.closed or (part.attempt, part.worker) != (token.attempt, worker):
            return
        assert token.index == len(part.tokens) - len(part.prompt), "a token is lost or repeated"
        asked = part.request.sampling.prompt_logprobs and token.index == 0
        told = [entry.token for entry in token.prompt_logprobs]
        assert told == (part.prompt[1:] if asked else []), "not one log probability for each prompt token"
        part.tokens.append(token.token)

    def check_sealed(self, part: Part, event: BlocksSealed) -> None:
        """Named after their content, in order, none twice, and the content is there."""
        assert event.first == part.sealed_blocks
        part.sealed_blocks += len(event.hashes)
        assert event.hashes, "sealed nothing"
        for index, name in enumerate(event.hashes, start=event.first):
            held = part.tokens[: (index + 1) * BLOCK_TOKENS]
            assert name == block_hashes(held, block_tokens=self.hash_tokens)[-1]
        table, _ = self.pool.table(part.request.id)
        for index in range(event.first, part.sealed_blocks):
            first = index * BLOCK_TOKENS
            assert self.arena.holds(table[index], first, part.tokens[first : first + BLOCK_TOKENS])

    def check_end(self, part: Part, event: RequestFinished | PrefillFinished) -> None:
        """All full blocks were sealed before the end was said; the end is where the text alone ends."""
        assert part.sealed_blocks == (len(part.tokens) - 1) // BLOCK_TOKENS, "sealed after the end, or never"
        output, expected = part.tokens[len(part.prompt) :], text_alone(part.request, part.prompt)
        if isinstance(event, PrefillFinished):
            assert event.computed_tokens == len(part.tokens) - 1
            assert len(output) < len(expected), "handed off what is over"
            assert output == expected[: len(output)]
            part.worker = None
            return
        assert output == expected
        stopped = output[-1] in part.request.sampling.stop_token_ids
        assert event.reason == ("stop" if stopped else "length")
        self.close(part)

    @precondition(lambda self: any(part.worker is None for part in self.open()))
    @rule(data=st.data(), worker=workers)
    def hand_off(self, data: st.DataObject, worker: WorkerId) -> None:
        """The next leg, on the other worker or on the same one."""
        part = data.draw(st.sampled_from([part for part in self.open() if part.worker is None]))
        self.launch(part, worker, "end")

    @rule(worker=workers, last_words=st.integers(0, 2), late=st.booleans())
    def kill(self, worker: WorkerId, last_words: int, late: bool) -> None:
        """A process dies within whatever it does; some of its reports arrive, perhaps after the next attempt began."""
        process = self.processes[worker]
        if process.step is not None:
            self.arena.corrupt_kv(process.step)
        words = process.outbox[:last_words]
        self.processes[worker] = self.process(worker)
        for report in [] if late else words:
            self.take_in(report)
        self.carry(self.pool.handle(WorkerLost(worker, "killed")))
        for part in self.open():
            if part.worker == worker:
                part.attempt += 1
                assert part.last_start is not None
                self.launch(part, WORKERS[part.attempt % 2], part.last_start.until)
        for report in words if late else []:
            self.take_in(report)

    # ---- always, and at the end

    @invariant()
    def blocks_are_conserved(self) -> None:
        view = self.pool.view()
        assert view.blocks_free + view.blocks_used + view.blocks_cached == view.blocks_total

    def teardown(self) -> None:
        """Let all requests continue: each ends with its text, and no block stays held."""
        for _ in range(300):
            for part in self.open():
                if part.worker is None:
                    self.launch(part, WORKERS[0], "end")
            for worker, process in self.processes.items():
                self.end(worker)
                self.listen(worker, len(process.inbox))
                self.begin(worker)
                while process.outbox:
                    self.hear(worker)
        assert not self.open(), f"never finished: {[part.request.id for part in self.open()]}"
        for process in self.processes.values():
            view = process.batcher.view(0.0)
            assert (view.running_requests, view.waiting_requests, view.context_tokens) == (0, 0, 0)
            assert process.held == {}
        assert (self.pool.holders, self.pool.view().blocks_used) == (0, 0)


TestBatcher = BatchersUnderAnyOrder.TestCase
TestBatcher.settings = settings(max_examples=settings().max_examples * 3 // 2, stateful_step_count=60)
