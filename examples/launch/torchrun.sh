#!/usr/bin/env bash
# Several nodes with torchrun: run this once on every node, with the same settings. Nodes may start in any order, and
# those that do not hear of each other within ten minutes give up.
#
#     HEAD=node0 NODES=4 examples/launch/torchrun.sh train.py --stage 3
#
# If a rank dies, all ranks of all nodes start again, RESTARTS times: the program goes on from its last checkpoint
# (examples/resume.py). What to change:
#
#   HEAD       the first node's name or address, as the other nodes see it; PORT must be free there and open to them
#   NODES      how many nodes; 3:4 for "four, and go on with three", which another world size then loads
#   RANKS      ranks of a node: one for each GPU, or for each few cores
#   JOB        any name, the same on all nodes and another one for each job
#   NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME   the network card between the nodes, where there are several: eth0, ib0
set -euo pipefail

HEAD=${HEAD:?"the first node: HEAD=node0 NODES=4 $0 program.py"}
PORT=${PORT:-29400}
NODES=${NODES:?"how many nodes: HEAD=node0 NODES=4 $0 program.py"}
RANKS=${RANKS:-gpu}
RESTARTS=${RESTARTS:-3}
JOB=${JOB:-zerofx}

# Without it each rank would take all cores of its node for itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec torchrun \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "$JOB" \
    --nnodes "$NODES" --nproc-per-node "$RANKS" --max-restarts "$RESTARTS" \
    "$@"
