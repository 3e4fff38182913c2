#!/usr/bin/env bash
# The command of every pod under MindCluster: torchrun with TaskD's agent, and on node 0 TaskD's manager, which starts the
# controller.
#
# From Ascend Operator: RANK (the number of this node), MASTER_ADDR (the Service of node 0), MASTER_PORT, MINDX_TASK_ID,
# and for TaskD WORLD_SIZE and PROCESS_RECOVER.
# From the manifest: POD_IP, CONTROLLER_ADDR, TTP_PORT, NNODES, NPROC_PER_NODE, SCRIPT, SET_ENV.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"

set +u # such scripts append to variables that do not exist yet
source "$SET_ENV"
set -u

# TaskD's own library has to be loaded first.
taskd="$(python -c 'import importlib.util as util; print(util.find_spec("taskd").submodule_search_locations[0])')"
export LD_PRELOAD="$taskd/python/cython_api/libs/libtaskd.so${LD_PRELOAD:+:$LD_PRELOAD}"
export TASKD_PROCESS_ENABLE=on

if [[ "$RANK" == 0 ]]; then
    export MASTER_ADDR="$POD_IP"
fi
export PROCESSOR_ADDR="$MASTER_ADDR"
if [[ "$RANK" == 0 ]]; then
    python "$here/manager.py" &
fi

words="$(sed 's/#.*//' "$here/../common/arguments" | xargs -n 1 printf '%s\n')"
mapfile -t arguments <<<"$words"

# exec: the end of the launcher, also by a signal, has to be the end of the container.
exec python "$here/torchrun.py" --nnodes "$NNODES" --node-rank "$RANK" --nproc-per-node "$NPROC_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    "$SCRIPT" "${arguments[@]}"
