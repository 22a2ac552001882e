"""Bodies of OpenAI's files and batches, and of lists."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

PAGE_MAX = 100
"""Elements of one page of a list."""
UploadPurpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
"""Label of an uploaded file. Only `batch` files are used, as inputs of batches."""
Purpose = UploadPurpose | Literal["batch_output"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled"]


class FileObject(Struct, frozen=True, kw_only=True):
    """A file, as clients see it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class ExpiresAfter(Struct, frozen=True, kw_only=True):
    """When a file is deleted."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class UploadForm(Struct, frozen=True, kw_only=True):
    """The fields of an upload, apart from the file."""

    purpose: UploadPurpose
    expires_after: ExpiresAfter | None = None


class Problem(Struct, frozen=True, kw_only=True):
    """The reason why a batch cannot run."""

    code: str
    message: str
    line: int | None = None


class Problems(Struct, frozen=True, kw_only=True):
    data: tuple[Problem, ...]
    object: Literal["list"] = "list"


class Counts(Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(Struct, frozen=True, kw_only=True):
    """A batch, as clients see it."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: Problems | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    metadata: dict[str, Any] | None = None


class BatchRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"] = "24h"
    """No effect: a batch runs until it is done."""
    metadata: Annotated[dict[str, Any], Meta(max_length=16)] | None = None
    output_expires_after: dict[str, Any] | None = None
    """No effect: a file stays until it is deleted."""


class FileDeleted(Struct, frozen=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class Page(Struct, frozen=True, kw_only=True):
    """A part of a list."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool
