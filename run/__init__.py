"""Engine folders to text."""
