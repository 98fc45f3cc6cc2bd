"""Tests of sparsebench; README.md says what is where."""
