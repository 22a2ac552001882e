"""Where a host finds the server that it joins."""

from __future__ import annotations

import pytest

from baton.core.errors import ConfigError
from baton.serve.host.join_request import JoinFailedError, find_server, server_address


def test_a_server_that_is_named_is_taken() -> None:
    assert find_server("https://10.0.0.1:8000") == "https://10.0.0.1:8000"


def test_an_etcd_that_does_not_answer_is_tried_again() -> None:
    with pytest.raises(JoinFailedError, match=r"etcd at http://127\.0\.0\.1:1 does not answer kv/range"):
        find_server("etcd://127.0.0.1:1/fleet")


def test_other_addresses_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"or etcd://10\.0\.0\.1:2379/NAME"):
        server_address("zookeeper://127.0.0.1/fleet")
