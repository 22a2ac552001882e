"""Check with short prompts whether a server fails every request, while other servers answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence
from contextlib import aclosing

from baton.core.types import Sampling
from baton.integrations.engines.member import Member, can_serve
from baton.integrations.engines.port import EngineBrokenError, EngineRefusedError, EngineServer, Generation

log = logging.getLogger("baton.server")


async def is_failing(member: Member, members: Iterable[Member], tokens: Sequence[int], timeout_s: float) -> bool:
    """Return whether a server fails every request, and the other ones can serve them.

    A server of a pair must fail with each partner, and a pair without it must answer: the fault may be the partner's.
    """
    link = member.link
    others = [each for each in members if each.link is not None and each is not member]
    if link is None or not link.is_failing or not can_serve(others):
        return False
    if member.server.is_paired:
        fails = await _fails_in_pairs(member, others, tokens, timeout_s)
    else:
        fails = not await answers(member.server, None, tokens, timeout_s)
    if not fails:
        link.note_answer()
    return fails


async def _fails_in_pairs(member: Member, others: Sequence[Member], tokens: Sequence[int], timeout_s: float) -> bool:
    """Return whether a server fails with each partner, while some of its partners answer with another server."""
    role = member.config.role
    partners = [each for each in others if each.config.role != role]
    alike = [each for each in others if each.config.role == role]
    pairs = [(member, partner) for partner in partners]
    pairs += [(alike[number % len(alike)], partner) for number, partner in enumerate(partners)]

    def of(one: Member, other: Member) -> tuple[EngineServer, EngineServer]:
        return (other.server, one.server) if role == "prefill" else (one.server, other.server)

    answered = await asyncio.gather(*(answers(*of(*pair), tokens, timeout_s) for pair in pairs))
    return not any(answered[: len(partners)]) and any(answered[len(partners) :])


async def answers(server: EngineServer, partner: EngineServer | None, tokens: Sequence[int], timeout_s: float) -> bool:
    """Send a prompt, and return whether the server answers it. `partner`: its prefill server, if it needs one."""
    generation = Generation(
        id=f"probe-{secrets.token_hex(8)}",
        tokens=tokens,
        output_tokens=0,
        tokens_max=1,
        sampling=Sampling(temperature=0.0),
        partner=partner,
    )
    has_answered = False
    try:
        async with asyncio.timeout(timeout_s), aclosing(server.stream(generation)) as choices:
            async for choice in choices:
                has_answered |= bool(choice.token_ids) or choice.finish_reason in ("stop", "length")
    except EngineRefusedError:
        return True
    except (EngineBrokenError, TimeoutError) as error:
        beside = f" with {partner.url}" if partner is not None else ""
        log.warning("%s%s fails a short prompt too: %s", server.url, beside, error)
    return has_answered
