"""The contracts as functions, which a plug-in's own tests call through sparsebench.testing."""
