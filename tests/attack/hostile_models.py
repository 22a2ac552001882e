"""Open each model of a folder in one process with bounded memory and time. Print one line of JSON per model.

Run by `test_hostile_model_files`: a crash of a native library, a hang or an allocation ends this process alone.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

from baton.compute.models.chat_template import find_template
from baton.compute.models.fingerprint import kv_identity
from baton.compute.models.open_model import open_model
from baton.compute.models.resolve import resolve_model
from baton.compute.models.rope import inverse_frequencies
from baton.compute.models.tensor_names import expected_shapes
from baton.compute.models.tokenizer import load_tokenizer
from baton.core.errors import BatonError

ADAPTER = "adapter"
"""Folder of a LoRA adapter inside the folder of a model."""
MEMORY_BYTES = 1 << 30
MODEL_S = 20
"""Processor time of one model. The valid one takes a tenth of a second."""


def open_whole(model: Path) -> str:
    """Read all that a server and its workers read. Return the text of a refusal, or an empty string."""
    try:
        adapter = model / ADAPTER
        card = resolve_model(str(model), adapter=str(adapter) if adapter.is_dir() else "")
        config, weights = open_model(card)
        kv_identity(card)
        inverse_frequencies(config)
        for name in expected_shapes(config):
            weights.read(name)
        tokenizer = load_tokenizer(card)
        tokenizer.decode(tokenizer.encode("a prompt of some words"))
        find_template(card)
    except BatonError as error:
        return str(error)
    return ""


def _end_late(number: int, frame: object) -> None:
    raise TimeoutError(f"still busy after {MODEL_S} s of processor time")


def main(folder: Path) -> None:
    """Open each model of the folder, by name."""
    own_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own_bytes + MEMORY_BYTES,) * 2)
    signal.signal(signal.SIGVTALRM, _end_late)
    for model in sorted(folder.iterdir()):
        signal.setitimer(signal.ITIMER_VIRTUAL, MODEL_S)
        print(json.dumps({"model": model.name, "refusal": open_whole(model)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
