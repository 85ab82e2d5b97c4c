#!/usr/bin/env bash
# Several nodes with torchrun, each told its place: for a scheduler that numbers nodes by itself, and where rank 0 has to
# be on a certain node. Otherwise torchrun.sh is simpler: its nodes find their places.
#
#     HEAD=node0 NODES=4 NODE=0 examples/launch/torchrun_static.sh train.py --stage 3     # on node0
#     HEAD=node0 NODES=4 NODE=1 examples/launch/torchrun_static.sh train.py --stage 3     # on the next; and so on
#
# What to change:
#
#   HEAD, PORT   the node of NODE=0, as the others see it, and a port that is free there and open to them
#   NODES        how many nodes; not fewer: all of them are waited for
#   NODE         this node's place, from 0
#   RANKS        ranks of a node, the same on all: one for each GPU, or for each few cores
#
# A rank that dies ends the run. Nodes that are told their places do not agree to start again; those of torchrun.sh do.
set -euo pipefail

usage="HEAD=node0 NODES=4 NODE=0 $0 program.py"
HEAD=${HEAD:?"the node of NODE=0: $usage"}
PORT=${PORT:-29400}
NODES=${NODES:?"how many nodes: $usage"}
NODE=${NODE:?"this node's place, from 0: $usage"}
RANKS=${RANKS:-gpu}

# Without it each rank would take all cores of its node for itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec torchrun \
    --master-addr "$HEAD" --master-port "$PORT" --node-rank "$NODE" \
    --nnodes "$NODES" --nproc-per-node "$RANKS" --max-restarts 0 \
    "$@"
