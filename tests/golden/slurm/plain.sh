#!/bin/bash
#SBATCH --job-name=atoll-0a1b2c-0-0
#SBATCH --array=0-3
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output=/dev/null
rank=$((SLURM_ARRAY_TASK_ID + 0))
mkdir -p "/shared/atoll/0a1b2c/logs/$rank" || exit 73
exec >> "/shared/atoll/0a1b2c/logs/$rank/00000000000000000000.log" 2>&1
exec /usr/bin/python3 -S -I /shared/atoll/0a1b2c/atoll.pyz /shared/atoll/0a1b2c/records "$rank" 0 --host "$SLURMD_NODENAME"
