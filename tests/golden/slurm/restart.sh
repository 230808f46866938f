#!/bin/bash
#SBATCH --job-name=atoll-0a1b2c-3-1000
#SBATCH --array=0,2-3
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output=/dev/null
#SBATCH --partition=main
rank=$((SLURM_ARRAY_TASK_ID + 1000))
mkdir -p "/shared/atoll/0a1b2c/logs/$rank" || exit 73
exec >> "/shared/atoll/0a1b2c/logs/$rank/00000000000000000000.log" 2>&1
exec /usr/bin/python3 -S -I /shared/atoll/0a1b2c/atoll.pyz /shared/atoll/0a1b2c/records "$rank" 3 --host "$SLURMD_NODENAME"
