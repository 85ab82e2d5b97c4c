#!/bin/sh
# Eight GPUs of one machine: a GPT of 1.2 billion parameters on Python's standard library, ZeRO stage 3, over NCCL.
#
#     sh examples/launch/eight_gpus.sh                  # all GPUs that are there, eight or fewer
#     sh examples/launch/eight_gpus.sh --stage 2        # options of examples/train_gpt.py, the last one counts
#     STEPS=100 sh examples/launch/eight_gpus.sh
#
# torchrun starts a process per GPU and gives each its number; train_gpt.py makes the process group.
set -eu

here=$(dirname "$0")
gpus=${GPUS:-$(nvidia-smi --list-gpus | head -n 8 | wc -l)}
if [ "$gpus" -lt 1 ]; then
    echo "no GPU found: nvidia-smi --list-gpus lists none. Set GPUS to use so many processes all the same." >&2
    exit 1
fi

# What PyTorch's allocator gives back to the device it can use for another size: less fragmentation (docs/cuda.md).
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

# --standalone: this machine alone, at a free port, so that two runs on one machine do not meet.
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "$gpus" "$here/../train_gpt.py" \
    --stage 3 --layers 24 --dim 2048 --heads 16 --context 1024 --batch 8 --lr 3e-4 --steps "${STEPS:-1000}" "$@"
