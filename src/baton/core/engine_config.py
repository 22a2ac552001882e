"""The section `engines` of the configuration: servers of another inference engine as workers."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Struct

from baton.core.types import Role
from baton.core.validation import Range

SERVERS_MAX = 256
Engine = Literal["vllm", "sglang", "llamacpp", "openai"]
_NAMES: dict[Engine, str] = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "openai": "OpenAI's API"}
_MIXED_ONLY: tuple[Engine, ...] = ("llamacpp", "openai")
"""Engines whose servers hand off no KV and publish no events."""


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server of another engine."""

    url: str
    role: Role = "mixed"
    engine: Engine = "vllm"
    model: str = ""
    """Model name at an `openai` server. Empty: its first."""
    kv_tokens: Annotated[int, Range(least=0)] = 0
    """KV cache of an `openai` server. 0: 131,072."""
    kv_events: str = ""
    """Address of its KV events, such as tcp://10.0.0.1:5557. Empty: its cache is predicted."""
    kv_events_replay: str = ""
    """Address that repeats past events. Empty: a gap empties the server's part of the index."""


class EnginePodsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[Pods with vLLM servers](integrations/vllm.md#servers-in-kubernetes), instead of `servers`."""

    selector: str = ""
    """Pod labels, such as app=vllm."""
    namespace: str = ""
    """Empty: that of Baton's pod."""
    port: Annotated[int, Range(least=1, most=65535)] = 8000
    kv_events_port: Annotated[int, Range(least=0, most=65535)] = 0
    """0: no events."""
    kv_events_replay_port: Annotated[int, Range(least=0, most=65535)] = 0


class EnginesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Servers as workers: [vLLM](integrations/vllm.md), [SGLang](integrations/sglang.md),
    [llama.cpp](integrations/llamacpp.md), [others](integrations/openai.md)."""

    servers: tuple[EngineConfig, ...] = ()
    pods: EnginePodsConfig = EnginePodsConfig()
    start: Literal["baton", "vllm", "sglang"] = "baton"
    """Engine of the workers in `topology`, which Baton starts."""
    command: str = ""
    """Servers' program, with arguments. Empty: the engine's name."""
    flags: str = ""
    """Servers' further flags."""
    store: str = ""
    """Store for the KV of started servers. Empty: they hand it off by NIXL."""
    key: str = ""
    """Servers' bearer key. Prefer BATON_ENGINE_KEY. Started servers get a random one."""
    silent_s: Annotated[float, Range(least=0.1, most=3600)] = 10.0
    """A server that is silent for so long is lost."""
    check_s: Annotated[float, Range(least=0.01, most=60)] = 1.0
    """Interval of health checks."""

    @property
    def is_used(self) -> bool:
        """Whether the workers are servers of another engine."""
        return bool(self.servers or self.pods.selector)

    @property
    def names(self) -> str:
        """The names of the servers' engines, for messages."""
        if self.pods.selector:
            return _NAMES["vllm"]
        return " and ".join(dict.fromkeys(_NAMES[server.engine] for server in self.servers))

    @property
    def is_paired(self) -> bool:
        """Whether a prefill and a decode server run each request together, as SGLang's do."""
        return any(server.engine == "sglang" and server.role != "mixed" for server in self.servers)

    def problems(self) -> list[str]:
        """Return every problem of the section, for `Config.problems`."""
        found = [
            f"engines.servers: {server.url!r} is no URL of a server: write http://HOST:PORT"
            for server in self.servers
            if not _is_url(server.url.removesuffix("/v1") if server.engine == "openai" else server.url)
        ]
        found += [
            f"engines.servers: {address!r} is no ZMQ address: write tcp://HOST:PORT or ipc://PATH"
            for server in self.servers
            for address in (server.kv_events, server.kv_events_replay)
            if address and not address.startswith(("tcp://", "ipc://"))
        ]
        mixed_only = {_NAMES[server.engine] for server in self.servers if server.engine in _MIXED_ONLY}
        if any(server.kv_events and server.engine in _MIXED_ONLY for server in self.servers):
            engines = " or ".join(sorted(mixed_only))
            found.append(f"engines.servers has kv_events for a server of {engines}, which has none: leave them out")
        if any((server.model or server.kv_tokens) and server.engine != "openai" for server in self.servers):
            found.append("engines.servers has model or kv_tokens for a server that reports them itself: leave them out")
        if self.store and "sglang" in (self.start, *(server.engine for server in self.servers)):
            found.append("engines.store is for vLLM servers: leave it out, SGLang servers hand KV off by themselves")
        for name, text in (("command", self.command), ("flags", self.flags)):
            try:
                shlex.split(text)
            except ValueError as error:
                found.append(f"engines.{name}: {text!r} is no command line: {error}")
        if self.pods.selector and self.servers:
            found.append("engines.servers and engines.pods both name the servers: leave out one of them")
        counts = Counter(server.url.rstrip("/") for server in self.servers)
        found += [f"engines.servers has {url} {count} times" for url, count in counts.items() if count > 1]
        if len(self.servers) > SERVERS_MAX:
            found.append(f"engines.servers has {len(self.servers)} servers, but may have {SERVERS_MAX}")
        apart = [server for server in self.servers if server.role != "mixed"]
        if apart and mixed_only:
            engines = " and ".join(sorted(mixed_only))
            found.append(
                f"engines.servers has servers of {engines}, which cannot hand off KV: give every server the role mixed"
            )
        elif apart and len({server.engine for server in self.servers}) > 1:
            found.append("engines.servers has prefill and decode servers of several engines, but KV needs one engine")
        roles = [server.role for server in self.servers]
        if self.is_paired and "mixed" in roles:
            found.append(
                "engines.servers has SGLang servers of the role mixed beside others: a server that was started with"
                " --disaggregation-mode needs a partner, so give every server the role prefill or decode"
            )
        if "prefill" in roles and not {"decode", "mixed"} & {*roles}:
            found.append("engines.servers has prefill servers, but none that can decode: add --engine-url decode=URL")
        if "decode" in roles and not {"prefill", "mixed"} & {*roles}:
            found.append("engines.servers has decode servers, but none that can prefill: add --engine-url prefill=URL")
        return found


def _is_url(url: str) -> bool:
    """Return whether a URL has only an HTTP scheme, a host and optionally a port."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    is_plain = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and is_plain


def engine_of(text: str, engine: Engine = "vllm") -> EngineConfig:
    """Return the server that `--engine-url [ROLE=]URL` or `ENGINE=URL` names. `engine`: of a URL that names none.

    The URL is checked with the whole configuration.
    """
    role, mark, url = text.partition("=")
    if mark and role == "llamacpp":
        return EngineConfig(url=url, engine="llamacpp")
    if mark and role == "openai":
        return EngineConfig(url=url, engine="openai")
    if mark and role == "prefill":
        return EngineConfig(url=url, role="prefill", engine=engine)
    if mark and role == "decode":
        return EngineConfig(url=url, role="decode", engine=engine)
    return EngineConfig(url=url if mark and role == "mixed" else text, engine=engine)
