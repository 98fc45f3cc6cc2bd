"""What is shown: one HTML file a run, and the tables of a terminal."""
