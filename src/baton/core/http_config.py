"""The section `http` of the configuration: the address, the keys and the certificate of the HTTP edge."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Struct

from baton.core.keys import read_keys
from baton.core.validation import Range

MetricsNames = Literal["baton", "vllm"]
Port = Annotated[int, Range(least=0, most=65535)]


class BatchesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files and batches of clients."""

    folder: str = ""
    """Folder for them. Empty: a temporary one, until the server ends. With one, a later server goes on."""
    requests_max: Annotated[int, Range(least=1, most=4096)] = 16
    """Requests of batches in the cluster at once. Their priority is below that of all others."""
    lines_max: Annotated[int, Range(least=1, most=10**6)] = 50_000
    """Requests of one batch."""
    file_bytes_max: Annotated[int, Range(least=1024, most=2**31)] = 32 * 1024 * 1024
    """Size of one file."""
    bytes_max: Annotated[int, Range(least=1024, most=2**45)] = 4 * 1024**3
    """Size of all files. Results of batches are always kept."""
    files_max: Annotated[int, Range(least=1, most=10**6)] = 1000
    batches_max: Annotated[int, Range(least=1, most=10**6)] = 1000
    """The oldest ended batches beyond it are forgotten. Their results stay."""


class HttpConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP edge."""

    host: str = "127.0.0.1"
    port: Port = 8000
    """0: any free port; the log shows which."""
    api_keys: tuple[str, ...] = ()
    """Accepted bearer keys, each a tenant. One without `admin_key` or `key_file` has every scope: docs/security.md."""
    admin_key: str = ""
    """Key with the scopes `admin` and `join`. Prefer BATON_ADMIN_KEY."""
    admin_host: str = "127.0.0.1"
    """Address for `admin_port`."""
    admin_port: Port = 0
    """Separate port for the routes of `admin` and `join`. 0: `port` serves them."""
    join_key: str = ""
    """Key with the scope `join`. Prefer BATON_JOIN_KEY."""
    key_file: str = ""
    """Key file that `baton keys` writes, read again on SIGHUP."""
    public_prefixes: tuple[str, ...] = ()
    """Texts, such as system prompts, whose cached blocks all tenants share."""
    tls_cert: str = ""
    """Certificate chain for HTTPS and the port of hosts (PEM), read again on SIGHUP."""
    tls_key: str = ""
    """Private key of `tls_cert` (PEM)."""
    insecure: bool = False
    """Allow an address beyond loopback without keys."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names of the server, which requests may have as Host. `*`: all."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server, such as `https://chat.example.com`. `*`: all."""
    proxies: tuple[str, ...] = ()
    """Addresses of reverse proxies, whose X-Forwarded-For names the client."""
    body_bytes_max: Annotated[int, Range(least=1024, most=2**31)] = 4 * 1024 * 1024
    """Larger request bodies are rejected with status 413 and not read."""
    strict_api: bool = False
    """Reject requests with unknown fields. False: ignore them, and name them in the header `Warning`."""
    choices_max: Annotated[int, Range(least=1, most=4096)] = 32
    """Maximum choices (prompts x n) of one HTTP request."""

    metrics_names: MetricsNames = "baton"
    """`vllm`: `/metrics` has vLLM's metrics besides, under their names."""
    otlp: bool = False
    """Send traces and metrics of requests by OTLP (docs/operations.md)."""

    def tenants(self) -> int:
        """Return the number of tenants whose keys may use the model. Raise ConfigError for an invalid key file."""
        entries = read_keys(Path(self.key_file)).keys if self.key_file else ()
        return len(self.api_keys) + len({entry.tenant for entry in entries if "generate" in entry.scopes})

    def problems(self) -> list[str]:
        """Return every problem of the section, for `Config.problems`."""
        found: list[str] = []
        if bool(self.tls_cert) != bool(self.tls_key):
            found.append("TLS needs both http.tls_cert and http.tls_key: give --tls-cert and --tls-key")
        if self.admin_port and self.admin_port == self.port:
            found.append(f"http.admin_port and http.port are {self.port}: give the admin routes a port of their own")
        keys = [*self.api_keys, *filter(None, (self.admin_key, self.join_key))]
        if not all(keys):
            found.append("http.api_keys holds an empty key, which every client would match: remove it")
        if len(set(keys)) < len(keys):
            found.append("two of the API, admin and join keys are the same: give each its own")
        return found

    def missing_keys(self) -> list[str]:
        """Return an error for each setting that exposes a server without keys, unless `insecure` is set."""
        if self.api_keys or self.key_file or self.insecure:
            return []
        remedy = "give it --api-key-file or --keys, or allow everything to every client with --insecure"
        found: list[str] = []
        if not is_loopback(self.host):
            found.append(f"http.host is {self.host}, so other machines reach this server, but it has no keys: {remedy}")
        if self.admin_port and not is_loopback(self.admin_host) and not self.admin_key:
            found.append(f"http.admin_host is {self.admin_host}, but there is no key for it: give it --admin-key")
        for name, values in (("allowed_hosts", self.allowed_hosts), ("cors_origins", self.cors_origins)):
            if "*" in values:
                found.append(f"http.{name} has *, so every web page may use this server, but it has no keys: {remedy}")
        return found


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server on this address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a host name, not an address
        return False
