#!/bin/bash
# Two hosts with 8 ranks each: `sbatch examples/slurm.sh`. One task a host; spmd run starts the ranks of each.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@120

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun spmd run -n "${RANKS:-8}" --nnodes "$SLURM_NNODES" --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:29500" \
    "${SCRIPT:-examples/train_gpt.py}" "$@"
