"""Several nodes of Ray on this machine, as a program: `ray_nodes.py COUNT CPUS`.

It prints the address of the cluster and the process of each node, then kills the node of each line of its input.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main(count: int, cpus: int) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=cpus) for _ in range(count)]
    cluster.wait_for_nodes()
    print(cluster.address, *(node.all_processes["raylet"][0].process.pid for node in nodes), flush=True)
    for line in sys.stdin:
        cluster.remove_node(nodes[int(line)], allow_graceful=False)
        print("killed", flush=True)
    cluster.shutdown()


main(int(sys.argv[1]), int(sys.argv[2]))
