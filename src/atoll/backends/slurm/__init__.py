"""The backend of Slurm: ranks as the tasks of job arrays."""
