#!/bin/bash -l
#SBATCH --job-name=atoll-0a1b2c-0-0
#SBATCH --array=0-3
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output=/dev/null
#SBATCH --cpus-per-task=8
#SBATCH --mem=12288M
#SBATCH --gres=nvme:1,gpu:a100_80g:2
#SBATCH --partition=gpu
#SBATCH --account=lab-7
#SBATCH --qos=high
#SBATCH --constraint=a100&nvlink
#SBATCH --reservation=course
#SBATCH --time=2-00:00:00
#SBATCH --exclusive
#SBATCH --mail-type=FAIL
rank=$((SLURM_ARRAY_TASK_ID + 0))
mkdir -p "/shared/atoll/0a1b2c/logs/$rank" || exit 73
exec >> "/shared/atoll/0a1b2c/logs/$rank/00000000000000000000.log" 2>&1
set -e
module load cuda/12.4
export NCCL_DEBUG=WARN
set +e
exec /usr/bin/python3 -S -I /shared/atoll/0a1b2c/atoll.pyz /shared/atoll/0a1b2c/records "$rank" 0 --host "$SLURMD_NODENAME"
