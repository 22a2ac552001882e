"""Write docs/sbom.cdx.json, the CycloneDX list of everything that an install brings (`--check`: only compare)."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from docgen import ROOT, publish

PINNED = re.compile(r"^([\w.-]+)==([^\s;\\]+)(?: ; ([^\\\n]+?))?(?: \\)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True, order=True)
class Pin:
    """One locked version of a package."""

    name: str
    version: str
    marker: str
    """The platforms that it is installed on, as in a requirements file. Empty: all."""


def pins(file: Path) -> list[Pin]:
    """Return the pinned versions of a requirements file."""
    return [Pin(name, version, marker) for name, version, marker in PINNED.findall(file.read_text(encoding="utf-8"))]


def component(pin: Pin, *, required: bool) -> dict[str, object]:
    purl = f"pkg:pypi/{pin.name}@{pin.version}"
    scope = "required" if required else "optional"
    found: dict[str, object] = {"type": "library", "bom-ref": purl, "name": pin.name, "version": pin.version}
    found |= {"scope": scope, "purl": purl}
    if pin.marker:
        found["properties"] = [{"name": "baton:marker", "value": pin.marker}]
    return found


def render() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    served = {*pins(ROOT / "locks" / "base.txt"), *pins(ROOT / "constraints.txt")}
    tested = {*pins(ROOT / "locks" / "dev.txt"), *pins(ROOT / "locks" / "node.txt")} - served
    components = [component(pin, required=True) for pin in sorted(served)]
    components += [component(pin, required=False) for pin in sorted(tested)]
    root = {"type": "application", "bom-ref": project["name"], "name": project["name"], "version": project["version"]}
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": root}}
    return json.dumps({**head, "components": components}, indent=1)


if __name__ == "__main__":
    sys.exit(publish("sbom.cdx.json", render, sys.argv[1:]))
