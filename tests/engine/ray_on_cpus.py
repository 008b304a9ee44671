"""processes.py on Ray, with a worker on each of two nodes. vLLM knows no resource of Ray's for a CPU, and refuses it:
Ray is told of two GPUs, one on each node, that are not there.
"""

import json
import os
import sys


def enable() -> None:
    """Called in every process of Ray's."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


def main() -> None:
    import processes
    import ray
    from ray.cluster_utils import Cluster

    enable()
    node = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address, runtime_env={"worker_process_setup_hook": "ray_on_cpus.enable"})
    assert len(ray.nodes()) == 2
    processes.tell(*json.loads(sys.argv[1]))
    os._exit(0)  # what is left of an executor waits for a worker that is gone


if __name__ == "__main__":
    main()
