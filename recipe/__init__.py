"""A recipe as jobs for Slurm, SkyPilot or Kubernetes."""
