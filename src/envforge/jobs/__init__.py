"""A plan's image and a command -> a job of the scheduler that is there (Slurm here, Kubernetes beside it)."""
