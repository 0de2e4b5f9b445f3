"""Ways to start workers: several on one machine, as a Slurm array, at given times."""
