"""TaskD's manager, which runs the controller; beside the launcher of node 0."""

import os

from taskd.api import init_taskd_manager, start_taskd_manager

if __name__ == "__main__":
    init_taskd_manager(
        {
            "job_id": os.environ["MINDX_TASK_ID"],
            "node_nums": int(os.environ["NNODES"]),
            "proc_per_node": int(os.environ["NPROC_PER_NODE"]),
        }
    )
    start_taskd_manager()
