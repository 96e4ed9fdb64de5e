"""Stage `doctor`: installed packages, what this machine can build and run, and why not."""
