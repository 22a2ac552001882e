"""Save the state of streams that the server's end interrupts, so that clients can resume them after a restart."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from baton.core.config import SurvivalConfig
from baton.core.errors import ConfigError, RequestError
from baton.core.files import make_private_folder, open_private
from baton.decide.metrics import catalog
from baton.move.clock import unix_s
from baton.serve.http.choice import ChoiceText
from baton.serve.http.identity import Identity
from baton.serve.http.wire.errors import RETRY_AFTER_S, ClusterError
from baton.serve.live.recorder import Recorder

HEADER = b"x-baton-resume"
STREAMS_MAX = 1024
"""Maximum number of saved streams."""
_ID_BYTES = 24
_ID = re.compile(r"[A-Za-z0-9_-]{32}")
_SUFFIX = ".stream"

log = logging.getLogger("baton.server")


class SavedStream(Struct, frozen=True, kw_only=True):
    """The state of an interrupted stream. The client has received the text of the tokens in `output`."""

    path: str
    owner: str
    body: bytes
    """The request's body as the client sent it."""
    response_id: str
    seed: int
    prompt_hash: bytes
    output: tuple[int, ...]
    """Output tokens whose text the client has received."""
    expires_unix_s: int


def owner_of(identity: Identity) -> str:
    """Return the owner's name for a client's streams: its tenant and cache namespace."""
    return f"{identity.tenant}\0{identity.cache_namespace}"


class SavedStreams:
    """The saved streams in a folder. Thread-safe. Methods that are not coroutines block while they use files."""

    def __init__(self, config: SurvivalConfig, recorder: Recorder) -> None:
        """Create the folder. Raises ConfigError if that fails."""
        self.keep_s = config.resume_s
        self._folder = Path(config.resume_folder) if config.resume_folder else None
        self._bytes_max = config.resume_bytes_max
        self.recorder = recorder
        self._lock = threading.Lock()
        if self._folder is not None:
            try:
                make_private_folder(self._folder)
            except OSError as error:
                message = f"survival.resume_folder: the folder {self._folder} cannot be made: {error.strerror}"
                raise ConfigError(message) from error

    @property
    def is_used(self) -> bool:
        return self._folder is not None

    def save(self, stream: SavedStream) -> str:
        """Save a stream. Return a random id for it, or an empty string if it cannot be saved (the reason is logged)."""
        assert self._folder is not None, "no folder for saved streams is configured"
        resume_id, content = secrets.token_urlsafe(_ID_BYTES), msgspec.msgpack.encode(stream)
        try:
            with self._lock:
                held = self._held_bytes(self._folder)
                if len(held) >= STREAMS_MAX or sum(held) + len(content) > self._bytes_max:
                    log.warning(
                        "a stream of %d bytes cannot be resumed: %d streams with %d bytes are saved, and at most %d "
                        "with %d bytes may be (survival.resume_bytes_max)",
                        *(len(content), len(held), sum(held), STREAMS_MAX, self._bytes_max),
                    )
                    return ""
                self._write(resume_id, content)
        except OSError as error:
            log.warning("a stream cannot be resumed: %s cannot be written: %s", self._folder, error)
            return ""
        self.recorder.count(catalog.RESUMED, "saved")
        return resume_id

    def take(self, resume_id: str, *, owner: str, path: str) -> SavedStream:
        """Return a saved stream and delete it, so it is resumed once. Raises RequestError (404) if it is unknown."""
        file = self._file(resume_id)
        try:
            stream = msgspec.msgpack.decode(file.read_bytes(), type=SavedStream) if file is not None else None
            if file is None or stream is None or (stream.owner, stream.path) != (owner, path):
                raise FileNotFoundError
            file.unlink()  # fails for the second of two requests for the same stream
            if stream.expires_unix_s < unix_s():
                raise FileNotFoundError
        except (OSError, msgspec.DecodeError) as error:
            self.recorder.count(catalog.RESUMED, "refused")
            raise RequestError(
                f"there is no stream to resume with this id at {path}: it was resumed before, is older than "
                f"{self.keep_s:g} s (survival.resume_s) or of another tenant, or survival.resume_folder is not set; "
                "send the request without x-baton-resume",
                param="x-baton-resume",
                status=404,
                code="unknown_resume_id",
            ) from error
        return stream

    async def continuation(self, headers: Mapping[bytes, bytes], identity: Identity, path: str) -> Continuation | None:
        """Take the saved stream that `x-baton-resume` names. None: the request has no such header.

        Raises RequestError (404) if the stream is unknown.
        """
        if HEADER not in headers:
            return None
        resume_id = headers[HEADER].decode("latin-1")
        stream = await asyncio.to_thread(self.take, resume_id, owner=owner_of(identity), path=path)
        return Continuation(resume_id, stream, self)

    def restore(self, resume_id: str, stream: SavedStream) -> None:
        """Save a stream again under its id, because its continuation sent no output."""
        with self._lock, suppress(OSError):
            self._write(resume_id, msgspec.msgpack.encode(stream))

    def _held_bytes(self, folder: Path) -> list[int]:
        """Delete expired streams. Return the sizes of the others."""
        held: list[int] = []
        for file in folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):  # another request took the stream
                found = file.stat()
                if found.st_mtime + self.keep_s < unix_s():
                    file.unlink()
                else:
                    held.append(found.st_size)
        return held

    def _write(self, resume_id: str, content: bytes) -> None:
        file = self._file(resume_id)
        assert file is not None, f"{resume_id} is no id of a stream"
        with open_private(file, "wb") as opened:
            opened.write(content)

    def _file(self, resume_id: str) -> Path | None:
        """Return the file of a stream. Its name is a hash, so that it does not reveal the id."""
        if self._folder is None or _ID.fullmatch(resume_id) is None:
            return None
        return self._folder / f"{hashlib.sha256(resume_id.encode()).hexdigest()}{_SUFFIX}"


def is_resumable(choice: ChoiceText) -> bool:
    """Return whether the rest of a choice can be computed after a restart: it has no echo and no log probabilities.

    Why: log probabilities wait until the text of their tokens is released, and waiting ones are not saved.
    """
    return not choice.rules.with_logprobs and choice.prompt.echo is None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSaver:
    """Saves the stream of one request if the server ends before the stream does."""

    streams: SavedStreams
    path: str
    owner: str
    body: bytes
    response_id: str

    async def save(self, choice: ChoiceText) -> ClusterError | None:
        """Save the stream, and return the error that tells the client how to resume it. None: it cannot be saved."""
        live, request = choice.live, choice.live.request
        if not is_resumable(choice):
            return None
        end = request.prompt_tokens + request.resumed_tokens + live.stamps.sent_tokens
        stream = SavedStream(
            path=self.path,
            owner=self.owner,
            body=self.body,
            response_id=self.response_id,
            seed=request.sampling.seed,
            prompt_hash=choice.prompt.whole_hash,
            output=tuple(live.tokens[request.prompt_tokens : end]),
            expires_unix_s=unix_s() + int(self.streams.keep_s),
        )
        resume_id = await asyncio.to_thread(self.streams.save, stream)
        if not resume_id:
            return None
        return ClusterError(
            "the server ends before this stream; send the request again within "
            f"{self.streams.keep_s:g} s with the header x-baton-resume: {resume_id}, and it goes on at the next token",
            status=503,
            code="server_stopped",
            retry_after_s=RETRY_AFTER_S,
            resume_id=resume_id,
        )


@dataclass(slots=True)
class Continuation:
    """A stream that a request continues."""

    resume_id: str
    """Empty: the request carries the stream, which was not saved."""
    stream: SavedStream
    streams: SavedStreams

    async def end(self, *, has_begun: bool) -> None:
        """Save the stream again if its continuation has sent nothing, so that the client can try again."""
        await asyncio.to_thread(self._end, has_begun)

    def _end(self, has_begun: bool) -> None:  # noqa: FBT001  `asyncio.to_thread` target
        if has_begun:
            self.streams.recorder.count(catalog.RESUMED, "resumed")
        elif self.resume_id:
            self.streams.restore(self.resume_id, self.stream)

    def check(self, prompt_hash: bytes, tokens_max: int) -> None:
        """Raise RequestError (409) if the prompt differs on this server, or no further output token is allowed."""
        if prompt_hash == self.stream.prompt_hash and tokens_max > len(self.stream.output):
            return
        raise RequestError(
            f"the stream cannot be resumed here: its prompt has other tokens on this server, or more than {tokens_max} "
            "output tokens were sent; start the server with the same model and limits, or send the request without "
            "x-baton-resume",
            param="x-baton-resume",
            status=409,
            code="cannot_resume",
        )
