"""The standard integration tests of chat models of LangChain, for its OpenAI client against a real server.

Runs in the environment of LangChain; `test_frameworks.py` starts it.
"""

from __future__ import annotations

import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestBaton(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": os.environ["MODEL"],
            "base_url": os.environ["BASE_URL"],
            "api_key": "unused",
            "max_tokens": 1500,
            "temperature": 0,
            "stream_usage": True,
            "extra_body": {"min_tokens": 4},
        }

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True
