"""Two sides case by case: what changed, why, and how often two cards agree."""
