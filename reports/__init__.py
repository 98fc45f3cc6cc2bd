"""What is shown: one HTML file a run."""
