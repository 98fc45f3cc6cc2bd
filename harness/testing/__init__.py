"""The contracts as functions: what a plug-in's own tests call, by way of sparsebench.testing."""
