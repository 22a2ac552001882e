"""lm-eval measures a model through the server, by each of its kinds of requests, without a tokenizer of its own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import installed
from tests.serving import RunningServer

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1800)]
DOCUMENTS = [
    {
        "question": "Rivers flow to the",
        "choices": [" sea", " sky", " moon"],
        "answer": 0,
        "text": "The tide rose. " * 9,
    },
    {
        "question": "Bread is made of",
        "choices": [" stone", " flour", " glass"],
        "answer": 1,
        "text": "It fell again. " * 9,
    },
]
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def evaluate(server: RunningServer, folder: Path) -> dict[str, Any]:
    """Run all tasks. Return the results by task."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task}))  # JSON is YAML
    done = installed("lm-eval-0.4.13", "lm-eval[api]==0.4.13").run(
        "python", "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", ",".join(TASKS),
        "--model_args", f"base_url={server.url}/v1/completions,model=hash,num_concurrent=2,max_length=512",
        "--include_path", folder, "--output_path", folder / "out", "--log_samples",
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    [report] = (folder / "out").rglob("results_*.json")
    return json.loads(report.read_text())["results"]


def test_lm_eval_measures_by_every_kind_of_request(hash_server: RunningServer, tmp_path: Path) -> None:
    """The same documents twice: a server whose answers depended on its cache would give other values."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, again = evaluate(hash_server, tmp_path / "a"), evaluate(hash_server, tmp_path / "b")
    assert first.keys() == TASKS.keys()
    values = {name: first[name][metric] for name, metric in METRICS.items()}
    assert all(math.isfinite(value) for value in values.values()), values
    assert values["rolling"] > 1
    assert values == {name: again[name][metric] for name, metric in METRICS.items()}


METRICS = {"choice": "acc,none", "rolling": "byte_perplexity,none", "generation": "exact_match,none"}
"""The value of each task, by its name in a report."""
