"""The example of a server class in a real Ray Serve on this machine, as a program: `ray_serve_app.py PORT`.

It prints `running` once the application answers, and ends with its input.
"""

from __future__ import annotations

import sys

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app


def main(port: int) -> None:
    ray.init(num_cpus=4, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    config = LLMConfig(
        model_loading_config={"model_id": "served", "model_source": "hash"},
        server_cls="baton_server:BatonServer",
        engine_kwargs={"arguments": ["--mixed", "1"]},
        deployment_config={"num_replicas": 1},
    )
    serve.run(build_openai_app({"llm_configs": [config]}))
    print("running", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


main(int(sys.argv[1]))
