"""What is installed, what this machine can build and run, and why not."""
