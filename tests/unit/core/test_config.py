"""The configuration tree: every problem is told at once, with what was probably meant."""

from __future__ import annotations

import pytest

from baton.core.config import Config, HostsConfig, PhaseConfig, Plugin, SloConfig, Topology, load
from baton.core.errors import ConfigError
from baton.core.http_config import HttpConfig
from baton.core.kv_config import KVConfig, TierConfig

_CLASS = '[[classes]]\nname = "bulk"\nttft_slo_s = 20.0\ntpot_slo_s = 1.0'


def problems_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text)
    return str(caught.value).splitlines()


def test_an_empty_file_is_the_default_configuration() -> None:
    assert load("") == Config()
    assert Config().problems() == []


def test_values_are_read_into_the_tree() -> None:
    config = load(
        """
        model = "hash"
        seed = 7
        [topology]
        prefill = 2
        decode = 1
        [http]
        api_keys = ["a", "b"]
        [policy.routing]
        use = "my.module:Mine"
        options = { slack = 2.0 }
        [[hooks.request]]
        use = "my.hooks:First"
        """
    )
    assert (config.model, config.seed) == ("hash", 7)
    assert config.topology == Topology(prefill=2, decode=1)
    assert config.http.api_keys == ("a", "b")
    assert config.policy.routing == Plugin(use="my.module:Mine", options={"slack": 2.0})
    assert [hook.use for hook in config.hooks.request] == ["my.hooks:First"]


def test_unknown_keys_types_and_ranges_are_told_in_one_go() -> None:
    """All problems of a file are reported in one run."""
    problems = problems_of(
        """
        modle = "hash"
        threads = "many"
        context_tokens = -5
        [kv]
        block_token = 8
        blocks = "all"
        [http]
        port = 99999
        zzzzzzzz = 1
        """
    )
    text = "\n".join(problems)
    assert "unknown key modle (did you mean 'model'?)" in problems
    assert "unknown key kv.block_token (did you mean 'block_tokens'?)" in problems
    assert any(line.startswith("unknown key http.zzzzzzzz; known keys: host, port") for line in problems)
    assert "threads" in text
    assert "kv.blocks" in text
    assert "context_tokens is -5, but must be between 0 and" in text
    assert "http.port is 99999, but must be between 0 and 65535" in text
    assert len(problems) == 7


def test_an_unknown_key_of_a_policy_is_told_with_the_nearest() -> None:
    text = '[policy.routing]\nuse = "my.module:Mine"\noption = {}\n'
    assert problems_of(text) == ["unknown key policy.routing.option (did you mean 'options'?)"]


def test_a_key_outside_of_its_section_is_told_where_it_belongs() -> None:
    assert problems_of("port = 8001") == ["unknown key port: write http.port or hosts.port"]
    assert problems_of("queue_s = 5") == ["unknown key queue_s: write limits.queue_s"]


def test_what_does_not_fit_inside_a_list_is_told_with_the_rest() -> None:
    problems = problems_of("""
        http = { api_keys = ["a", 7], port = "x" }
        [[hooks.request]]
        use = 3
        [policy.routing]
        options = {}
    """)
    places = {line.partition(" is ")[0] for line in problems}
    assert places == {"http.port", "http.api_keys[1]", "policy.routing.use", "hooks.request[0].use"}


def test_what_is_no_toml_says_so() -> None:
    (problem,) = problems_of("model = ")
    assert problem.startswith("not a TOML file")


@pytest.mark.parametrize(
    ("topology", "hint"),
    [
        (Topology(prefill=2), "2 prefill workers, but no worker can decode: add --decode N or --mixed N"),
        (Topology(decode=3), "3 decode workers, but no worker can prefill: add --prefill N or --mixed N"),
    ],
)
def test_a_role_without_workers_is_refused(topology: Topology, hint: str) -> None:
    assert Config(topology=topology).problems() == [hint]


@pytest.mark.parametrize(
    "topology", [Topology(), Topology(prefill=1, decode=1), Topology(mixed=1), Topology(prefill=1, mixed=1)]
)
def test_workers_for_both_roles_are_accepted(topology: Topology) -> None:
    assert Config(topology=topology).problems() == []


def test_half_an_slo_is_none() -> None:
    assert "needs both" in Config(slo=SloConfig(ttft_s=1.0)).problems()[0]
    assert "needs both" in Config(slo=SloConfig(tpot_s=1.0)).problems()[0]
    assert Config(slo=SloConfig(ttft_s=1.0, tpot_s=0.1)).problems() == []


@pytest.mark.parametrize("part", ["[slo]\nttft_s = 20.0\ntpot_s = 1.0", _CLASS])
def test_a_target_beyond_the_deadline_of_the_queue_is_refused(part: str) -> None:
    (problem,) = load(part).lacks()
    assert "20 s, but requests that wait for 10 s are rejected: set limits.queue_s to 20 or more, or 0" in problem
    for queue_s in (0, 20):
        assert load(f"{part}\n[limits]\nqueue_s = {queue_s}").lacks() == []


@pytest.mark.parametrize("value", ["0.0", "-1.0", "nan"])
def test_an_slo_that_nothing_can_meet_is_refused(value: str) -> None:
    (problem,) = problems_of(f"slo = {{ ttft_s = {value}, tpot_s = 0.1 }}")
    assert "must be above 0 s" in problem


def test_an_empty_api_key_is_refused() -> None:
    """A client without a key sends an empty one."""
    (problem,) = Config(http=HttpConfig(api_keys=("", "good"))).problems()
    assert "empty key" in problem


@pytest.mark.parametrize("value", ["nan", "0.5", "1e9"])
def test_a_time_out_of_range_is_refused(value: str) -> None:
    (problem,) = problems_of(f"survival = {{ silent_s = {value} }}")
    assert problem.startswith("survival.silent_s is")


@pytest.mark.parametrize(
    "text",
    [
        "threads = -1\ncontext_tokens = -1\nlog_bytes_max = -1",
        "topology = { prefill = -1, decode = 257, mixed = 999 }",
        "kv = { block_tokens = 0, bytes = -1, blocks = -1 }",
        "batch = { step_tokens_max = 0, requests_max = 0 }",
        "http = { port = -1, body_bytes_max = 1, choices_max = 0 }",
        "survival = { attempts_max = 0, restarts_max = -1, restart_window_s = 0.0 }",
        "survival = { silent_s = 0.0, start_s = 0.0, drain_s = -1.0 }",
    ],
)
def test_every_range_is_held(text: str) -> None:
    ranges = [line for line in problems_of(text) if "must be between" in line]
    assert len(ranges) == 3 - text.startswith("batch")


def test_a_swap_that_has_nowhere_to_read_from_is_lacking() -> None:
    """A file alone may leave the tier to an argument, and a host that joins may bring one."""
    swap = KVConfig(preemption="swap")
    (lack,) = Config(kv=swap).lacks()
    assert "add --tier URL" in lack
    assert Config(kv=swap).problems() == []
    assert Config(kv=swap, tiers=(TierConfig(url="file:///kv"),)).lacks() == []
    assert Config(kv=swap, hosts=HostsConfig(expected=1)).lacks() == []
    assert Config().lacks() == []


def test_kv_in_plain_text_leaves_the_machine_with_insecure_only() -> None:
    """`nixl` cannot encrypt, so it needs the same consent."""
    (problem,) = problems_of("[hosts]\ntransports = ['nixl']")
    assert "nixl, which cannot encrypt: remove it, or set hosts.encrypt_kv = false" in problem
    plain = "[hosts]\nencrypt_kv = false\ntransports = ['nixl']\n"
    assert load(plain).lacks() == []
    exposed = f"{plain}[http]\nhost = '10.0.0.1'\napi_keys = ['k']\n"
    (problem,) = load(exposed).lacks()
    assert "hosts.encrypt_kv is false, so 10.0.0.1 sends KV in plain text: remove it, or add --insecure" in problem
    assert load(f"{exposed}insecure = true\n").lacks() == []


def test_with_precisions_per_phase_the_kind_of_a_worker_is_its_role() -> None:
    """Other kinds would be ignored: each is an error."""
    config = Config(prefill=PhaseConfig(weights="int8"), kind="gpu", cost={"kinds": {"gpu": {}, "decode": {}}})
    role = "with [prefill] or [decode], the kind of a worker is its role"
    assert config.kind_problems() == [
        f"kind is 'gpu', but {role}: leave out kind",
        f"cost.kinds lacks 'prefill'; {role}",
    ]
    assert Config(prefill=PhaseConfig(weights="int8")).kind_problems() == []
