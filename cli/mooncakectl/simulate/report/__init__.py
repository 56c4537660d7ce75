"""What simulations said, as one HTML file that needs nothing else."""
