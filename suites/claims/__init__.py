"""Claims of others, one YAML file each; README.md says how they are judged."""
