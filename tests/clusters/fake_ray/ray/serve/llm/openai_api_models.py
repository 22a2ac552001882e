"""Response types of Ray Serve: vLLM's there, those of the OpenAI client here. Both check the fields of the API."""

from __future__ import annotations

from openai.types import Completion as CompletionResponse
from openai.types import CreateEmbeddingResponse as EmbeddingResponse
from openai.types.chat import ChatCompletion as ChatCompletionResponse
from pydantic import BaseModel

__all__ = ["ChatCompletionResponse", "CompletionResponse", "EmbeddingResponse", "ErrorResponse"]


class ErrorInfo(BaseModel):
    message: str
    type: str
    code: int


class ErrorResponse(BaseModel):
    error: ErrorInfo
