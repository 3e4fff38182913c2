#!/usr/bin/env bash
# The command of every pod: the launcher of one node of the job. A pod that is started again runs it again, and so comes
# back into the job that waits for it.
#
# From the operator: RANK or VC_TASK_INDEX (the number of this node), MASTER_ADDR and MASTER_PORT (node 0).
# From the manifest: CONTROLLER_ADDR (this pod), NNODES, NPROC_PER_NODE, SCRIPT, and SET_ENV where devices need one.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"

node_rank="${RANK:-${VC_TASK_INDEX:-}}"
: "${node_rank:?neither RANK nor VC_TASK_INDEX says which node this is}"

# Every rank and launcher connects to node 0 by its name. Not in the manifest: operators append MASTER_ADDR to a
# container's variables, and there $(MASTER_ADDR) refers to earlier ones only.
export PROCESSOR_ADDR="$MASTER_ADDR"

if [[ -n "${SET_ENV:-}" ]]; then
    set +u # such scripts append to variables that do not exist yet
    source "$SET_ENV"
    set -u
fi

words="$(sed 's/#.*//' "$here/arguments" | xargs -n 1 printf '%s\n')"
mapfile -t arguments <<<"$words"

# exec: the launcher has to get the signals of Kubernetes.
exec ttprun --nnodes "$NNODES" --node-rank "$node_rank" --nproc-per-node "$NPROC_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --standby \
    "$SCRIPT" "${arguments[@]}"
